// One prompt group: its answers as text, coloured per token. Model output is only ever inserted as text.
import { el, number, showTip } from "./dom.js";

const MODES = [
  ["version", "policy version"],
  ["logprob", "engine logprob"],
  ["advantage", "advantage"],
  ["trainer", "trainer − engine logprob"],
  ["entropy", "entropy"],
];
const NOT_RECORDED = "not recorded: known of trained groups in samples.jsonl";
let mode = "version";

// Whether the group has this value for its tokens.
function isKnown(group, name) {
  if (name === "trainer") return group.answers.some((answer) => answer.trainer_logprobs.length);
  if (name === "entropy") return group.answers.some((answer) => answer.entropies.length);
  return true;
}

// The images that prompt and answers show, each once. Those of a run on another machine have no file here.
function images(group, run) {
  const digests = [...new Set(group.answers.flatMap((answer) => (answer.images ?? []).map(([, , digest]) => digest)))];
  if (!digests.length) return null;
  return el("div", { class: "images" }, ...digests.map((digest) => el("img", { src: `/api/runs/${run}/images/${digest}`, alt: `image ${digest.slice(0, 12)}`, title: `image ${digest.slice(0, 12)}`, loading: "lazy" })));
}

export function openGroup(place, group, run) {
  const answers = el("div", {});
  if (!isKnown(group, mode)) mode = "version";
  const draw = () => answers.replaceChildren(legend(group), ...group.answers.map((answer, index) => answerBox(group, answer, index)));
  const modes = el("div", { class: "bar" }, "colour by ", ...MODES.map(([name, title]) => {
    const isMissing = !isKnown(group, name);
    const button = el("button", { "data-mode": name, title: isMissing ? NOT_RECORDED : null, disabled: isMissing ? "" : false, "aria-pressed": String(name === mode) }, title + (isMissing ? " (not recorded)" : ""));
    button.addEventListener("click", () => {
      mode = name;
      for (const other of modes.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other.dataset.mode === mode));
      draw();
    });
    return button;
  }));
  place.replaceChildren(...[
    el("h2", {}, heading(group)),
    group.problem ? el("p", { class: "bad" }, `no text for each token: ${group.problem}`) : null,
    el("div", { class: "text", "data-part": "prompt" }, group.prompt ?? `tokens ${group.prompt_tokens.join(" ")}`),
    images(group, run),
    group.label ? el("div", { class: "text", "data-part": "label" }, labelled("label: the answer in the data"), group.label) : null,
    group.answers.length ? modes : el("p", { class: "bad" }, group.reason),
    answers,
  ].filter((part) => part !== null));
  if (group.answers.length) draw();
}

function heading(group) {
  const parts = [group.name, group.model ? `of ${group.model}` : group.step || ["trained", "evaluated"].includes(group.fate) ? `${group.fate} at step ${group.step}` : group.fate];
  if (group.reason) parts.push(group.reason);
  if (group.worker) parts.push(`worker ${group.worker}`);
  if (group.seconds) parts.push(`${number(group.seconds)} s`);
  return parts.join(" · ");
}

// "answer 2", or "answer 2, part 1 of 3" if the rollout has several trajectories.
function titleOf(group, answer, index) {
  const count = answer.rollout >= 0 ? group.answers.filter((other) => other.rollout === answer.rollout).length : 1;
  return `answer ${(answer.rollout >= 0 ? answer.rollout : index) + 1}` + (count > 1 ? `, part ${answer.part + 1} of ${count}` : "");
}

function answerBox(group, answer, index) {
  const parts = Object.entries(answer.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const title = [titleOf(group, answer, index), `reward ${number(answer.reward)}${parts ? ` (${parts})` : ""}`];
  if (group.fate !== "evaluated") title.push(answer.advantage === null ? "advantage not known" : `advantage ${number(answer.advantage)}`);
  if (answer.staleness !== null) title.push(`staleness ${answer.staleness}`);
  title.push(`${answer.tokens.length} tokens`, answer.finish_reason);
  const box = el("details", { class: "answer", "data-answer": index }, el("summary", {}, title.join(" · ")));
  const fill = () => { if (box.open && box.children.length === 1) box.append(versions(answer), ...(answer.prompt_tokens?.length ? [el("div", { class: "text prompt" }, labelled("its own prompt"), answer.prompt ?? `tokens ${answer.prompt_tokens.join(" ")}`)] : []), textOf(answer, group.texts[index])); };
  box.addEventListener("toggle", fill);
  box.open = index < 4;
  fill();
  return box;
}

// Label of a turn: "turn 2, reward +0.5: tool call add({})", or "tool result" for tool output; "" for an answer's only turn.
function turnLabel(answer, turn, by) {
  if (answer.titles.length < 2 && by === "policy") return "";
  const pieces = answer.pieces.filter((piece) => piece.turn === turn && piece.kind !== "text");
  const kinds = [...new Set(pieces.map((piece) => (piece.kind === "tool call" ? `tool call ${piece.text.slice(0, 120)}` : piece.kind)))].join(", ");
  return by === "policy" ? [answer.titles[turn], kinds].filter(Boolean).join(": ") : kinds || by;
}

// The label of a turn is an attribute, so that copied text contains only model output.
function labelled(label) {
  return label ? el("span", { class: "turn", "data-label": label }) : "";
}

function textOf(answer, texts) {
  const box = el("div", { class: "text" });
  const environment = (turn, text) => el("span", { class: "environment", title: "written by a tool or an environment" }, labelled(turnLabel(answer, turn, "environment")), text);
  if (!texts) {
    answer.turns.forEach(([by, text], turn) => (by === "policy" ? box.append(labelled(turnLabel(answer, turn, by)), text) : box.append(environment(turn, text))));
    if (!answer.turns.length) box.append(answer.tokens.join(" "));
    return box;
  }
  const paint = painter(answer);
  let at = 0, turn = 0;
  for (const [start, end] of [...answer.environment, [answer.tokens.length, answer.tokens.length]]) {
    if (at < start) box.append(labelled(turnLabel(answer, turn++, "policy")));
    for (; at < start; at += 1) box.append(token(answer, texts, at, paint(at)));
    if (end > start) box.append(environment(turn++, texts.slice(start, end).join("")));
    at = Math.max(at, end);
  }
  box.addEventListener("mousemove", (event) => showTip(event, tip(answer, texts, Number(event.target.dataset?.token ?? -1))));
  box.addEventListener("mouseleave", (event) => showTip(event, ""));
  return box;
}

function token(answer, texts, index, colour) {
  const made = el("span", { class: "token", "data-token": index }, texts[index]);
  if (colour) made.style.background = colour;
  return made;
}

function spanAt(answer, index) {
  return answer.versions.findLast(([start]) => start <= index) ?? answer.versions[0];
}

function advantageAt(answer, index) {
  return answer.advantages.length ? answer.advantages[index] : answer.advantage;
}

// trainer − engine logprob of a token; null if the step did not train it.
function differenceAt(answer, index) {
  const trainer = answer.trainer_logprobs[index] ?? null;
  return trainer === null ? null : trainer - answer.logprobs[index];
}

function tip(answer, texts, index) {
  if (index < 0) return "";
  const [, incarnation, version] = spanAt(answer, index);
  const advantage = advantageAt(answer, index), difference = differenceAt(answer, index), entropy = answer.entropies[index] ?? null;
  const trainer = difference === null ? "" : `\ntrainer logprob ${number(answer.trainer_logprobs[index])}, ${difference > 0 ? "+" : ""}${number(difference)} to the engine's` + (entropy === null ? "" : `; entropy ${number(entropy)}`);
  return `token ${index}: ${JSON.stringify(texts[index])}, id ${answer.tokens[index]}\nversion ${version}${incarnation ? ` of incarnation ${incarnation}` : ""}\n` +
    `engine logprob ${number(answer.logprobs[index])} (probability ${number(Math.exp(answer.logprobs[index]))})${trainer}\nadvantage ${advantage === null ? "not known" : number(advantage)}`;
}

const VERSIONS = ["#4477aa55", "#ee667755", "#22883355", "#ccaa2255", "#66ccee55", "#aa337755", "#ee886655", "#77777755"];

const MOST_DIFFERENCE = 0.5, MOST_ENTROPY = 4; // nats at which a colour is fully saturated

function signed(value, most) {
  if (value === null) return "";
  return `rgb(${value < 0 ? "200 60 40" : "40 150 70"} / ${Math.min(0.85, 0.1 + (0.75 * Math.abs(value)) / most).toFixed(3)})`;
}

// Return a function from token index to colour.
function painter(answer) {
  if (mode === "version") {
    const found = [...new Set(answer.versions.map(([, , version]) => version))];
    return (index) => VERSIONS[found.indexOf(spanAt(answer, index)[2]) % VERSIONS.length];
  }
  if (mode === "logprob") return (index) => `rgb(200 60 40 / ${Math.min(0.85, -answer.logprobs[index] / 6).toFixed(3)})`;
  if (mode === "trainer") return (index) => signed(differenceAt(answer, index), MOST_DIFFERENCE);
  if (mode === "entropy") return (index) => `rgb(120 80 190 / ${Math.min(0.85, (answer.entropies[index] ?? 0) / MOST_ENTROPY).toFixed(3)})`;
  const largest = Math.max(1e-9, ...(answer.advantages.length ? answer.advantages.map(Math.abs) : [Math.abs(answer.advantage ?? 0)]), 2);
  return (index) => signed(advantageAt(answer, index), largest);
}

function versions(answer) {
  if (mode !== "version") return "";
  const found = [...new Set(answer.versions.map(([, , version]) => version))];
  return el("div", { class: "legend" }, ...found.map((version, index) => el("span", {}, el("i", { colour: VERSIONS[index % VERSIONS.length] }), `version ${version}`)));
}

function legend(group) {
  const hasAdvantage = group.answers.some((answer) => answer.advantage !== null), isEach = group.answers.some((answer) => answer.advantages.length);
  const texts = {
    version: "a colour for each policy version that sampled a part of the answer",
    logprob: "the redder, the less probable under the policy that sampled it (6 nats and more: full)",
    trainer: `the trainer's logprob, when the step trained the token, less the engine's when it sampled it: green where the trainer finds it likelier, red less likely (${MOST_DIFFERENCE} nats and more: full)`,
    entropy: `of the policy at the token, when the step trained it: the darker, the less certain (${MOST_ENTROPY} nats and more: full)`,
    advantage: !hasAdvantage ? "advantages are known of recorded groups that were trained" : `${isEach ? "an advantage for each token" : "one advantage for all tokens of an answer"}: green above 0, red below`,
  };
  return el("p", { class: "legend" }, texts[mode]);
}
