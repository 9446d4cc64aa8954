// A slider through the time of the run. Away from its end the page shows the state of that moment.

import { getJSON } from "./connection.js";
import { byId, duration } from "./dom.js";
import { Store } from "./store.js";

export class ReplayBar {
  constructor({ onMoment }) {
    this.onMoment = onMoment; // (store of that moment or null, moment or null)
    this.until = null;
    this.end = 0;
    this.moment = byId("moment");
    this.moment.addEventListener("input", () => this.go((Number(this.moment.value) / 1000) * this.end));
    byId("end").addEventListener("click", () => this.leave());
    byId("play").addEventListener("click", () => this.#toggle());
  }

  show(live) {
    this.live = live;
    this.end = live.now();
    if (this.until === null) this.moment.value = 1000;
    byId("clock").textContent = `${duration(this.until ?? this.end)} of ${duration(this.end)}`;
    byId("end").textContent = live.live && live.run.ended === null ? "now" : "end";
    byId("end").hidden = this.until === null;
  }

  go(until) {
    if (until >= this.end - 1) {
      this.leave();
      return;
    }
    this.until = Math.max(0, Math.round(until));
    if (!this.busy) this.#fetch();
  }

  // One request at a time; the moment asked for last wins.
  async #fetch() {
    this.busy = true;
    try {
      for (let asked = null; this.until !== null && asked !== this.until; ) {
        asked = this.until;
        const data = await getJSON(`/api/state?until=${asked}`);
        if (this.until === null) break;
        const store = new Store();
        store.snapshot(data);
        store.bars = this.live.bars;
        store.labels = this.live.labels;
        store.critical = this.live.critical;
        store.controls = this.live.controls;
        store.now = () => asked;
        this.onMoment(store, asked);
      }
    } catch {
      this.leave();
    } finally {
      this.busy = false;
    }
  }

  leave() {
    this.until = null;
    this.#stop();
    this.moment.value = 1000;
    this.onMoment(null, null);
  }

  #toggle() {
    if (this.timer) {
      this.#stop();
      return;
    }
    if (this.until === null) this.go(0);
    let last = performance.now();
    byId("play").textContent = "⏸";
    byId("play").setAttribute("aria-label", "Pause");
    this.timer = setInterval(() => {
      const now = performance.now();
      const speed = Number(byId("speed").value);
      const next = (this.until ?? 0) + (now - last) * speed;
      last = now;
      this.moment.value = this.end ? (next / this.end) * 1000 : 1000;
      this.go(next);
    }, 200);
  }

  #stop() {
    clearInterval(this.timer);
    this.timer = 0;
    byId("play").textContent = "▶";
    byId("play").setAttribute("aria-label", "Play");
  }
}
