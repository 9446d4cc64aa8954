// The chat page: a conversation with v1/chat/completions, streamed.
//
// Nothing is kept but the settings and the key, in this tab's session storage. What the model writes is shown as text or
// by markdown.js, never as HTML.

import { copyButton, el, showMarkdown } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_PICTURES = 8;
const MOST_BYTES = 12 << 20; // of one picture
const ENDLESS_TOKENS = 256; // longest answer of a base model, which does not end by itself

// The server -----------------------------------------------------------------------------------------------------------

// What the person reads when a request failed. `kind`: key, busy, gone, cut or refused.
class Failure extends Error {
  constructor(kind, message, seconds = 0) {
    super(message);
    this.kind = kind;
    this.seconds = seconds;
  }
}

async function ask(path, body, signal) {
  const key = settings.key;
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers: { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) },
      body: body && JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("gone", "The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const told = await response.json().then((answer) => answer.error?.message ?? answer.error ?? "", () => "");
  const why = typeof told === "string" && told ? told.slice(0, 1000) : `${response.status} ${response.statusText}`.trim();
  if (response.status === 401) {
    throw new Failure("key", key ? `The server did not accept the key: ${why}` : "The server asks for a key.");
  }
  if (response.status === 429 || response.status === 503) {
    const seconds = Math.min(600, Math.ceil(Number(response.headers.get("Retry-After")) || 1));
    throw new Failure("busy", `The server is busy: ${why}`, seconds);
  }
  throw new Failure("refused", `The server answered: ${why}`);
}

// The data of server-sent events, until [DONE]. A stream that ends without it was cut.
async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let waiting = "";
  for (;;) {
    let step;
    try {
      step = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("cut", "The connection broke before the answer was complete.");
    }
    if (step.done) throw new Failure("cut", "The answer ended before it was complete.");
    const lines = (waiting + decoder.decode(step.value, { stream: true })).split(/\r\n|\n|\r(?!$)/);
    waiting = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      let event;
      try {
        event = JSON.parse(data);
      } catch {
        throw new Failure("cut", "The server sent something that is not the OpenAI format.");
      }
      if (event.error) throw new Failure("cut", `The server stopped: ${event.error.message ?? "no reason given"}`);
      yield event;
    }
  }
}

// The conversation -----------------------------------------------------------------------------------------------------

const chat = { turns: [], running: null, model: "", cards: new Map(), pictures: [] };

// Perilune's own server says of a model whether it answers (chat) and reads pictures (image_input); others say nothing.
const card = () => chat.cards.get(chat.model) ?? {};
const isRaw = () => settings.raw ?? card().chat === false;

// What the server is asked: the conversation so far, or in raw mode the last text alone.
function requestBody() {
  const mostTokens = settings.maxTokens ?? (isRaw() || card().chat === false ? ENDLESS_TOKENS : null);
  const sampling = {
    ...(settings.temperature !== null && { temperature: settings.temperature }),
    ...(mostTokens !== null && { max_tokens: mostTokens }),
  };
  const common = { model: chat.model, stream: true, stream_options: { include_usage: true }, ...sampling };
  if (isRaw()) return { ...common, prompt: chat.turns.findLast((turn) => turn.role === "user").text };
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  // An answer that was stopped before its first word is no message.
  const said = chat.turns.filter((turn) => turn.role === "user" || turn.text);
  const messages = [...system, ...said.map(messageOf)];
  return { ...common, messages, ...(!settings.thinking && { chat_template_kwargs: { thinking: false } }) };
}

function messageOf({ role, text, pictures = [] }) {
  if (!pictures.length) return { role, content: text };
  const images = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [...images, ...(text ? [{ type: "text", text }] : [])] };
}

function showUser(turn) {
  const shown = turn.pictures.map(({ url, name }) => el("li", {}, el("img", { src: url, alt: name })));
  const parts = shown.length ? [el("ul", { class: "shown" }, shown)] : [];
  if (turn.text) parts.push(el("div", { class: "words", text: turn.text }));
  turn.element = el("article", { class: isRaw() ? "turn user continued" : "turn user", "aria-label": "You" }, parts);
  byId("log").append(turn.element);
}

// The elements of an answer, and how they follow what arrives. Painting waits for the next frame.
class AnswerView {
  constructor(raw) {
    this.raw = raw;
    this.words = el("div", { class: "words waiting" });
    this.thoughts = el("div", { class: "thoughts" });
    this.summary = el("summary", { text: "Reasoning" });
    this.reasoning = el("details", {}, this.summary, this.thoughts);
    this.reasoning.hidden = true;
    this.calls = [];
    this.foot = el("div", { class: "foot" });
    const kind = raw ? "turn assistant continued" : "turn assistant";
    this.element = el("article", { class: kind, "aria-label": "Answer", "aria-busy": "true" }, this.reasoning, this.words, this.foot);
    this.asked = false;
  }

  show(turn) {
    this.turn = turn;
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.asked = false;
    const turn = this.turn;
    const follow = nearEnd();
    if (turn.reasoning) {
      this.reasoning.hidden = false;
      if (this.thoughts.textContent !== turn.reasoning) this.thoughts.textContent = turn.reasoning;
      this.summary.textContent = turn.text || turn.calls.length || turn.done ? "Reasoning" : "Reasoning …";
    }
    if (this.raw) this.words.textContent = turn.text;
    else showMarkdown(this.words, turn.text);
    this.words.classList.toggle("waiting", !turn.done && (turn.text !== "" || turn.reasoning === ""));
    turn.calls.forEach((call, index) => {
      if (!this.calls[index]) {
        const parts = { name: el("summary"), body: el("pre", { tabindex: "0" }) };
        this.calls[index] = parts;
        this.foot.before(el("details", { class: "call" }, parts.name, parts.body));
      }
      this.calls[index].name.textContent = `Calls the tool ${call.name}`;
      this.calls[index].body.textContent = call.arguments;
    });
    if (follow) toEnd();
  }

  end(turn) {
    this.turn = turn;
    turn.done = true;
    this.paint();
    this.element.removeAttribute("aria-busy");
    const facts = [ENDS[turn.finish] ?? ""];
    if (turn.tokens) facts.push(`${turn.tokens} tokens`, turn.seconds > 0 ? `${(turn.tokens / turn.seconds).toFixed(1)} a second` : "");
    const copy = copyButton(() => turn.text);
    const again = el("button", { type: "button", class: "again", text: "Answer again", onclick: () => answerAgain(turn) });
    this.foot.replaceChildren(...facts.filter(Boolean).map((text) => el("span", { text })), ...(turn.text ? [copy] : []), again);
  }
}

const ENDS = {
  length: "cut at the longest allowed answer",
  tool_calls: "waits for a tool, which this page does not have",
  cancelled: "stopped",
  content_filter: "held back by a filter",
};

function take(turn, event) {
  if (event.usage) turn.tokens = event.usage.completion_tokens;
  const choice = event.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  turn.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  turn.text += delta.content ?? choice.text ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (turn.calls[part.index ?? turn.calls.length] ??= { name: "", arguments: "" });
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice.finish_reason) turn.finish = choice.finish_reason;
}

async function answer() {
  const turn = { role: "assistant", text: "", reasoning: "", calls: [], finish: null, tokens: 0, done: false };
  const raw = isRaw();
  const turns = chat.turns;
  const view = new AnswerView(raw);
  turn.element = view.element;
  byId("log").append(view.element);
  toEnd();
  const stop = new AbortController();
  setRunning(stop);
  const began = performance.now();
  let failure = null;
  try {
    const response = await ask(raw ? "v1/completions" : "v1/chat/completions", requestBody(), stop.signal);
    for await (const event of eventsOf(response)) {
      take(turn, event);
      view.show(turn);
    }
  } catch (error) {
    if (error.name === "AbortError") turn.finish = "cancelled";
    else if (error instanceof Failure) failure = error;
    else throw error;
  } finally {
    if (chat.running === stop) setRunning(null);
  }
  if (turns !== chat.turns) return; // meanwhile a new chat has begun
  turn.seconds = (performance.now() - began) / 1000;
  turn.calls = turn.calls.filter(Boolean);
  if (turn.text || turn.reasoning || turn.calls.length || !failure) {
    chat.turns.push(turn);
    view.end(turn);
  } else {
    view.element.remove();
  }
  say(failure ? "" : turn.finish === "cancelled" ? "Answer stopped." : "Answer complete.");
  if (failure) showFailure(failure, turn);
  updateButtons();
}

function showFailure(failure, turn) {
  const again = el("button", { type: "button", text: "Try again" });
  const box = el("div", { class: "failure", role: "alert" }, el("span", { text: failure.message }), again);
  const inTurn = chat.turns.includes(turn);
  again.addEventListener("click", () => (inTurn ? answerAgain(turn) : (box.remove(), answer())));
  (inTurn ? turn.element : byId("log")).append(box);
  if (failure.kind === "key") {
    again.textContent = "Enter the key";
    again.addEventListener("click", (event) => (event.stopImmediatePropagation(), askForKey(failure.message)), { capture: true });
    askForKey(failure.message, () => (box.remove(), answer()));
  }
  if (failure.kind === "busy") countDown(again, failure.seconds);
  toEnd();
}

function countDown(button, seconds) {
  button.disabled = seconds > 0;
  button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
  if (seconds > 0) setTimeout(() => countDown(button, seconds - 1), 1000);
}

// Forget an answer and what came after it, and ask for it once more.
function answerAgain(turn) {
  if (chat.running) return;
  for (const gone of chat.turns.splice(chat.turns.indexOf(turn))) gone.element.remove();
  for (const box of byId("log").querySelectorAll(":scope > .failure")) box.remove();
  answer();
}

function newChat() {
  chat.running?.abort();
  chat.running = null;
  chat.turns = [];
  byId("log").replaceChildren();
  updateButtons();
  byId("text").focus();
}

const nearEnd = () => byId("scroll").scrollHeight - byId("scroll").scrollTop - byId("scroll").clientHeight < 80;
const toEnd = () => byId("scroll").scrollTo({ top: byId("scroll").scrollHeight });
const say = (text) => (byId("said").textContent = text);

// The message field ----------------------------------------------------------------------------------------------------

function setRunning(controller) {
  chat.running = controller;
  updateButtons();
}

function updateButtons() {
  const ready = byId("text").value.trim() !== "" || chat.pictures.length > 0;
  const empty = chat.turns.length === 0 && byId("log").childElementCount === 0;
  byId("send").disabled = !ready || !chat.model;
  byId("send").hidden = chat.running !== null;
  byId("stop").hidden = chat.running === null;
  byId("new").disabled = empty;
  byId("empty").hidden = !empty;
}

function fitField() {
  const field = byId("text");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  updateButtons();
}

function send() {
  const text = byId("text").value;
  if (chat.running || !chat.model || (!text.trim() && !chat.pictures.length)) return;
  const turn = { role: "user", text, pictures: isRaw() ? [] : chat.pictures };
  for (const box of byId("log").querySelectorAll(":scope > .failure")) box.remove();
  chat.turns.push(turn);
  showUser(turn);
  chat.pictures = [];
  showPictures();
  byId("text").value = "";
  fitField();
  answer();
}

async function addPictures(files) {
  const refused = [];
  for (const file of files) {
    if (isRaw() || card().image_input === false) refused.push(`${file.name}: ${isRaw() ? "a text is continued without pictures." : `${chat.model} reads no pictures.`}`);
    else if (!PICTURES.includes(file.type)) refused.push(`${file.name} is not a PNG, JPEG, WebP or GIF picture.`);
    else if (file.size > MOST_BYTES) refused.push(`${file.name} is larger than ${MOST_BYTES >> 20} MB.`);
    else if (chat.pictures.length >= MOST_PICTURES) refused.push(`${file.name}: ${MOST_PICTURES} pictures are the most.`);
    else chat.pictures.push({ url: await readAsUrl(file), name: file.name });
  }
  byId("refused").textContent = refused.join(" ");
  showPictures();
}

const readAsUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

function showPictures() {
  const remove = (picture) => {
    chat.pictures = chat.pictures.filter((each) => each !== picture);
    showPictures();
    byId("text").focus();
  };
  const items = chat.pictures.map((picture) =>
    el(
      "li",
      {},
      el("img", { src: picture.url, alt: picture.name }),
      el("button", { type: "button", text: "×", "aria-label": `Remove ${picture.name}`, onclick: () => remove(picture) }),
    ),
  );
  byId("pictures").replaceChildren(...items);
  byId("pictures").hidden = items.length === 0;
  updateButtons();
}

const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");

function listen() {
  byId("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  byId("text").addEventListener("input", fitField);
  byId("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => (chat.running?.abort(), byId("text").focus()));
  byId("new").addEventListener("click", newChat);
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", () => addPictures([...byId("files").files]).then(() => (byId("files").value = "")));
  byId("text").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    addPictures(files);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("settings").open) chat.running?.abort();
  });
  document.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    byId("drop").hidden = false;
  });
  document.addEventListener("dragleave", (event) => (byId("drop").hidden ||= event.relatedTarget === null));
  document.addEventListener("drop", (event) => {
    byId("drop").hidden = true;
    if (!holdsFiles(event)) return;
    event.preventDefault();
    addPictures([...event.dataTransfer.files]);
  });
  byId("open-settings").addEventListener("click", () => openSettings());
  byId("settings").addEventListener("close", closeSettings);
  byId("theme").addEventListener("click", switchTheme);
  byId("notice").querySelector("button").addEventListener("click", greet);
  byId("models").addEventListener("change", () => ((chat.model = byId("models").value), showMode()));
}

// Settings -------------------------------------------------------------------------------------------------------------

const STORE = "perilune-chat";
const settings = { temperature: null, maxTokens: null, system: "", thinking: true, raw: null, key: "", theme: "" };
try {
  Object.assign(settings, JSON.parse(sessionStorage.getItem(STORE) ?? "{}"));
} catch {
  // a store that is closed or broken: begin with the defaults
}

function keepSettings() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(settings));
  } catch {
    // a private window may refuse to store: the settings then last until the page is left
  }
}

let afterKey = null;

function openSettings() {
  byId("temperature").value = settings.temperature ?? "";
  byId("max-tokens").value = settings.maxTokens ?? "";
  byId("system").value = settings.system;
  byId("thinking").checked = settings.thinking;
  byId("raw").checked = isRaw();
  byId("key").value = settings.key;
  byId("key-problem").textContent = "";
  byId("settings").classList.remove("key-only");
  byId("settings-title").textContent = "Settings";
  if (!byId("settings").open) byId("settings").showModal();
}

function askForKey(why, then = afterKey) {
  openSettings();
  byId("settings").classList.add("key-only");
  byId("settings-title").textContent = "This server needs a key";
  afterKey = then;
  byId("key-problem").textContent = settings.key ? why : "";
  byId("key").focus();
}

function closeSettings() {
  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  const hadKey = settings.key;
  settings.temperature = number("temperature");
  settings.maxTokens = number("max-tokens");
  settings.system = byId("system").value;
  settings.thinking = byId("thinking").checked;
  if (byId("raw").checked !== isRaw()) settings.raw = byId("raw").checked;
  settings.key = byId("key").value.trim();
  keepSettings();
  const then = afterKey;
  afterKey = null;
  if (settings.key !== hadKey) then ? (greet(), then()) : greet();
  showMode();
  byId("text").focus();
}

function switchTheme() {
  const dark = settings.theme ? settings.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  settings.theme = dark ? "light" : "dark";
  document.documentElement.dataset.theme = settings.theme;
  keepSettings();
}

// Start ----------------------------------------------------------------------------------------------------------------

function showMode() {
  const raw = isRaw();
  byId("text").placeholder = raw ? "Text to continue" : "Message";
  byId("attach").hidden = raw || card().image_input === false;
  byId("empty").querySelector(".large").textContent = raw ? "Begin a text; it will go on." : "What would you like to ask?";
  byId("hint").textContent =
    card().chat === false ? `${chat.model} is a base model: it was trained to continue text, not to answer.` : "";
}

// Ask the server which models it has; the answer also tells whether it is there and takes the key.
async function greet() {
  byId("notice").hidden = true;
  try {
    const { data } = await (await ask("v1/models")).json();
    chat.cards = new Map(data.map((model) => [model.id, model]));
    const names = [...chat.cards.keys()];
    chat.model = names.includes(chat.model) ? chat.model : names[0];
    byId("models").replaceChildren(...names.map((name) => el("option", { text: name, value: name })));
    byId("models").hidden = names.length < 2;
    byId("models").value = chat.model;
    byId("model").hidden = names.length > 1;
    byId("model").textContent = chat.model;
    document.title = `${chat.model} · Perilune`;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    byId("notice").hidden = false;
    byId("notice").querySelector("span").textContent = error.message;
    byId("notice").querySelector("button").textContent = error.kind === "key" ? "Enter the key" : "Try again";
    if (error.kind === "key") askForKey(error.message);
  }
  showMode();
  updateButtons();
}

if (settings.theme) document.documentElement.dataset.theme = settings.theme;
listen();
showMode();
updateButtons();
greet();
