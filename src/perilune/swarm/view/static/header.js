// The numbers on top: width with its history, agents, steps, critical steps, tokens, cost, time.

import { byId, colour, count, duration, el, money, setText } from "./dom.js";

const NUMBERS = [
  ["width", "width", "agents at work now, and the most there were"],
  ["agents", "agents", "ended of all"],
  ["steps", "steps", "model calls that ended"],
  ["critical", "critical steps", "longest chain of steps that had to wait for each other; steps divided by it is the speed-up"],
  ["calls", "tool calls", "tool calls that ended"],
  ["tokens", "tokens", "prompt and completion"],
  ["cost", "cost", "by the prices of the run"],
  ["elapsed", "time", "since the run began"],
];

export class Header {
  constructor() {
    this.fields = {};
    const list = byId("numbers");
    for (const [key, label, title] of NUMBERS) {
      const value = el("dd");
      this.fields[key] = value;
      list.append(el("div", { title, class: key }, el("dt", { text: label }), value));
    }
    this.spark = el("canvas", { width: 180, height: 36, role: "img", "aria-label": "agents at work over time" });
    list.prepend(el("div", { class: "spark", title: "agents at work over time" }, this.spark));
  }

  show(store, until) {
    const { run, totals } = store;
    const counts = totals.counts;
    const ended = (counts.done ?? 0) + (counts.failed ?? 0) + (counts.cancelled ?? 0) + (counts.budget ?? 0);
    setText(byId("task"), run.task || "Swarm");
    byId("task").title = run.task;
    const isOver = run.ended !== null && run.ended !== undefined;
    const status = isOver ? run.status : store.live || until !== null ? "running" : "unfinished";
    setText(byId("status"), status);
    byId("status").className = `pill ${status}`;
    const waiting = counts.waiting ? `, ${counts.waiting} wait` : "";
    setText(this.fields.width, `${totals.width} / ${totals.peak}`);
    setText(this.fields.agents, `${ended} / ${totals.agents}`);
    this.fields.agents.parentElement.title = `${counts.running ?? 0} running${waiting}, ${counts.queued ?? 0} queued, ${counts.done ?? 0} done, ${counts.failed ?? 0} failed, ${counts.cancelled ?? 0} cancelled, ${counts.budget ?? 0} out of budget`;
    setText(this.fields.steps, count(totals.steps));
    const critical = totals.critical_steps;
    this.fields.critical.parentElement.hidden = critical === undefined || critical === null;
    setText(this.fields.critical, critical ? `${critical}  (${(totals.steps / critical).toFixed(1)}×)` : "0");
    setText(this.fields.calls, count(totals.tool_calls ?? 0));
    setText(this.fields.tokens, count((totals.prompt_tokens ?? 0) + (totals.completion_tokens ?? 0)));
    this.fields.cost.parentElement.hidden = !totals.cost;
    setText(this.fields.cost, money(totals.cost));
    setText(this.fields.elapsed, duration(until ?? run.ended ?? store.now()));
    this.#sparkline(store, until);
    document.title = `${status === "running" ? `${totals.width} at work` : status}: ${run.task || "swarm"}`.slice(0, 120);
  }

  #sparkline(store, until) {
    const { points, resolution } = store.width;
    const end = until ?? store.now();
    const key = `${points.length} ${points.at(-1)} ${Math.round(end / 250)} ${document.documentElement.dataset.theme}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const context = this.spark.getContext("2d");
    const { width, height } = this.spark;
    context.clearRect(0, 0, width, height);
    if (!points.length) return;
    const peak = Math.max(1, store.totals.peak);
    const x = (bucket) => Math.min(width, ((bucket * resolution) / Math.max(1, end)) * width);
    const y = (value) => height - 1 - (value / peak) * (height - 4);
    context.beginPath();
    context.moveTo(x(points[0][0]), height);
    let level = 0;
    for (const [bucket, value] of points) {
      context.lineTo(x(bucket), y(level));
      context.lineTo(x(bucket), y(value));
      level = value;
    }
    level = store.totals.width;
    context.lineTo(width, y(level));
    context.lineTo(width, height);
    context.closePath();
    context.fillStyle = colour("--model");
    context.globalAlpha = 0.35;
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colour("--model");
    context.stroke();
  }
}
