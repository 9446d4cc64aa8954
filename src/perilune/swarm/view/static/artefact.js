// Stored bytes, shown as text a part at a time, or saved whole.

import { getBytes } from "./connection.js";
import { bytes, el } from "./dom.js";

const PART = 64 * 1024;
const SAVE_PART = 1024 * 1024;

// A folded element that loads when it is opened.
export function artefactView(reference, label, { open = false } = {}) {
  const text = el("pre", { tabindex: 0 });
  const problem = el("p", { class: "problem", role: "alert" });
  const more = el("button", { type: "button", text: "more", hidden: true });
  const save = el("button", { type: "button", text: "save" });
  const decoder = new TextDecoder();
  const path = (start, end) => `/api/artefact/${encodeURIComponent(reference.sha256)}?start=${start}&end=${end}`;
  let read = 0;
  const guard = (act) => async () => {
    problem.textContent = "";
    try {
      await act();
    } catch (error) {
      problem.textContent = error.message;
    }
  };
  const load = guard(async () => {
    const end = Math.min(read + PART, reference.size);
    const data = await getBytes(path(read, end));
    read = end;
    text.append(decoder.decode(data, { stream: end < reference.size }));
    more.hidden = read >= reference.size;
    more.textContent = `more (${bytes(reference.size - read)} left)`;
  });
  const keep = guard(async () => {
    const parts = [];
    for (let at = 0; at < reference.size; at += SAVE_PART) parts.push(await getBytes(path(at, Math.min(at + SAVE_PART, reference.size))));
    const address = URL.createObjectURL(new Blob(parts, { type: "text/plain" }));
    const link = el("a", { href: address, download: `${reference.sha256.slice(0, 16)}.txt` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  });
  more.addEventListener("click", load);
  save.addEventListener("click", keep);
  const summary = el("summary", { text: `${label} (${bytes(reference.size)})` });
  const details = el("details", { class: "artefact" }, summary, text, el("p", { class: "actions" }, more, save), problem);
  details.addEventListener("toggle", () => {
    if (details.open && !read) load();
  });
  details.open = open;
  return details;
}
