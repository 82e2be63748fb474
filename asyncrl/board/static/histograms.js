// Staleness over steps as a heat map, and lengths of trained and dropped answers as bars.
import { byId, colour, el, number, prepared, showTip, themed } from "./dom.js";

const MOST_COLUMNS = 800; // in the browser; after a reload the server sends coarser columns
const NAMES = ["staleness/histogram", "length/trained", "length/dropped"];

export class Histograms {
  constructor() {
    this.runs = [];
    this.isDirty = false;
    window.setInterval(() => this.draw(), 1000);
  }

  // runs: overviews of /api/runs, with isShown
  begin(runs) {
    this.runs = runs.map((run, index) => {
      const map = el("canvas", { "aria-label": `staleness of ${run.name} over steps` });
      const bars = el("canvas", { "aria-label": `lengths of trained and dropped answers of ${run.name}` });
      const shares = el("div", { class: "legend", "data-shares": index });
      const box = el("div", {},
        el("h2", {}, el("i", { class: "dot", colour: colour(index) }), `${run.name}: staleness of trained tokens, in versions, over steps`), map, shares,
        el("h2", {}, "Length of answers, in tokens: trained (filled) and dropped as too stale (outlined), share of each"), bars);
      const made = { box, map, bars, shares, columns: structuredClone(run.histograms) };
      box.hidden = !run.isShown;
      map.addEventListener("mousemove", (event) => showTip(event, this.tip(made, event)));
      map.addEventListener("mouseleave", (event) => showTip(event, ""));
      return made;
    });
    byId("staleness").replaceChildren(...this.runs.map((run) => run.box));
    this.isDirty = true;
  }

  rows(index, rows) {
    for (const row of rows) {
      for (const name of NAMES) {
        if (!row.histograms[name]) continue;
        const { steps, counts } = this.runs[index].columns[name];
        while (steps.length && steps[steps.length - 1] >= row.step) { steps.pop(); counts.pop(); }
        steps.push(row.step);
        counts.push(row.histograms[name]);
        if (steps.length > MOST_COLUMNS) { steps.shift(); counts.shift(); }
      }
    }
    this.isDirty = true;
  }

  show(index, isShown) {
    this.runs[index].box.hidden = !isShown;
    this.isDirty = true;
  }

  draw() {
    if (!this.isDirty || byId("staleness").hidden || document.hidden) return;
    this.isDirty = false;
    for (const [index, run] of this.runs.entries()) {
      if (run.box.hidden) continue;
      drawMap(run, colour(index));
      drawBars(run, colour(index));
    }
  }

  tip(run, event) {
    const { steps, counts } = run.columns["staleness/histogram"];
    const at = Math.floor(((event.offsetX - 40) / (run.map.clientWidth - 40)) * steps.length);
    if (!counts[at]) return "";
    const total = sum(counts[at]) || 1;
    return `step ${steps[at]}\n` + counts[at].map((count, age) => `${age} old: ${((100 * count) / total).toFixed(1)} %`).filter((_, age) => counts[at][age]).join("\n");
  }
}

function sum(counts) {
  return counts.reduce((all, count) => all + count, 0);
}

function drawMap(run, fill) {
  const { steps, counts } = run.columns["staleness/histogram"];
  const ages = Math.max(1, ...counts.map((column) => column.length));
  const width = run.map.parentElement.clientWidth, height = Math.max(60, Math.min(240, ages * 20));
  const context = prepared(run.map, width, height + 18);
  const wide = (width - 40) / Math.max(1, steps.length), high = height / ages;
  context.fillStyle = fill;
  counts.forEach((column, x) => {
    const total = sum(column) || 1;
    column.forEach((count, age) => {
      if (!count) return;
      context.globalAlpha = 0.12 + 0.88 * Math.sqrt(count / total);
      context.fillRect(40 + x * wide, height - (age + 1) * high, Math.max(1, wide - (wide > 4 ? 1 : 0)), high - 1);
    });
  });
  context.globalAlpha = 1;
  context.fillStyle = themed("--dim");
  context.font = "11px system-ui";
  for (let age = 0; age < ages; age += Math.ceil(ages / 10)) context.fillText(String(age), 16, height - (age + 0.3) * high);
  if (steps.length) {
    context.fillText(`step ${steps[0]}`, 40, height + 14);
    context.fillText(String(steps[steps.length - 1]), width - 40, height + 14);
  }
  const all = totals(counts), total = sum(all) || 1;
  run.shares.replaceChildren(...all.map((count, age) => el("span", {}, `${age} versions: ${((100 * count) / total).toFixed(1)} %`)));
}

function totals(columns) {
  const all = [];
  for (const column of columns) column.forEach((count, index) => { all[index] = (all[index] ?? 0) + count; });
  return all;
}

function drawBars(run, fill) {
  const trained = totals(run.columns["length/trained"].counts), dropped = totals(run.columns["length/dropped"].counts);
  const bins = Math.max(trained.length, dropped.length, 1);
  const width = run.bars.parentElement.clientWidth, height = 160;
  const context = prepared(run.bars, width, height + 34);
  const [ofTrained, ofDropped] = [sum(trained) || 1, sum(dropped) || 1];
  const largest = Math.max(0.01, ...trained.map((count) => count / ofTrained), ...dropped.map((count) => count / ofDropped));
  const wide = Math.min(90, width / bins);
  context.font = "11px system-ui";
  for (let bin = 0; bin < bins; bin += 1) {
    const [one, other] = [(trained[bin] ?? 0) / ofTrained, (dropped[bin] ?? 0) / ofDropped].map((share) => (share / largest) * height);
    context.fillStyle = fill;
    context.fillRect(bin * wide + 4, height - one, wide / 2 - 5, one);
    context.strokeStyle = themed("--front");
    context.strokeRect(bin * wide + wide / 2 + 0.5, height - other + 0.5, wide / 2 - 6, Math.max(0, other - 1));
    context.fillStyle = themed("--dim");
    context.fillText(bin ? `${number(2 ** (bin - 1))}+` : "0", bin * wide + 4, height + 14);
  }
  context.fillText(`${number(sum(trained))} trained, ${number(sum(dropped))} dropped; from so many tokens on`, 4, height + 30);
}
