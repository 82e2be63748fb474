// All elements of the page are built here. Text is inserted as text, never as HTML.

export const COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccaa22", "#66ccee", "#aa3377", "#ee8866", "#777777"];

export function colour(run) {
  return COLOURS[run % COLOURS.length];
}

// el("p", {class: "dim"}, "text", child) creates an element; a key that begins with "on" is a listener.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "colour") made.style.background = value;
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

export async function fetched(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer.json();
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

// Resize a canvas to CSS pixels at the screen's resolution; return its cleared context.
export function prepared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const tip = el("div", { class: "tip", hidden: "" });

// Show a tooltip next to the pointer; "" hides it.
export function showTip(event, text) {
  if (!tip.isConnected) document.body.append(tip);
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - 430)}px`;
  tip.style.top = `${event.clientY + 12}px`;
}
