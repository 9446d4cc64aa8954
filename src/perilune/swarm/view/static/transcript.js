// What an agent saw and said, entry by entry, with its tool calls folded.

import { artefactView } from "./artefact.js";
import { count, duration, el } from "./dom.js";

export function entryView(entry) {
  const make = { started, reply, message, task, compacted, finished: ended, result: ended }[entry.kind];
  const article = el("article", { class: `entry ${entry.kind}` });
  article.append(...(make ? make(entry) : [title(entry, entry.kind)]));
  return article;
}

// True once nothing about the entry can change any more.
export const isComplete = (entry) => entry.kind !== "reply" || entry.calls.every((call) => call.outcome);

function title(entry, ...parts) {
  return el("p", { class: "head" }, el("b", { text: parts[0] }), el("span", { text: parts.slice(1).filter(Boolean).join("  ·  ") }), el("time", { text: duration(entry.time) }));
}

function body(text, length, name = "") {
  if (!text) return null;
  const shown = el("pre", { class: `text ${name}`, text });
  if (length) shown.append(el("i", { class: "cut", text: `\n… ${count(length - text.length)} more characters` }));
  return shown;
}

function folded(label, text, length, name = "") {
  if (!text) return null;
  return el("details", { class: name }, el("summary", { text: label }), body(text, length));
}

const whole = (parts) => parts.filter(Boolean);

function started(entry) {
  return whole([
    title(entry, "started", entry.model),
    folded("system prompt", entry.system_prompt, entry.system_prompt_length),
    folded(`${entry.tools.length} tools`, entry.tools.join("\n")),
    body(entry.task, entry.task_length, "task"),
  ]);
}

function reply(entry) {
  const took = entry.seconds === null ? "" : duration(entry.seconds * 1000);
  const attempts = entry.attempts > 1 ? `${entry.attempts} attempts` : "";
  const finish = ["stop", "tool_calls", ""].includes(entry.finish) ? "" : entry.finish;
  return whole([
    title(entry, `step ${entry.step}`, took, entry.tokens ? `${count(entry.tokens)} tokens` : "", attempts, finish),
    folded("reasoning", entry.reasoning, entry.reasoning_length, "reasoning"),
    body(entry.text, entry.text_length),
    ...entry.calls.map(callView),
  ]);
}

function callView(call) {
  const { outcome } = call;
  const status = outcome ? outcome.status : call.started ? "running" : "open";
  const summary = el(
    "summary",
    {},
    el("span", { class: `dot ${status}`, text: status === "ok" ? "✓" : outcome ? "✕" : "…" }),
    el("b", { text: call.tool }),
    el("code", { text: call.arguments.slice(0, 160) }),
    el("span", { class: "took", text: outcome?.seconds !== undefined && outcome?.seconds !== null ? duration(outcome.seconds * 1000) : "" }),
  );
  const details = el("details", { class: `call ${status}` }, summary);
  details.append(...whole([el("h4", { text: "arguments" }), body(call.arguments, call.arguments_length) ?? el("p", { class: "none", text: "none" })]));
  if (outcome) {
    const kind = `${status === "ok" ? "result" : status}${outcome.untrusted ? ", from outside" : ""}`;
    details.append(...whole([el("h4", { text: kind, class: outcome.untrusted ? "untrusted" : "" }), body(outcome.text, outcome.text_length)]));
    if (outcome.result) details.append(artefactView(outcome.result, "the whole result"));
    if (outcome.spawned.length) details.append(el("p", { class: "none", text: `started ${outcome.spawned.join(", ")}` }));
  }
  return details;
}

function message(entry) {
  return whole([title(entry, `message from ${entry.sender}`, entry.tainted ? "from outside" : ""), body(entry.text, entry.text_length)]);
}

function task(entry) {
  return whole([title(entry, `task ${entry.number}`), body(entry.text, entry.text_length)]);
}

function compacted(entry) {
  const how = entry.how === "summary" ? "context replaced by a summary" : "older results hidden from the context";
  return whole([title(entry, how), body(entry.summary, entry.summary_length)]);
}

function ended(entry) {
  return whole([
    title(entry, entry.kind === "finished" ? entry.status : `task ${entry.status}`),
    body(entry.error, entry.error_length, "problem"),
    entry.result ? artefactView(entry.result, "answer", { open: entry.kind === "finished" && entry.result.size < 20000 }) : null,
  ]);
}
