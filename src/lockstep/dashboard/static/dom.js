// Small helpers. Whatever a task says is put on the page as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null && child !== ""));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.95) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

export function count(value) {
  if (value == null) return "–";
  if (value >= 10000) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

export function rate(bytes) {
  const units = ["B/s", "kB/s", "MB/s", "GB/s"];
  let place = 0;
  while (bytes >= 999.5 && place < units.length - 1) { bytes /= 1000; place += 1; }
  return `${bytes >= 99.5 || place === 0 ? bytes.toFixed(0) : bytes.toPrecision(2)} ${units[place]}`;
}

export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
