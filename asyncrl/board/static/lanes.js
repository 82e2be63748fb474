// Activity of each actor: a lane of coloured segments, with faults and restarts on the same time axis.
import { byId, clock, el, fetched, prepared, showTip, themed } from "./dom.js";

const FILLS = {
  silent: "#b3261e", quarantined: "#7b1fa2", starting: "#9e9e9e", draining: "#bdbdbd", waiting: "#e0a526", loading: "#8e6bbf",
  rewarding: "#3aa6a6", generating: "#3f9b58", training: "#3670b8", writing: "#7d8f3a", working: "#8aa4c0",
};
const ROW = 18, TOP = 22, PAGE = 40, MOST_SHOWN_MARKS = 100;
let LEFT = 190; // width of the names and versions; narrower on a phone
const WORST_FIRST = ["silent", "quarantined", "starting", "draining", "waiting", "loading", "writing", "rewarding", "working", "training", "generating"];

export class Lanes {
  // states: names of the state indices
  constructor(states) {
    this.states = states;
    this.runs = [];
    this.chosen = 0;
    this.page = 0;
    this.shownTimes = null; // [begin, end] chosen with the wheel
    this.filter = el("input", { placeholder: "filter by name, role or state", oninput: () => this.turn(-this.page) });
    this.order = el("select", { onchange: () => this.turn(-this.page) },
      ...["trouble first", "by name", "oldest version first"].map((text) => el("option", {}, text)));
    this.info = el("span", { class: "dim", id: "lanes-info" });
    this.pages = el("span", { hidden: "" }, el("button", { onclick: () => this.turn(-1) }, "previous"), el("button", { onclick: () => this.turn(1) }, "next"));
    this.canvas = el("canvas", { id: "lanes-canvas" });
    this.marks = el("ul", { class: "marks", id: "marks" });
    this.detail = el("pre", { class: "detail", id: "actor", hidden: "" });
    this.canvas.addEventListener("mousemove", (event) => showTip(event, this.tip(event)));
    this.canvas.addEventListener("mouseleave", (event) => showTip(event, ""));
    this.canvas.addEventListener("wheel", (event) => this.zoom(event), { passive: false });
    this.canvas.addEventListener("dblclick", () => { this.shownTimes = null; this.draw(); });
    this.canvas.addEventListener("click", (event) => this.choose(this.at(event)));
    window.setInterval(() => this.draw(), 1000);
  }

  begin(runs) {
    this.runs = runs.map((run) => ({ name: run.name, marks: run.marks, lanes: new Map(), begin: 0, end: 0, window: 900, source: "", totals: {}, isLoaded: false }));
    const legend = el("div", { class: "legend" }, ...this.states.map((state) => el("span", {}, el("i", { colour: FILLS[state] }), state)));
    const bar = el("div", { class: "bar" }, this.filter, this.order,
      this.pages, this.info);
    byId("lanes").replaceChildren(bar, legend, el("div", { class: "split" }, el("div", {}, this.canvas, this.detail),
      el("div", {}, el("h2", {}, "Faults, restarts and who joined"), this.marks)));
    this.select(this.chosen);
  }

  get run() {
    return this.runs[this.chosen];
  }

  select(number) {
    this.chosen = number;
    this.page = 0;
    this.shownTimes = null;
    this.detail.hidden = true;
    if (!this.run.isLoaded && !byId("lanes").hidden) this.load(number);
    this.drawMarks();
    this.draw();
  }

  async load(number) {
    const run = this.runs[number];
    run.isLoaded = true;
    const found = await fetched(`/api/runs/${number}/lanes`);
    run.begin = found.begin;
    run.end = Math.max(run.end, found.end);
    run.window = Math.max(1, found.end - found.begin);
    run.source = found.source;
    run.lanes = new Map(found.lanes.map((lane) => [lane.id, {
      ...lane, segments: lane.segments.map(([since, state, text]) => [found.begin + since, state, text ?? ""]),
    }]));
    if (run.source === "heartbeats") run.begin = begun(run);
    this.draw();
  }

  // Handle a change of kind "lanes".
  heard(number, change) {
    const run = this.runs[number];
    run.end = change.end;
    run.totals = change.totals;
    if (!run.isLoaded) return;
    if (run.source !== "heartbeats") { // the run was not up when the lanes were loaded
      run.isLoaded = false;
      return;
    }
    for (const lane of change.new) run.lanes.set(lane.id, { ...lane, segments: [] });
    for (const [id, state, text, version] of change.changed) {
      const lane = run.lanes.get(id);
      if (!lane) continue;
      lane.version = version;
      lane.segments.push([change.end, state, text]);
    }
    run.begin = begun(run);
    for (const [id, lane] of run.lanes) {
      while (lane.segments.length > 1 && lane.segments[1][0] <= run.begin) lane.segments.shift();
      if (lane.segments.length === 1 && lane.segments[0][1] < 0 && lane.segments[0][0] <= run.begin) run.lanes.delete(id);
    }
  }

  marked(number, marks) {
    const run = this.runs[number];
    for (const mark of marks) {
      const known = run.marks.find((other) => other.time === mark.time && other.kind === mark.kind && other.actor === mark.actor && other.text === mark.text);
      if (known) known.until = mark.until;
      else run.marks.push(mark);
    }
    while (run.marks.length > 500) run.marks.shift();
    if (number === this.chosen) this.drawMarks();
  }

  drawMarks() {
    const newest = [...this.run.marks].sort((a, b) => b.time - a.time).slice(0, MOST_SHOWN_MARKS);
    this.marks.replaceChildren(...newest.map((mark) => el("li", { class: mark.kind === "fault" && !mark.until ? "bad" : "" },
      `${clock(mark.time)}${mark.until ? `–${clock(mark.until)}` : ""} `, el("b", {}, `${mark.kind} ${mark.actor}`), ` ${mark.text}`,
      mark.remedy ? el("div", { class: "dim" }, mark.remedy) : null)));
    if (!newest.length) this.marks.append(el("li", { class: "dim" }, "nothing yet"));
  }

  shown() {
    const wanted = this.filter.value.trim().toLowerCase();
    const stateOf = (lane) => this.states[lane.segments.at(-1)?.[1]] ?? "gone";
    const found = [...this.run.lanes.values()].filter((lane) => !wanted || `${lane.name} ${lane.role} ${stateOf(lane)}`.toLowerCase().includes(wanted));
    const byName = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true });
    const isWorker = (lane) => (lane.role === "rollout-worker" ? 1 : 0);
    const rank = (lane) => WORST_FIRST.indexOf(stateOf(lane));
    const orders = {
      "trouble first": (a, b) => isWorker(a) - isWorker(b) || rank(a) - rank(b) || byName(a, b),
      "by name": byName,
      "oldest version first": (a, b) => isWorker(a) - isWorker(b) || a.version - b.version || byName(a, b),
    };
    return found.sort(orders[this.order.value]);
  }

  turn(by) {
    this.page = Math.max(0, this.page + by);
    this.draw();
  }

  draw() {
    if (!this.run || byId("lanes").hidden || document.hidden) return;
    if (!this.run.isLoaded) this.load(this.chosen);
    const all = this.shown();
    this.page = Math.min(this.page, Math.max(0, Math.ceil(all.length / PAGE) - 1));
    this.pages.hidden = all.length <= PAGE;
    this.visible = all.slice(this.page * PAGE, (this.page + 1) * PAGE);
    const totals = Object.entries(this.run.totals).map(([state, count]) => `${count} ${state}`).join(", ");
    const sources = { metrics: "from the metrics of each step", timeline: "from what the learner recorded beside its last steps" };
    const source = sources[this.run.source] ?? (totals && `workers: ${totals}`);
    this.info.textContent = all.length ? `${this.page * PAGE + 1}–${this.page * PAGE + this.visible.length} of ${all.length} lanes. ${source}` : "no actor was heard";
    const width = this.canvas.parentElement.clientWidth, height = TOP + ROW * this.visible.length + 4;
    LEFT = width < 600 ? 110 : 190;
    const context = prepared(this.canvas, width, height);
    context.font = "12px system-ui";
    this.visible.forEach((lane, row) => this.drawLane(context, lane, TOP + row * ROW, width));
    this.drawTimes(context, width, height);
  }

  // [begin, end] of the drawn time range.
  get times() {
    return this.shownTimes ?? [this.run.begin, Math.max(this.run.begin + 1, this.run.end)];
  }

  x(time, width) {
    const [begin, end] = this.times;
    return LEFT + ((time - begin) / (end - begin)) * (width - LEFT);
  }

  timeAt(event) {
    const [begin, end] = this.times;
    return begin + ((event.offsetX - LEFT) / (this.canvas.clientWidth - LEFT)) * (end - begin);
  }

  // Zoom around the pointer with the wheel.
  zoom(event) {
    if (event.offsetX < LEFT) return;
    event.preventDefault();
    const factor = event.deltaY > 0 ? 1.25 : 0.8, at = this.timeAt(event);
    const [begin, end] = this.times.map((time) => at + (time - at) * factor);
    const isAll = begin <= this.run.begin && end >= this.run.end;
    this.shownTimes = isAll ? null : [Math.max(begin, this.run.begin), Math.min(Math.max(end, begin + 0.5), this.run.end)];
    this.draw();
  }

  drawLane(context, lane, y, width) {
    context.fillStyle = themed("--front");
    context.fillText(lane.name.slice(0, LEFT < 190 ? 9 : 22), 0, y + 12);
    context.fillStyle = themed("--dim");
    context.fillText(`v${lane.version}`, LEFT - 44, y + 12);
    lane.segments.forEach(([since, state], index) => {
      if (state < 0) return;
      const from = Math.max(LEFT, this.x(since, width)), until = Math.min(width, this.x(lane.segments[index + 1]?.[0] ?? this.run.end, width));
      if (until <= LEFT || from >= width) return;
      context.fillStyle = FILLS[this.states[state]];
      context.fillRect(from, y + 2, Math.max(0.7, until - from), ROW - 5);
    });
  }

  drawTimes(context, width, height) {
    const [begin, end] = this.times;
    context.fillStyle = themed("--dim");
    const parts = width < 600 ? 3 : 5;
    for (let part = 0; part < parts; part += 1) {
      context.fillText(clock(begin + (part / parts) * (end - begin)), LEFT + (part / parts) * (width - LEFT), 12);
    }
    for (const mark of this.run.marks) {
      if (!["fault", "restart", "quarantined"].includes(mark.kind) || mark.time < begin || mark.time > end) continue;
      context.fillStyle = mark.kind === "fault" ? FILLS.silent : FILLS.loading;
      context.fillRect(this.x(mark.time, width), 14, 2, height);
    }
  }

  at(event) {
    const row = Math.floor((event.offsetY - TOP) / ROW);
    return event.offsetY < TOP ? undefined : this.visible?.[row];
  }

  tip(event) {
    const lane = this.at(event);
    if (!lane) return "";
    const time = this.timeAt(event);
    const segment = lane.segments.findLast(([since]) => since <= time) ?? lane.segments.at(-1);
    if (!segment) return lane.name;
    return `${lane.name} (${lane.role}), version ${lane.version}\n${clock(segment[0])} ${this.states[segment[1]] ?? "gone"}${segment[2] ? `: ${segment[2]}` : ""}`;
  }

  async choose(lane) {
    if (!lane) return;
    this.detail.hidden = false;
    try {
      this.detail.textContent = JSON.stringify(await fetched(`/api/runs/${this.chosen}/actors/${encodeURIComponent(lane.name)}`), null, 2);
    } catch (error) {
      this.detail.textContent = `${lane.name}: ${error.message}`;
    }
  }
}

// Begin of the window, or of the recorded part of it.
function begun(run) {
  const first = Math.min(run.end - 30, ...[...run.lanes.values()].map((lane) => lane.segments[0]?.[0] ?? run.end));
  return Math.max(run.end - run.window, first);
}
