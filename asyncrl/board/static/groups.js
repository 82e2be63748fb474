// The newest prompt groups of a run as a table with filters, and one opened group.
import { openGroup } from "./answers.js";
import { byId, el, fetched, number } from "./dom.js";

const COLUMNS = [
  ["group", "group_id", true], ["prompt", "prompt"], ["label", "label"], ["reward", "reward", true], ["lowest", "lowest", true],
  ["highest", "highest", true], ["fate", "fate"], ["step", "step", true], ["staleness", "staleness", true], ["answers", "answers", true],
  ["tokens", "tokens", true], ["seconds", "seconds", true], ["worker", "worker"], ["why", "reason"],
];

const OF_EVALUATION = [
  ["data set", "dataset"], ["prompt", "place", true], ["text", "prompt"], ["label", "label"], ["reward", "reward", true], ["lowest", "lowest", true],
  ["highest", "highest", true], ["step", "step", true], ["model", "model"], ["answers", "answers", true], ["tokens", "tokens", true], ["seconds", "seconds", true], ["worker", "worker"],
];
const ON_PHONE = new Set(["group_id", "prompt", "reward", "fate", "dataset", "label"]); // the other columns are hidden on a narrow screen


export class Groups {
  constructor() {
    this.run = 0;
    this.opened = null;
    this.asked = 0;
    const ask = () => this.load();
    this.text = el("input", { placeholder: "number, worker, reason or prompt", oninput: ask, "aria-label": "filter groups" });
    this.fate = el("select", { onchange: ask, "aria-label": "fate" },
      el("option", { value: "" }, "any fate"), ...["trained", "dropped", "failed", "filtered", "evaluated"].map((fate) => el("option", { value: fate }, fate)));
    this.order = el("select", { onchange: ask, "aria-label": "order" },
      ...["newest", "worst", "best", "stalest", "longest"].map((order) => el("option", { value: order }, `${order} first`)));
    this.hasText = el("input", { type: "checkbox", onchange: ask });
    this.isFollowed = el("input", { type: "checkbox" });
    this.isFollowed.checked = this.hasText.checked = true;
    this.info = el("span", { class: "dim" });
    this.head = el("thead", {});
    this.body = el("tbody", { id: "groups-rows" });
    this.one = el("div", { id: "group" });
    byId("groups").replaceChildren(
      el("div", { class: "bar" }, this.text, this.fate, this.order, el("label", {}, this.hasText, " with text"), el("label", {}, this.isFollowed, " follow"), this.info),
      el("div", { class: "scroll" }, el("table", {}, this.head, this.body)),
      this.one);
    window.setInterval(() => { if (this.isFollowed.checked && !document.hidden) this.load(); }, 3000);
  }

  select(run) {
    this.run = run;
    this.opened = null;
    this.one.replaceChildren();
    this.load();
  }

  async load() {
    if (byId("groups").hidden) return;
    const asked = (this.asked += 1);
    const query = new URLSearchParams({ text: this.text.value, fate: this.fate.value, order: this.order.value, has_text: this.hasText.checked ? "1" : "", limit: "100" });
    try {
      const { rows, total } = await fetched(`/api/runs/${this.run}/groups?${query}`);
      if (asked !== this.asked) return; // the filter has changed since
      this.info.textContent = total || !this.hasText.checked ? `${rows.length} of ${number(total)} groups` : "no group that matches has its text; untick “with text” for the others";
      const columns = query.get("fate") === "evaluated" ? OF_EVALUATION : COLUMNS;
      this.head.replaceChildren(el("tr", {}, ...columns.map(([title, name, isNumber]) => el("th", { class: classOf(name, isNumber) }, title))));
      this.body.replaceChildren(...rows.map((row) => this.row(row, columns)));
    } catch (error) {
      this.info.textContent = error.message;
    }
  }

  row(row, columns) {
    const cells = columns.map(([, name, isNumber]) => el("td", { class: classOf(name, isNumber) },
      row[name] === null ? "" : isNumber ? number(row[name]) : String(row[name]).slice(0, 160)));
    return el("tr", { "data-group": row.group_id, class: row.group_id === this.opened ? "chosen" : null, onclick: () => this.open(row.group_id) }, ...cells);
  }

  async open(id) {
    this.opened = id;
    for (const row of this.body.children) row.classList.toggle("chosen", Number(row.dataset.group) === id);
    this.one.replaceChildren(el("p", { class: "dim" }, `reading group ${id}`));
    try {
      const group = await fetched(`/api/runs/${this.run}/groups/${id}`);
      if (this.opened === id) openGroup(this.one, group, this.run);
    } catch (error) {
      if (this.opened === id) this.one.replaceChildren(el("p", { class: "bad" }, error.message));
    }
    this.one.scrollIntoView({ block: "nearest" });
  }
}

function classOf(name, isNumber) {
  return [isNumber ? "number" : "", ["prompt", "label", "reason"].includes(name) ? `line ${name}` : "", ON_PHONE.has(name) ? "" : "wide"].filter(Boolean).join(" ") || null;
}
