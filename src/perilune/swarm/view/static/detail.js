// The right side: the run as a whole, or one agent with its transcript, live; steering and cancelling.

import { artefactView } from "./artefact.js";
import { command, getJSON } from "./connection.js";
import { count, duration, el, money, setText } from "./dom.js";
import { entryView, isComplete } from "./transcript.js";

const PAGE = 60;
const MOST = 240; // entries in the page at a time
const PAUSE_MS = 300;

export class Detail {
  constructor(section, { onClose }) {
    this.section = section;
    this.onClose = onClose;
    this.number = null;
    this.visit = 0; // counts what was opened: an answer to an earlier one is dropped
    this.key = "";
  }

  open(number, store) {
    this.number = number;
    this.visit += 1;
    this.busy = false;
    this.key = "";
    this.section.replaceChildren();
    if (number !== null) this.#frame(store.agents[number], store);
    this.show(store, this.until);
  }

  // `until` is the moment shown, in a replay: what came later is hidden.
  show(store, until = null) {
    this.store = store;
    this.until = until;
    if (this.number === null) this.#run(store);
    else if (store.agents[this.number]) this.#agent(store.agents[this.number], store);
  }

  // The run ------------------------------------------------------------------------------------------------------------

  #run(store) {
    const { run, totals } = store;
    const used = {
      calls: totals.model_calls,
      steps: totals.steps,
      agents: Math.max(0, totals.agents - 1),
      tokens: totals.prompt_tokens + totals.completion_tokens,
      cost: totals.cost,
      seconds: store.now() / 1000,
    };
    const budgets = Object.entries(run.limits ?? {}).filter(([name, limit]) => Object.hasOwn(used, name) && Number.isFinite(limit));
    const key = `${run.task}|${run.status}|${run.ended}|${run.answer?.sha256}|${budgets.length}`;
    if (key !== this.key) {
      this.key = key;
      this.meters = {};
      const parts = [el("h2", { text: "Run" }), el("pre", { class: "text task", text: run.task || "…" })];
      if (run.model) parts.push(el("p", { class: "faint", text: `model ${run.model}` }));
      if (run.error) parts.push(el("pre", { class: "text problem", text: run.error }));
      if (run.answer) parts.push(el("h3", { text: "Answer" }), artefactView(run.answer, "answer", { open: true }));
      parts.push(el("h3", { text: "Budget" }), budgets.length ? this.#budgets(budgets) : el("p", { class: "faint", text: "no limits" }));
      parts.push(el("p", { class: "faint hint", text: "Choose an agent to see its transcript. Keys: / filter, arrows move, Enter opens, Esc closes; on the timeline + − 0 and arrows." }));
      this.section.replaceChildren(...parts);
    }
    for (const [name, limit] of budgets) {
      const meter = this.meters[name];
      if (!meter) continue;
      const spent = used[name] ?? 0;
      const show = name === "cost" ? money : name === "seconds" ? (s) => duration(s * 1000) : count;
      setText(meter.text, `${show(spent)} of ${show(limit)}`);
      meter.bar.value = limit ? Math.min(1, spent / limit) : 1;
    }
  }

  #budgets(budgets) {
    const list = el("dl", { class: "budgets" });
    for (const [name] of budgets) {
      const text = el("span");
      const bar = el("progress", { max: 1, value: 0, "aria-label": name });
      this.meters[name] = { text, bar };
      list.append(el("dt", { text: name }), el("dd", {}, bar, text));
    }
    return list;
  }

  // One agent ----------------------------------------------------------------------------------------------------------

  #frame(agent, store) {
    this.id = agent.id;
    this.first = null;
    this.entries = [];
    this.views = [];
    this.seen = -1;
    this.list = el("div", { class: "entries" });
    this.facts = el("p", { class: "facts" });
    this.problem = el("p", { class: "problem", role: "alert" });
    this.earlier = el("button", { type: "button", class: "earlier", text: "Show earlier entries", hidden: true });
    this.earlier.addEventListener("click", () => this.#loadEarlier());
    const close = el("button", { type: "button", class: "quiet", text: "×", title: "Close (Esc)", "aria-label": "Close" });
    close.addEventListener("click", () => this.onClose());
    this.tools = store.controls ? this.#controls(agent) : null;
    const head = el("div", { class: "agent-head" }, el("h2", { text: agent.name, title: agent.id }), close);
    const top = el("div", { class: "agent-top" }, head, el("p", { class: "id", text: agent.id }), this.facts);
    if (this.tools) top.append(this.tools);
    top.append(this.problem);
    this.scroll = el("div", { class: "scroll" }, this.earlier, this.list);
    this.section.replaceChildren(top, this.scroll);
  }

  #controls(agent) {
    const text = el("textarea", { rows: 1, placeholder: "Message to this agent", title: "Read before its next step. Ctrl+Enter sends.", "aria-label": "Message to the agent" });
    const send = el("button", { type: "button", text: "Steer" });
    const cancel = el("button", { type: "button", class: "deny", text: "Cancel agent" });
    const said = el("span", { class: "said", role: "status" });
    const act = async (name, body, done) => {
      this.problem.textContent = said.textContent = "";
      try {
        await command(name, { agent: agent.id, ...body });
        said.textContent = done;
        return true;
      } catch (error) {
        this.problem.textContent = error.message;
        return false;
      }
    };
    send.addEventListener("click", async () => {
      if (text.value.trim() && (await act("steer", { text: text.value }, "sent"))) text.value = "";
    });
    text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send.click();
      event.stopPropagation();
    });
    cancel.addEventListener("click", async () => {
      if (cancel.dataset.sure) {
        delete cancel.dataset.sure;
        cancel.textContent = "Cancel agent";
        await act("cancel", {}, "cancelled");
        return;
      }
      cancel.dataset.sure = "1";
      cancel.textContent = "Really cancel it and all below?";
      setTimeout(() => {
        delete cancel.dataset.sure;
        cancel.textContent = "Cancel agent";
      }, 4000);
    });
    return el("div", { class: "controls" }, text, send, cancel, said);
  }

  #agent(agent, store) {
    const until = agent.ended ?? store.now();
    const facts = [
      agent.status + (agent.activity ? ` (${agent.activity})` : ""),
      `${agent.steps} steps`,
      `${count(agent.tokens)} tokens`,
      agent.cost ? `cost ${money(agent.cost)}` : "",
      agent.started === null ? "" : duration(until - agent.started),
      agent.model,
      agent.tasks > 1 ? `${agent.tasks} tasks` : "",
      agent.tainted ? "◈ has read content from outside" : "",
    ];
    setText(this.facts, facts.filter(Boolean).join("  ·  "));
    if (this.tools) this.tools.hidden = agent.ended !== null || this.until !== null;
    this.#hideLater();
    if (agent.entries !== this.seen && !this.busy && !store.closed) this.#load(agent);
  }

  async #load(agent) {
    this.busy = true;
    const { visit } = this;
    const seen = agent.entries;
    try {
      if (this.first === null) this.first = Math.max(0, agent.length - PAGE);
      const firstOpen = this.entries.findIndex((entry) => !isComplete(entry));
      const from = this.first + (firstOpen < 0 ? this.entries.length : firstOpen);
      const { entries } = await getJSON(`/api/agent/${encodeURIComponent(this.id)}?start=${from}`);
      if (visit !== this.visit) return;
      this.seen = seen;
      this.problem.textContent = "";
      this.#place(entries, from - this.first);
    } catch (error) {
      if (visit !== this.visit) return;
      this.problem.textContent = error.message;
      this.seen = seen;
    } finally {
      // Not at once again: an agent may act many times a second.
      setTimeout(() => {
        if (visit !== this.visit) return;
        this.busy = false;
        this.show(this.store, this.until);
      }, PAUSE_MS);
    }
  }

  #hideLater() {
    this.entries.forEach((entry, at) => (this.views[at].hidden = this.until !== null && entry.time > this.until));
  }

  #place(entries, at) {
    const atEnd = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < 40;
    entries.forEach((entry, offset) => {
      const position = at + offset;
      const text = JSON.stringify(entry);
      if (this.views[position]?.source === text) return;
      const view = entryView(entry);
      view.source = text;
      const old = this.views[position];
      if (old) {
        const open = [...old.querySelectorAll("details")].map((details) => details.open);
        view.querySelectorAll("details").forEach((details, index) => (details.open = open[index] ?? details.open));
        old.replaceWith(view);
      } else {
        this.list.append(view);
      }
      this.views[position] = view;
      this.entries[position] = entry;
    });
    while (this.views.length > MOST) {
      this.views.shift().remove();
      this.entries.shift();
      this.first += 1;
    }
    this.earlier.hidden = this.first === 0;
    this.#hideLater();
    if (atEnd) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  async #loadEarlier() {
    const end = this.first;
    const start = Math.max(0, end - PAGE);
    const { visit } = this;
    const { entries } = await getJSON(`/api/agent/${encodeURIComponent(this.id)}?start=${start}&end=${end}`);
    if (visit !== this.visit || this.first !== end) return;
    const height = this.scroll.scrollHeight;
    const views = entries.map((entry) => Object.assign(entryView(entry), { source: JSON.stringify(entry) }));
    this.list.prepend(...views);
    this.views.unshift(...views);
    this.entries.unshift(...entries);
    this.first = start;
    this.earlier.hidden = start === 0;
    this.scroll.scrollTop += this.scroll.scrollHeight - height;
  }
}
