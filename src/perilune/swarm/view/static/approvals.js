// Calls that wait for a person, each with exactly what it would run with. A decision names the hash of what was shown.

import { command, getJSON } from "./connection.js";
import { el } from "./dom.js";

export class ApprovalList {
  constructor(section, { onSelect }) {
    this.section = section;
    this.onSelect = onSelect;
    this.cards = new Map();
  }

  show(store) {
    const wanted = new Set(store.approvals.map((request) => request.id));
    for (const [id, card] of this.cards) {
      if (wanted.has(id)) continue;
      card.remove();
      this.cards.delete(id);
    }
    for (const request of store.approvals) {
      if (this.cards.has(request.id)) continue;
      const card = this.#card(request, store);
      this.cards.set(request.id, card);
      this.section.append(card);
    }
    this.section.hidden = this.cards.size === 0;
  }

  #card(request, store) {
    const agent = store.agents.find((each) => each.id === request.agent);
    const shown = el("pre", { class: "arguments", tabindex: 0, text: request.arguments });
    const problem = el("span", { class: "problem", role: "alert" });
    const allow = el("button", { type: "button", class: "allow", text: "Allow", disabled: !request.whole });
    const deny = el("button", { type: "button", class: "deny", text: "Deny" });
    const decide = async (decision) => {
      allow.disabled = deny.disabled = true;
      problem.textContent = "";
      try {
        await command("approve", { id: request.id, decision, arguments_sha256: request.arguments_sha256 });
      } catch (error) {
        problem.textContent = error.message;
        allow.disabled = !request.whole;
        deny.disabled = false;
      }
    };
    allow.addEventListener("click", () => decide("allow"));
    deny.addEventListener("click", () => decide("deny"));
    let more = null;
    if (!request.whole) {
      more = el("button", { type: "button", text: "Show all of it before you allow it" });
      more.addEventListener("click", async () => {
        try {
          const whole = await getJSON(`/api/approval/${encodeURIComponent(request.id)}`);
          if (whole.arguments_sha256 !== request.arguments_sha256) throw new Error("the request has changed");
          shown.textContent = whole.arguments;
          request.whole = true;
          allow.disabled = false;
          more.remove();
        } catch (error) {
          problem.textContent = error.message;
        }
      });
    }
    const who = el("button", { type: "button", class: "link", text: agent?.name ?? request.agent, title: request.agent });
    if (agent) who.addEventListener("click", () => this.onSelect(agent.number, { open: true }));
    const title = el("p", {}, who, el("span", { text: " wants to call " }), el("b", { text: request.tool }));
    if (request.reason) title.append(el("span", { class: "reason", text: ` ${request.reason}` }));
    return el("article", { class: "approval" }, title, shown, el("p", { class: "actions" }, allow, deny, more, problem));
  }
}
