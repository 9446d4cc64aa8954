// Talks to the view's server: the token in a header on every request, and the feed as a stream that comes back by itself.
// EventSource cannot set headers, so the stream is read with fetch.

const SILENT_MS = 30000;

function takeToken() {
  const found = /(?:^#|&)token=([^&]+)/.exec(location.hash);
  if (found) {
    sessionStorage.setItem("token", decodeURIComponent(found[1]));
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

const token = takeToken();
export const hasToken = Boolean(token);

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, {
      ...options,
      headers: { ...options.headers, "X-Perilune-Token": token ?? "" },
      cache: "no-store",
      referrerPolicy: "no-referrer",
    });
  } catch {
    throw new Error("The view does not answer: its program has ended, or the connection is lost.");
  }
  if (response.ok) return response;
  let text = `the server answered ${response.status}`;
  try {
    text = (await response.json()).error ?? text;
  } catch {
    // not JSON: the number has to do
  }
  throw new Refused(response.status, text);
}

export const getJSON = async (path) => (await request(path)).json();
export const getBytes = async (path) => (await request(path)).arrayBuffer();

export async function command(name, body) {
  const headers = { "Content-Type": "application/json" };
  return (await request(`/api/${name}`, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

// Calls back with each snapshot and frame, and with the state of the connection: connecting, live, reconnecting, lost,
// refused, closed. After the last two nothing more comes.
export async function follow({ onSnapshot, onFrame, onState }) {
  let last = null;
  let pause = 250;
  for (;;) {
    onState(last === null ? "connecting" : "reconnecting");
    const abort = new AbortController();
    let watch = 0;
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(() => abort.abort(), SILENT_MS);
    };
    try {
      alive();
      const headers = last === null ? {} : { "Last-Event-ID": last };
      const response = await request("/api/feed", { headers, signal: abort.signal });
      onState("live");
      for await (const event of events(response.body.getReader(), alive)) {
        pause = 250;
        last = event.id;
        if (event.kind === "closed") {
          onState("closed");
          return;
        }
        (event.kind === "snapshot" ? onSnapshot : onFrame)(JSON.parse(event.data));
      }
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        onState("refused", error.message);
        return;
      }
    } finally {
      clearTimeout(watch);
    }
    onState("lost");
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, 5000);
  }
}

async function* events(reader, alive) {
  const decoder = new TextDecoder();
  let parts = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const text = decoder.decode(value, { stream: true });
    // A blank line ends an event. It may be cut between two reads, so the last character before counts too.
    const before = parts.length ? parts[parts.length - 1] : "";
    if (!text.includes("\n\n") && !(before.endsWith("\n") && text.startsWith("\n"))) {
      parts.push(text);
      continue;
    }
    const pieces = (parts.join("") + text).split("\n\n");
    parts = [pieces.pop()];
    for (const piece of pieces) {
      const event = {};
      for (const line of piece.split("\n")) {
        const colon = line.indexOf(": ");
        if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 2);
      }
      if (event.data) yield { id: event.id, kind: event.event, data: event.data };
    }
  }
}
