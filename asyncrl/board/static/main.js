// Load an overview of the runs, then follow the stream of changes.
import { Charts } from "./charts.js";
import { byId, colour, el, fetched, number } from "./dom.js";
import { Groups } from "./groups.js";
import { Histograms } from "./histograms.js";
import { Lanes } from "./lanes.js";

const charts = new Charts();
const histograms = new Histograms();
const groups = new Groups();
let lanes = null;
let runs = [];
let chosen = 0;

async function begin() {
  const found = await fetched("/api/runs");
  runs = found.runs.map((run, index) => ({ ...run, isShown: runs[index]?.isShown ?? true }));
  lanes ??= new Lanes(found.states);
  histograms.begin(runs);
  lanes.begin(runs);
  drawRuns();
  await charts.begin(runs);
  document.body.dataset.ready = "yes";
}

function drawRuns() {
  drawHealth();
  byId("runs").replaceChildren(...runs.map((run, index) => {
    const { last } = run;
    const parts = [run.status];
    if (last.step !== undefined) parts.push(`step ${last.step}${run.steps ? ` of ${run.steps}` : ""}`);
    if (last["reward/mean"] !== undefined) parts.push(`reward ${number(last["reward/mean"])}`);
    if (last["learner/tokens_per_second"] !== undefined) parts.push(`${number(Math.round(last["learner/tokens_per_second"]))} tok/s`);
    const box = el("input", { type: "checkbox", title: "show its curves", onclick: (event) => { event.stopPropagation(); show(index, event.target.checked); } });
    box.checked = run.isShown;
    return el("button", { class: run.isShown ? "run" : "run hidden", "aria-pressed": String(index === chosen), "data-run": index, onclick: () => choose(index) },
      box, el("i", { class: "dot", colour: colour(index) }), el("span", {}, run.name, " ", el("small", {}, parts.join(" · "))));
  }));
}

// One line per run on whether it is healthy and why, and the five numbers to watch of the chosen one.
function drawHealth() {
  const lines = runs.map(({ name, health }) => el("p", { class: health.is_good === null ? "dim" : health.is_good ? "good" : "bad" },
    el("b", {}, health.is_good === null ? "–" : health.is_good ? "✓" : "✗"), " ", runs.length > 1 ? `${name}: ` : "", health.why));
  const numbers = (runs[chosen]?.health.numbers ?? []).map((one) => el("div", { class: one.is_normal ? "vital" : "vital bad" },
    el("small", {}, runs.length > 1 ? `${one.title} of ${runs[chosen].name}` : one.title), el("b", {}, one.value), el("small", {}, `normal: ${one.normal}`)));
  byId("health").replaceChildren(...lines, el("div", { id: "vitals" }, ...numbers));
}

function show(index, isShown) {
  runs[index].isShown = isShown;
  charts.show(index, isShown);
  histograms.show(index, isShown);
  drawRuns();
}

function choose(index) {
  chosen = index;
  lanes.select(index);
  groups.select(index);
  drawRuns();
}

const CHANGES = {
  rows: (change) => { charts.rows(change.run, change.rows); histograms.rows(change.run, change.rows); },
  summary: (change) => { Object.assign(runs[change.run], change); drawRuns(); },
  lanes: (change) => lanes.heard(change.run, change),
  marks: (change) => lanes.marked(change.run, change.marks),
  reload: () => beginAnew(),
  restart: () => beginAnew(),
};

// Changes that arrive while the overview loads are queued. Applying a change that the overview already has is harmless.
let waiting = null;

async function beginAnew() {
  if (waiting) return;
  waiting = [];
  try {
    await begin();
    byId("connection").textContent = "live";
    byId("connection").className = "";
  } catch (error) {
    byId("connection").textContent = error.message;
    byId("connection").className = "bad";
    window.setTimeout(beginAnew, 2000);
  }
  const said = waiting;
  waiting = null;
  said.forEach(apply);
}

function apply(change) {
  if (waiting) waiting.push(change);
  else CHANGES[change.kind]?.(change);
}

const CLOSED_SECONDS = 5;

// The browser reconnects automatically unless it was refused, for example because too many are connected.
function follow() {
  const stream = new EventSource("/api/stream");
  stream.onopen = () => beginAnew();
  stream.onerror = () => {
    byId("connection").textContent = "the board does not answer; trying again";
    byId("connection").className = "bad";
    if (stream.readyState === EventSource.CLOSED) window.setTimeout(follow, 1000 * CLOSED_SECONDS);
  };
  stream.onmessage = (event) => apply(JSON.parse(event.data));
}

follow();

byId("tabs").addEventListener("click", (event) => {
  const tab = event.target.dataset.tab;
  if (!tab) return;
  for (const button of byId("tabs").children) {
    button.setAttribute("aria-selected", String(button.dataset.tab === tab));
    byId(button.dataset.tab).hidden = button.dataset.tab !== tab;
  }
  drawAnew();
  groups.load();
});

// Charts are as wide as their boxes: draw them when a tab shows them, and when the window or the phone is turned.
function drawAnew() {
  charts.isDirty = histograms.isDirty = true;
  charts.draw();
  histograms.draw();
  lanes?.draw();
}

window.addEventListener("resize", drawAnew);
