// Curves over steps: one chart per row of CHARTS, with a line for each run and metric. A run has one colour where
// several are shown, a metric has one otherwise; the second metric of a chart is dashed, the third dotted.
import { byId, colour, el, fetched } from "./dom.js";

const LEARNS = "Does it learn?", STEADY = "Is it steady?", FAST = "Is it fast?";
const PARTS = "Parts of the reward";
const CHARTS = [
  ["Reward", ["reward/mean"], LEARNS],
  [PARTS, [], LEARNS],
  ["Groups with equal rewards, share", ["reward/same_in_group"], LEARNS],
  ["Entropy", ["entropy"], LEARNS],
  ["Length: trained and dropped", ["length/trained_mean", "length/dropped_mean"], LEARNS],
  ["Loss", ["loss"], STEADY],
  ["KL to the reference", ["kl"], STEADY],
  ["Gradient norm", ["grad_norm"], STEADY],
  ["Trainer and engine apart, nats per token", ["mismatch/fresh_mean", "mismatch/mean"], STEADY],
  ["Effective sample size", ["offpolicy/ess"], STEADY],
  ["Staleness: mean and oldest", ["staleness/mean", "staleness/max"], STEADY],
  ["Share of answers dropped as too stale", ["staleness/dropped_share"], STEADY],
  ["Idle: learner and engines", ["learner/idle_ratio", "rollout/idle_ratio"], FAST],
  ["Trained tokens per second", ["learner/tokens_per_second"], FAST],
  ["Sampled tokens per second", ["rollout/tokens_per_second"], FAST],
  ["Seconds of a step: all, and training alone", ["learner/elapsed_seconds", "learner/step_seconds"], FAST],
  ["GPU-seconds per trained token", ["cost/gpu_seconds_per_token"], FAST],
  ["Rollout workers", ["rollout/workers"], FAST],
];
const PART = /^reward\/(?!(mean|std|same_in_group)$)/;
const MOST_PARTS = 8;
const DASHES = [[], [8, 5], [2, 3], [8, 3, 2, 3]];
const KINDS = ["", " (dashed)", " (dotted)", " (dash, dot)"];
const MARKERS = ["solid", "dashed", "dotted", "double"];
const MOST_OF_EVALUATION = 12;
const JUDGED = /^evaluation\/([^[\]]+)\/((?:mean@|majority@|pass@(?!1$))[^/]+)$/; // metrics of a whole data set; others can be added by name

export class Charts {
  constructor() {
    this.runs = [];
    this.charts = new Map(); // title -> {metrics, box, plot}
    this.isDirty = false;
    window.setInterval(() => this.draw(), 500);
    byId("more").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = byId("metric").value.trim();
      byId("metric").value = "";
      if (name) this.add(name, [name], "Others").then(() => this.draw());
    });
  }

  // runs: overviews of /api/runs, with isShown
  async begin(runs) {
    this.runs = runs.map((run) => ({ name: run.name, names: new Set(run.curves), curves: {}, isHidden: !run.isShown }));
    const names = new Set(runs.flatMap((run) => run.curves));
    for (const [title, metrics, section] of CHARTS) {
      if (title === PARTS) metrics.splice(0, metrics.length, ...[...names].filter((name) => PART.test(name)).sort().slice(0, MOST_PARTS));
      if (metrics.some((name) => names.has(name)) || (!names.size && title !== PARTS)) this.place(title, metrics, section);
    }
    for (const name of [...names].sort()) this.placeEvaluation(name);
    byId("metrics").replaceChildren(...[...names].sort().map((name) => el("option", { value: name })));
    await this.load([...this.charts.values()].flatMap((chart) => chart.metrics));
  }

  async add(title, metrics, section) {
    this.place(title, metrics, section);
    await this.load(metrics);
  }

  async load(names, only = null) {
    const query = [...new Set(names)].map((name) => `name=${encodeURIComponent(name)}`).join("&");
    await Promise.all(
      this.runs.map(async (run, number) => {
        if (only === null || only === number) Object.assign(run.curves, await fetched(`/api/runs/${number}/curves?${query}`));
      }),
    );
    this.isDirty = true;
  }

  reload(number) {
    return this.load([...this.charts.values()].flatMap((chart) => chart.metrics), number);
  }

  rows(number, rows) {
    const run = this.runs[number];
    const wanted = new Set([...this.charts.values()].flatMap((chart) => chart.metrics));
    for (const row of rows) {
      for (const name of Object.keys(row)) {
        if (name === "step" || name === "histograms") continue;
        if (!run.names.has(name)) this.discovered(run, name);
        if (!wanted.has(name)) continue;
        const [steps, values] = (run.curves[name] ??= [[], []]);
        while (steps.length && steps[steps.length - 1] >= row.step) { steps.pop(); values.pop(); } // trained again
        steps.push(row.step);
        values.push(row[name]);
      }
    }
    this.isDirty = true;
  }

  discovered(run, name) {
    run.names.add(name);
    if (![...byId("metrics").options].some((option) => option.value === name)) byId("metrics").append(el("option", { value: name }));
    const parts = CHARTS.find(([title]) => title === PARTS)[1];
    if (PART.test(name) && !parts.includes(name) && parts.length < MOST_PARTS) parts.push(name);
    const found = CHARTS.find(([, metrics]) => metrics.includes(name));
    if (found) this.add(...found);
    else if (this.placeEvaluation(name)) this.load(bounded(name));
  }

  placeEvaluation(name) {
    const judged = JUDGED.exec(name);
    const isFull = [...this.charts.values()].filter((chart) => chart.isEvaluation).length >= MOST_OF_EVALUATION;
    if (!judged || isFull) return false;
    this.place(`Evaluation on ${judged[1]}: ${judged[2]}`, bounded(name), LEARNS, true);
    return true;
  }

  show(number, isShown) {
    this.runs[number].isHidden = !isShown;
    this.isDirty = true;
  }

  place(title, metrics, section, isEvaluation = false) {
    if (this.charts.has(title)) return;
    const box = el("div", { class: "chart", "data-title": title }, el("h3", {}, title));
    const isBehind = (other) => other.dataset.title !== "Reward" && !other.dataset.title.startsWith("Evaluation");
    const order = (other) => CHARTS.findIndex(([known]) => known === other.dataset.title);
    const isLater = (other) => order(box) >= 0 && order(other) > order(box);
    const place = this.section(section);
    place.insertBefore(box, [...place.children].find(isEvaluation ? isBehind : isLater) ?? null);
    this.charts.set(title, { metrics, box, isEvaluation, plot: null, shape: "" });
    this.isDirty = true;
  }

  // The grid of the charts that answer one question.
  section(title) {
    const known = [...byId("charts").children].find((box) => box.dataset.section === title);
    if (known) return known.lastChild;
    const order = [LEARNS, STEADY, FAST, "Others"];
    const made = el("div", { "data-section": title }, el("h2", {}, title), el("div", { class: "grid" }));
    const later = [...byId("charts").children].find((box) => order.indexOf(box.dataset.section) > order.indexOf(title));
    byId("charts").insertBefore(made, later ?? null);
    return made.lastChild;
  }

  draw() {
    if (!this.isDirty || byId("curves").hidden || document.hidden) return;
    this.isDirty = false;
    for (const chart of this.charts.values()) this.drawOne(chart);
  }

  drawOne(chart) {
    const lines = this.runs.flatMap((run, number) =>
      chart.metrics.map((name, index) => ({ run, number, name, index, points: run.curves[name] })),
    ).filter((line) => line.points && line.points[0].length && !line.run.isHidden);
    const width = chart.box.clientWidth - 16;
    const shape = lines.map((line) => `${line.number}/${line.name}`).join() + width;
    const data = lines.length ? window.uPlot.join(lines.map((line) => line.points)) : [[], []];
    if (chart.plot && chart.shape === shape) { chart.plot.setData(data); showLast(chart.plot); return; }
    chart.plot?.destroy();
    chart.shape = shape;
    chart.plot = lines.length ? new window.uPlot(this.options(lines, width), data, chart.box) : null;
  }

  options(lines, width) {
    const front = getComputedStyle(document.body).color;
    const axis = { stroke: front, grid: { stroke: "#8883", width: 1 }, ticks: { stroke: "#8883" } };
    const isOne = new Set(lines.map((line) => line.number)).size === 1;
    const hue = (line) => colour(isOne && !isBound(line.name) ? line.number + line.index : line.number);
    const isShort = (line) => line.points[0].length < 40 && !isBound(line.name);
    const label = (line) => (this.runs.length > 1 ? `${line.run.name} ` : "") + line.name.replace(/^evaluation\//, "") + (isBound(line.name) ? "" : KINDS[line.index % KINDS.length]);
    return {
      width,
      height: 200,
      legend: { markers: { dash: (plot, index) => MARKERS[(lines[index - 1]?.index ?? 0) % MARKERS.length] } },
      scales: { x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: (plot, low, high) => (low === high ? [low - 0.5, high + 0.5] : window.uPlot.rangeNum(low, high, 0.1, true)) } },
      cursor: { sync: { key: "steps" } },
      hooks: { ready: [showLast], setCursor: [showLast] },
      axes: [{ ...axis }, { ...axis, size: 60 }],
      bands: bands(lines),
      series: [{ label: "step" }, ...lines.map((line) => ({
        label: label(line), stroke: hue(line), dash: DASHES[line.index % DASHES.length], spanGaps: true,
        class: isBound(line.name) ? "bound" : null,
        width: isBound(line.name) ? 0 : 1.5 + 0.5 * (line.index > 0), points: { show: isShort(line), size: line.points[0].length < 4 ? 9 : 5, fill: hue(line) },
      }))],
    };
  }
}

// While the pointer is outside the chart, the legend shows the newest value of each line: a shorter run's is at an
// earlier step.
function showLast(plot) {
  if (plot.cursor.idx == null) plot.setLegend({ idxs: plot.data.map((values) => values.findLastIndex((value) => value != null)) }, false);
}

function isBound(name) {
  return name.startsWith("evaluation/") && /\/(low|high)$/.test(name);
}

// An evaluation metric and the bounds of its interval.
function bounded(name) {
  return [name, `${name}/low`, `${name}/high`];
}

// Fill the interval of each run between its bounds.
function bands(lines) {
  const at = (number, end) => lines.findIndex((line) => line.number === number && isBound(line.name) && line.name.endsWith(end)) + 1;
  return [...new Set(lines.map((line) => line.number))].filter((number) => at(number, "/high")).map((number) => ({
    series: [at(number, "/high"), at(number, "/low")], fill: `${colour(number)}22`,
  }));
}
