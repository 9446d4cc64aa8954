// Puts the parts together: the feed fills the store, the store is drawn at most ten times a second.

import { ApprovalList } from "./approvals.js";
import { follow, hasToken } from "./connection.js";
import { Detail } from "./detail.js";
import { byId, setText } from "./dom.js";
import { Header } from "./header.js";
import { ReplayBar } from "./replay.js";
import { Store } from "./store.js";
import { Timeline } from "./timeline.js";
import { Tree } from "./tree.js";

const DRAW_MS = 100;
const live = new Store();
let past = null; // the store of an earlier moment, while somebody looks at one
let until = null;

const select = (number, { open = false } = {}) => {
  tree.select(number);
  detail.open(number, past ?? live);
  timeline.draw();
  if (open) {
    showTab("detail");
    byId("detail").focus({ preventScroll: true });
  } else if (number !== null && matchMedia("(max-width: 820px)").matches && document.body.dataset.tab === "agents" && openedByPointer) {
    showTab("detail");
  }
};
let openedByPointer = false;
addEventListener("pointerdown", () => (openedByPointer = true), true);
addEventListener("keydown", () => (openedByPointer = false), true);

const tree = new Tree(byId("tree"), byId("space"), { onSelect: select, onScroll: () => timeline.draw() });
const timeline = new Timeline(byId("bars"), byId("tip"), tree, { onSelect: select });
const detail = new Detail(byId("detail"), { onClose: () => close() });
const header = new Header();
const approvals = new ApprovalList(byId("approvals"), { onSelect: select });
const replay = new ReplayBar({
  onMoment: (store, moment) => {
    past = store;
    until = moment;
    soon();
  },
});

let planned = false;
let drawn = 0;

function soon() {
  if (planned) return;
  planned = true;
  const wait = Math.max(0, DRAW_MS - (performance.now() - drawn));
  setTimeout(() => requestAnimationFrame(draw), wait);
}

function draw() {
  planned = false;
  drawn = performance.now();
  const store = past ?? live;
  header.show(store, until);
  tree.show(store);
  timeline.show(store, until, live.now());
  detail.show(store, until);
  approvals.show(live);
  replay.show(live);
  document.body.dataset.index = live.index ?? -1;
}

function close() {
  tree.select(null);
  detail.open(null, past ?? live);
  timeline.draw();
  showTab("agents");
  byId("tree").focus();
}

function showTab(name) {
  document.body.dataset.tab = name;
  for (const button of document.querySelectorAll(".tabs button")) button.setAttribute("aria-pressed", button.dataset.tab === name);
  tree.draw();
  timeline.draw();
}

for (const button of document.querySelectorAll(".tabs button")) button.addEventListener("click", () => showTab(button.dataset.tab));
byId("filter").addEventListener("input", () => {
  tree.filter = byId("filter").value.trim();
  tree.shape = -1;
  soon();
});
byId("only").addEventListener("change", () => {
  tree.only = byId("only").value;
  tree.shape = -1;
  soon();
});
byId("zoom-in").addEventListener("click", () => timeline.zoom(0.6));
byId("zoom-out").addEventListener("click", () => timeline.zoom(1 / 0.6));
byId("fit").addEventListener("click", () => timeline.fit());
byId("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
  timeline.readColours();
  soon();
});
if (["light", "dark"].includes(localStorage.getItem("theme"))) document.documentElement.dataset.theme = localStorage.getItem("theme");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timeline.readColours());
timeline.readColours();
addEventListener("resize", soon);
addEventListener("keydown", (event) => {
  const isWriting = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName ?? "");
  if (event.key === "Escape") {
    if (byId("filter").value) {
      byId("filter").value = tree.filter = "";
      tree.shape = -1;
      soon();
    } else {
      close();
    }
  } else if (event.key === "/" && !isWriting) {
    event.preventDefault();
    showTab("agents");
    byId("filter").focus();
  }
});

// Bars of open calls and clocks move on although nothing happens.
setInterval(() => {
  if (live.live && live.run.ended === null && !document.hidden) soon();
}, 500);

const STATES = {
  connecting: "connecting",
  reconnecting: "connecting again",
  live: "connected",
  lost: "connection lost",
  refused: "refused",
  closed: "view closed",
};

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

if (!hasToken) {
  byId("connection").className = "connection refused";
  setText(byId("connection"), "no token");
  notice("This address lacks the token of the run. Open the address exactly as it was printed, with the part after #.");
} else {
  follow({
    onSnapshot: (data) => {
      live.snapshot(data);
      live.index = data.index;
      soon();
    },
    onFrame: (data) => {
      live.merge(data);
      live.index = data.index;
      soon();
    },
    onState: (state, text) => {
      byId("connection").className = `connection ${state}`;
      setText(byId("connection"), STATES[state]);
      if (state === "closed") Object.assign(live, { live: false, closed: true }); // there is nobody left to ask
      notice(state === "refused" ? `The server refused: ${text}.` : "");
    },
  });
}
showTab("agents");
