// The state of the run as the server sends it: a snapshot, then frames of what changed.

export class Store {
  constructor() {
    this.shape = 0; // grows when an agent is added or moves in the tree
    this.clear();
  }

  clear() {
    this.run = { task: "", status: "running", limits: {} };
    this.totals = { last: 0, agents: 0, counts: {}, steps: 0, width: 0, peak: 0 };
    this.live = false;
    this.controls = false;
    this.agents = [];
    this.bars = [];
    this.labels = [];
    this.width = { resolution: 20, points: [] };
    this.approvals = [];
    this.critical = new Set();
  }

  snapshot(data) {
    this.clear();
    this.live = Boolean(data.live);
    this.controls = Boolean(data.controls);
    this.merge(data);
  }

  merge(data) {
    if (data.run) this.run = data.run;
    if (data.totals) this.totals = data.totals;
    for (const born of data.born ?? []) {
      const agent = this.agents[born.number];
      if (agent) Object.assign(agent, born);
      else this.agents[born.number] = { ...born, children: [] };
    }
    if (data.born?.length) this.#relate();
    for (const live of data.agents ?? []) Object.assign(this.agents[live.number], live);
    if (data.labels) this.labels.splice(data.labels_from ?? 0, Infinity, ...data.labels);
    for (const [number, bars] of Object.entries(data.all_bars ?? {})) this.bars[Number(number)] = bars;
    for (const [number, ...bar] of data.bars ?? []) (this.bars[number] ??= []).push(bar);
    if (data.width) {
      this.width.resolution = data.width.resolution;
      this.width.points.splice(data.width.from, Infinity, ...data.width.points);
    }
    if (data.approvals) this.approvals = data.approvals;
    if (data.critical) this.critical = new Set(data.critical);
  }

  #relate() {
    for (const agent of this.agents) agent.children = [];
    for (const agent of this.agents) {
      // Only an older agent can be a parent: no circle can be drawn.
      if (agent.parent !== null && agent.parent < agent.number) this.agents[agent.parent].children.push(agent);
      else agent.parent = null;
    }
    this.shape += 1;
  }

  // Milliseconds since the run began: of the last event, or by the clock while the run goes on here.
  now() {
    const { last } = this.totals;
    if (!this.live || this.run.ended !== null || !this.run.began) return last;
    return Math.max(last, Date.now() - this.run.began * 1000);
  }
}
