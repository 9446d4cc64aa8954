// The agents as a tree of which only the rows on the screen exist.

import { count, duration, el, setText } from "./dom.js";

export const ROW = 26;
const SPARE = 6;
const MARKS = { running: "●", waiting: "◔", queued: "○", done: "✓", failed: "✕", cancelled: "⊘", budget: "▣" };
const ACTIVE = new Set(["running", "waiting"]);

export class Tree {
  constructor(tree, space, { onSelect, onScroll }) {
    this.tree = tree;
    this.space = space;
    this.onSelect = onSelect;
    this.rows = []; // agents in the order shown
    this.selected = null;
    this.collapsed = new Set();
    this.filter = "";
    this.only = "";
    this.pool = new Map(); // number -> row element
    this.shape = -1;
    tree.addEventListener("scroll", () => {
      this.draw();
      onScroll();
    });
    tree.addEventListener("keydown", (event) => this.#key(event));
    space.addEventListener("click", (event) => this.#click(event));
  }

  show(store) {
    const reshaped = store !== this.store || store.shape !== this.shape || this.filter || this.only;
    this.store = store;
    if (reshaped) this.arrange();
    this.draw();
  }

  arrange() {
    const { agents } = this.store;
    const wanted = this.filter.toLowerCase();
    const isWanted = (agent) => {
      if (this.only === "active" ? !ACTIVE.has(agent.status) : this.only && agent.status !== this.only) return false;
      return !wanted || `${agent.name} ${agent.id} ${agent.activity} ${agent.status} ${agent.task}`.toLowerCase().includes(wanted);
    };
    this.rows = [];
    if (wanted || this.only) {
      this.rows = agents.filter(isWanted);
    } else {
      const stack = agents.filter((agent) => agent.parent === null).reverse();
      while (stack.length) {
        const agent = stack.pop();
        this.rows.push(agent);
        if (!this.collapsed.has(agent.number)) for (let i = agent.children.length; i--; ) stack.push(agent.children[i]);
      }
    }
    this.shape = this.store.shape;
    this.space.style.height = `${this.rows.length * ROW}px`;
  }

  draw() {
    if (!this.store) return;
    const { scrollTop, clientHeight } = this.tree;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / ROW) + SPARE);
    const kept = new Set();
    const now = this.store.now();
    for (let position = first; position < last; position += 1) {
      const agent = this.rows[position];
      kept.add(agent.number);
      let row = this.pool.get(agent.number);
      if (!row) {
        row = makeRow(agent.number);
        this.pool.set(agent.number, row);
        this.space.append(row);
      }
      this.#fill(row, agent, position, now);
    }
    for (const [number, row] of this.pool) {
      if (kept.has(number)) continue;
      row.remove();
      this.pool.delete(number);
    }
    const active = this.selected !== null && kept.has(this.selected) ? `agent-${this.selected}` : "";
    if (this.tree.getAttribute("aria-activedescendant") !== active) {
      if (active) this.tree.setAttribute("aria-activedescendant", active);
      else this.tree.removeAttribute("aria-activedescendant");
    }
  }

  #fill(row, agent, position, now) {
    const isOpen = !this.collapsed.has(agent.number);
    const doing = agent.activity ? `${agent.activity}  ${since(now - agent.since)}` : "";
    const isSelected = agent.number === this.selected;
    const flat = this.filter || this.only;
    const key = `${position}|${agent.status}|${doing}|${agent.steps}|${agent.tokens}|${agent.tainted}|${agent.name}|${agent.task}|${agent.children.length}|${isOpen}|${isSelected}|${flat}|${agent.depth}`;
    if (row.key === key) return;
    row.key = key;
    const [twist, mark, name, taint, activity, steps, tokens] = row.children;
    row.style.transform = `translateY(${position * ROW}px)`;
    row.style.setProperty("--depth", flat ? 0 : Math.min(agent.depth, 12));
    row.className = `row ${agent.status}${isSelected ? " selected" : ""}`;
    row.setAttribute("aria-level", agent.depth + 1);
    row.setAttribute("aria-selected", isSelected);
    if (agent.children.length && !flat) row.setAttribute("aria-expanded", isOpen);
    else row.removeAttribute("aria-expanded");
    setText(twist, agent.children.length && !flat ? (isOpen ? "▾" : "▸") : "");
    setText(mark, MARKS[agent.status] ?? "·");
    setText(name, isOpen || !agent.children.length ? agent.name : `${agent.name} (${agent.children.length})`);
    setText(taint, agent.tainted ? "◈" : "");
    taint.title = "has read content from outside";
    // Agents of one kind have one name: what sets them apart is the task.
    setText(activity, doing || (agent.parent === null ? "" : agent.task) || agent.status);
    row.title = `${agent.id}\n${agent.status}${doing ? `: ${doing}` : ""}\n\n${agent.task}`;
    setText(steps, String(agent.steps));
    setText(tokens, count(agent.tokens));
  }

  select(number, { scroll = true } = {}) {
    this.selected = number;
    const position = this.rows.findIndex((agent) => agent.number === number);
    if (scroll && position >= 0) {
      const top = position * ROW;
      const { scrollTop, clientHeight } = this.tree;
      if (top < scrollTop) this.tree.scrollTop = top;
      else if (top + ROW > scrollTop + clientHeight) this.tree.scrollTop = top + ROW - clientHeight;
    }
    this.draw();
  }

  toggle(number, open) {
    if (open ?? this.collapsed.has(number)) this.collapsed.delete(number);
    else this.collapsed.add(number);
    this.arrange();
    this.draw();
  }

  #click(event) {
    const row = event.target.closest(".row");
    if (!row) return;
    const number = Number(row.dataset.number);
    if (event.target.classList.contains("twist") && this.store.agents[number].children.length) this.toggle(number);
    else this.onSelect(number);
  }

  #key(event) {
    const position = this.rows.findIndex((agent) => agent.number === this.selected);
    const agent = this.rows[position];
    const page = Math.max(1, Math.floor(this.tree.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves && this.rows.length) {
      const next = position < 0 ? 0 : Math.max(0, Math.min(this.rows.length - 1, position + moves[event.key]));
      this.onSelect(this.rows[next].number);
    } else if (event.key === "ArrowRight" && agent) {
      if (this.collapsed.has(agent.number)) this.toggle(agent.number, true);
      else if (agent.children.length) this.onSelect(agent.children[0].number);
    } else if (event.key === "ArrowLeft" && agent) {
      if (agent.children.length && !this.collapsed.has(agent.number)) this.toggle(agent.number, false);
      else if (agent.parent !== null) this.onSelect(agent.parent);
    } else if ((event.key === "Enter" || event.key === " ") && agent) {
      this.onSelect(agent.number, { open: true });
    } else {
      return;
    }
    event.preventDefault();
  }
}

// Coarser than a duration: it changes all the time.
const since = (ms) => (ms < 10000 ? `${(Math.max(0, ms) / 1000).toFixed(1)} s` : duration(ms));

function makeRow(number) {
  const parts = ["twist", "mark", "name", "taint", "activity", "steps", "tokens"];
  const row = el("div", { class: "row", role: "treeitem", id: `agent-${number}`, "data-number": number });
  for (const part of parts) row.append(el("span", { class: part }));
  return row;
}
