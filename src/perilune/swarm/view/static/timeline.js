// What each agent did when, on one canvas beside the tree: one row for each row of the tree, at the same height.

import { colour, duration } from "./dom.js";
import { ROW } from "./tree.js";

const AXIS = 22;
const MODEL = 0, TOOL = 1, WAIT = 2;
const COLOURS = ["--model", "--tool", "--wait", "--many"];

export class Timeline {
  constructor(canvas, tip, tree, { onSelect }) {
    this.canvas = canvas;
    this.tip = tip;
    this.tree = tree;
    this.onSelect = onSelect;
    this.range = null; // [from, to] in ms once somebody zoomed; the whole run before
    this.until = null; // the moment of a replay
    this.context = canvas.getContext("2d");
    this.colour = {};
    new ResizeObserver(() => this.#resize()).observe(canvas.parentElement);
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.#grab(event));
    canvas.addEventListener("pointermove", (event) => this.#hover(event));
    canvas.addEventListener("pointerleave", () => (tip.hidden = true));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    this.readColours();
  }

  readColours() {
    const names = [...COLOURS, "--failed", "--critical", "--faint", "--line", "--selected", "--card", "--text"];
    for (const name of names) this.colour[name] = colour(name);
    this.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    this.draw();
  }

  // `end` is the end of the whole run, also while an earlier moment is shown.
  show(store, until, end) {
    this.store = store;
    this.until = until;
    this.end = end;
    this.draw();
  }

  // The part of time on the screen.
  span() {
    const end = Math.max(1000, this.end ?? 0);
    const [from, to] = this.range ?? [0, end * 1.01];
    return { from, to, end };
  }

  zoom(factor, at = 0.5) {
    const { from, to, end } = this.span();
    const length = Math.min(Math.max((to - from) * factor, 20), end * 1.01);
    const centre = from + (to - from) * at;
    this.#look(centre - length * at, length, end);
  }

  pan(part) {
    const { from, to, end } = this.span();
    this.#look(from + (to - from) * part, to - from, end);
  }

  fit() {
    this.range = null;
    this.draw();
  }

  #look(from, length, end) {
    const start = Math.max(0, Math.min(from, end * 1.01 - length));
    this.range = length >= end ? null : [start, start + length];
    this.draw();
  }

  #resize() {
    const { clientWidth, clientHeight } = this.canvas.parentElement;
    const ratio = window.devicePixelRatio || 1;
    this.size = [clientWidth, clientHeight];
    this.canvas.width = Math.max(1, Math.round(clientWidth * ratio));
    this.canvas.height = Math.max(1, Math.round(clientHeight * ratio));
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw();
  }

  draw() {
    if (!this.store || !this.size || !this.size[0]) return;
    const [width, height] = this.size;
    const { from, to } = this.span();
    const context = this.context;
    const scale = width / (to - from);
    const x = (ms) => (ms - from) * scale;
    const now = this.until ?? this.store.now();
    context.clearRect(0, 0, width, height);
    this.#axis(context, from, to, x, width, height);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, height - AXIS);
    context.clip();
    const scroll = this.tree.tree.scrollTop;
    const first = Math.max(0, Math.floor(scroll / ROW));
    const last = Math.min(this.tree.rows.length, Math.ceil((scroll + height) / ROW));
    for (let position = first; position < last; position += 1) {
      const agent = this.tree.rows[position];
      const top = AXIS + position * ROW - scroll;
      if (agent.number === this.tree.selected) {
        context.fillStyle = this.colour["--selected"];
        context.fillRect(0, top, width, ROW);
      }
      this.#row(context, agent, top, x, now, from, to);
    }
    if (!this.tree.tree.checkVisibility({ visibilityProperty: true })) this.#names(context, first, last, scroll);
    if (this.until !== null) {
      context.fillStyle = this.colour["--failed"];
      context.fillRect(x(now), AXIS, 1.5, height);
    }
    context.restore();
  }

  // On a small screen the tree is on another tab.
  #names(context, first, last, scroll) {
    context.font = this.font;
    context.lineJoin = "round";
    context.lineWidth = 3;
    for (let position = first; position < last; position += 1) {
      const agent = this.tree.rows[position];
      const y = AXIS + position * ROW - scroll + ROW / 2;
      const name = `${"  ".repeat(Math.min(agent.depth, 4))}${agent.name.slice(0, 40)}`;
      context.strokeStyle = this.colour["--card"];
      context.strokeText(name, 4, y);
      context.fillStyle = this.colour["--text"];
      context.fillText(name, 4, y);
    }
  }

  #axis(context, from, to, x, width, height) {
    const step = niceStep((to - from) / Math.max(2, width / 110));
    context.font = this.font;
    context.textBaseline = "middle";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      context.fillStyle = this.colour["--line"];
      context.fillRect(Math.round(x(at)), AXIS - 4, 1, height);
      context.fillStyle = this.colour["--faint"];
      context.fillText(at === 0 ? "0" : duration(at), Math.round(x(at)) + 4, AXIS / 2);
    }
    context.fillStyle = this.colour["--line"];
    context.fillRect(0, AXIS - 1, width, 1);
  }

  #row(context, agent, top, x, now, from, to) {
    if (agent.started === null) return;
    const end = Math.min(agent.ended ?? now, now);
    if (agent.started > now) return;
    context.fillStyle = this.colour["--line"];
    context.fillRect(x(agent.started), top + ROW / 2 - 0.5, Math.max(1, x(end) - x(agent.started)), 1);
    let drawn = -1;
    let drawnKind = -1;
    for (const bar of this.store.bars[agent.number] ?? []) {
      const [kind, start, stop, step, , failed] = bar;
      if (stop < from || start > to || start > now) continue;
      const left = x(start);
      const right = Math.max(left + 1, x(Math.min(stop, now)) - 0.5);
      if (kind === drawnKind && !failed && right - drawn < 0.7) continue; // thinner than a pixel
      drawn = right;
      drawnKind = kind;
      this.#bar(context, kind, failed, left, right, top);
      if (kind === MODEL && this.store.critical.has(`${agent.number}.${step}`)) {
        context.fillStyle = this.colour["--critical"];
        context.fillRect(left, top + ROW - 5, right - left, 3);
      }
    }
    if (agent.activity && agent.since <= now) {
      const kind = agent.activity === "model" ? MODEL : agent.status === "waiting" ? WAIT : TOOL;
      context.globalAlpha = 0.55;
      this.#bar(context, kind, 0, x(agent.since), Math.max(x(agent.since) + 2, x(now)), top);
      context.globalAlpha = 1;
    }
  }

  #bar(context, kind, failed, left, right, top) {
    context.fillStyle = this.colour[failed ? "--failed" : COLOURS[kind]];
    if (kind === WAIT) context.fillRect(left, top + ROW / 2 - 2, right - left, 4);
    else context.fillRect(left, top + 6, right - left, ROW - 13);
  }

  #wheel(event) {
    event.preventDefault();
    const { left, width } = this.canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY / 300), (event.clientX - left) / width);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / width);
    else this.tree.tree.scrollTop += event.deltaY;
  }

  #grab(event) {
    this.canvas.setPointerCapture(event.pointerId);
    const begin = { x: event.clientX, y: event.clientY, from: this.span().from, scroll: this.tree.tree.scrollTop };
    const { width } = this.canvas.getBoundingClientRect();
    let moved = false;
    const move = (to) => {
      moved ||= Math.hypot(to.clientX - begin.x, to.clientY - begin.y) > 4;
      if (!moved) return;
      const { from, to: until, end } = this.span();
      if (this.range) this.#look(begin.from - ((to.clientX - begin.x) / width) * (until - from), until - from, end);
      this.tree.tree.scrollTop = begin.scroll - (to.clientY - begin.y);
    };
    const release = () => {
      this.canvas.removeEventListener("pointermove", move);
      const agent = this.#agentAt(begin.y);
      if (!moved && agent) this.onSelect(agent.number);
    };
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", release, { once: true });
    this.canvas.addEventListener("pointercancel", () => this.canvas.removeEventListener("pointermove", move), { once: true });
  }

  #agentAt(clientY) {
    const y = clientY - this.canvas.getBoundingClientRect().top - AXIS + this.tree.tree.scrollTop;
    return y < 0 ? undefined : this.tree.rows[Math.floor(y / ROW)];
  }

  #hover(event) {
    const agent = this.#agentAt(event.clientY);
    if (!agent || event.buttons) {
      this.tip.hidden = true;
      return;
    }
    const box = this.canvas.getBoundingClientRect();
    const { from, to } = this.span();
    const at = from + ((event.clientX - box.left) / box.width) * (to - from);
    const near = ((to - from) / box.width) * 2;
    const bar = (this.store.bars[agent.number] ?? []).findLast(([, start, stop]) => start - near <= at && at <= stop + near);
    let text = `${agent.name}\n${duration(at)}`;
    if (bar) {
      const [kind, start, stop, step, label, failed] = bar;
      const what = kind === MODEL ? "model" : kind === TOOL || kind === WAIT ? this.store.labels[label] : "several";
      const isCritical = kind === MODEL && this.store.critical.has(`${agent.number}.${step}`);
      text = `${agent.name}\nstep ${step}: ${what}${failed ? ", failed" : ""}\n${duration(stop - start)} from ${duration(start)}`;
      if (isCritical) text += "\non the critical path";
    } else if (agent.activity && at >= agent.since && at <= this.store.now()) {
      text = `${agent.name}\n${agent.activity} since ${duration(this.store.now() - agent.since)}`;
    }
    this.tip.textContent = text;
    this.tip.hidden = false;
    const stage = this.canvas.closest(".timeline").getBoundingClientRect();
    this.tip.style.left = `${Math.min(event.clientX - stage.left + 14, stage.width - this.tip.offsetWidth - 6)}px`;
    this.tip.style.top = `${Math.min(event.clientY - stage.top + 14, stage.height - this.tip.offsetHeight - 6)}px`;
  }

  #key(event) {
    const acts = {
      ArrowLeft: () => this.pan(-0.1),
      ArrowRight: () => this.pan(0.1),
      ArrowUp: () => (this.tree.tree.scrollTop -= ROW),
      ArrowDown: () => (this.tree.tree.scrollTop += ROW),
      "+": () => this.zoom(0.7),
      "=": () => this.zoom(0.7),
      "-": () => this.zoom(1 / 0.7),
      0: () => this.fit(),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  }
}

function niceStep(least) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 15000, 30000, 60000, 120000, 300000, 600000, 1800000, 3600000];
  return steps.find((step) => step >= least) ?? Math.ceil(least / 3600000) * 3600000;
}
