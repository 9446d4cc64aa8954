// Calls that wait for a person, each with exactly what it would run with. A decision names the hash of what was shown.
// A card that has just come, or come to another place, cannot be allowed yet: a click may have been meant for the one
// that was there before.

import { command, getJSON } from "./connection.js";
import { el } from "./dom.js";
import { exact, warning } from "./exact.js";

const SETTLE_MS = 600;

export class ApprovalList {
  constructor(section, { onSelect }) {
    this.section = section;
    this.onSelect = onSelect;
    this.cards = new Map();
  }

  show(store) {
    const wanted = new Set(store.approvals.map((request) => request.id));
    let moved = false;
    for (const [id, card] of this.cards) {
      if (moved) card.settle();
      if (wanted.has(id)) continue;
      moved = true; // those that follow, by what is now gone
      card.remove();
      this.cards.delete(id);
    }
    for (const request of store.approvals) {
      if (this.cards.has(request.id)) continue;
      const card = this.#card(request, store);
      this.cards.set(request.id, card);
      this.section.append(card);
      card.settle();
    }
    this.section.hidden = this.cards.size === 0;
  }

  #card(request, store) {
    const agent = store.agents.find((each) => each.id === request.agent);
    const shown = el("pre", { class: "arguments", tabindex: 0 }, ...exact(request.arguments));
    const alike = el("p", { class: "alike", text: warning(request.arguments) });
    const problem = el("span", { class: "problem", role: "alert" });
    const allow = el("button", { type: "button", class: "allow", text: "Allow", disabled: true });
    const deny = el("button", { type: "button", class: "deny", text: "Deny" });
    let { whole } = request;
    let isDeciding = false;
    let settling = 0;
    const refresh = () => {
      allow.disabled = !whole || isDeciding || settling !== 0;
      deny.disabled = isDeciding;
    };
    const settle = () => {
      clearTimeout(settling);
      settling = setTimeout(() => {
        settling = 0;
        refresh();
      }, SETTLE_MS);
      refresh();
    };
    const decide = async (decision) => {
      isDeciding = true;
      refresh();
      problem.textContent = "";
      try {
        await command("approve", { id: request.id, decision, arguments_sha256: request.arguments_sha256 });
      } catch (error) {
        problem.textContent = error.message;
        isDeciding = false;
        refresh();
      }
    };
    allow.addEventListener("click", () => decide("allow"));
    deny.addEventListener("click", () => decide("deny"));
    let more = null;
    if (!request.whole) {
      more = el("button", { type: "button", text: "Show all of it before you allow it" });
      more.addEventListener("click", async () => {
        try {
          const all = await getJSON(`/api/approval/${encodeURIComponent(request.id)}`);
          if (all.arguments_sha256 !== request.arguments_sha256) throw new Error("the request has changed");
          shown.replaceChildren(...exact(all.arguments));
          alike.textContent = warning(all.arguments);
          whole = true;
          more.remove();
          settle();
        } catch (error) {
          problem.textContent = error.message;
        }
      });
    }
    const who = el("button", { type: "button", class: "link", title: request.agent }, ...exact(agent?.name ?? request.agent));
    if (agent) who.addEventListener("click", () => this.onSelect(agent.number, { open: true }));
    const title = el("p", {}, who, el("span", { text: " wants to call " }), el("b", {}, ...exact(request.tool)));
    if (request.reason) title.append(el("span", { class: "reason" }, " ", ...exact(request.reason)));
    const card = el("article", { class: "approval" }, title, shown, alike, el("p", { class: "actions" }, allow, deny, more, problem));
    return Object.assign(card, { settle });
  }
}
