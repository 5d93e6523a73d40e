// Listens to the frames of the command that serves this page, and lets each panel draw its part of them.
import { showCharts } from "./charts.js";
import { byId, clock, count, make, rate, seconds, setText } from "./dom.js";
import { showGraph } from "./graph.js";
import { showLinks } from "./links.js";
import { showParts } from "./parts.js";
import { showTasks } from "./tasks.js";
import { beginTimeline, plan, showTimeline } from "./timeline.js";
import { showVerdict } from "./verdict.js";

const POINTS = 900;
const LATE = 6000;
let points = [];
let frame = null;
let heard = 0;
let usual = 0;
let connected = false;

function show(next) {
  frame = next;
  usual = heard ? Date.now() - heard : 0;
  heard = Date.now();
  if (next.points) points = next.points;
  else if (next.point) points = [...points, next.point].slice(-POINTS);
  setText(byId("source"), { live: "job at ", files: "files in ", simulated: "" }[next.source.kind] + next.source.words);
  setText(byId("job"), next.job ? `· job ${next.job}` : "");
  setText(byId("version"), next.version);
  document.title = next.verdict ? `✕ ${next.verdict.culprit}: ${next.verdict.title} · lockstep` : `step ${next.numbers.step} · lockstep`;
  for (const panel of [showVerdict, showNumbers, showTasks, showGraph, showTimeline, showParts, showLinks]) panel(next);
  showCharts(next, points);
  showLive();
  document.documentElement.dataset.frames = next.number;
}

function showNumbers(next) {
  const numbers = next.numbers;
  const rows = [
    ["step", numbers.step >= 0 ? String(numbers.step) : "–", ""],
    ["a step takes", ...parted(seconds(numbers.median))],
    numbers.examples == null ? ["steps", count(numbers.rate), "a second"] : ["examples", count(numbers.examples), "a second"],
    ["loss", numbers.loss == null ? "–" : numbers.loss.toPrecision(4), ""],
    ["tasks answer", String(numbers.answering), `of ${numbers.tasks}`],
    ["on the links", ...(next.source.kind === "live" ? parted(rate(next.links.rate)) : ["–", ""])],
  ];
  const box = byId("numbers");
  if (!box.children.length) {
    box.append(...rows.map(([name]) => make("div", { class: "number" }, make("div", { class: "name" }, name), make("div", { class: "value" }))));
  }
  rows.forEach(([name, value, unit], i) => {
    const [top, bottom] = box.children[i].children;
    setText(top, name);
    if (bottom.dataset.shown === value + unit) return;
    bottom.dataset.shown = value + unit;
    bottom.replaceChildren(value, unit ? " " : "", unit ? make("small", {}, unit) : "");
  });
}

function parted(text) {
  const [value, unit] = text.split(" ");
  return [value, unit ?? ""];
}

function showLive() {
  const box = byId("live");
  let state = "live", words = "live";
  if (!connected || (frame && frame.source.kind !== "files" && Date.now() - heard > Math.max(LATE, 3 * usual))) [state, words] = ["lost", "no news; trying again"];
  else if (frame && frame.source.kind === "files") [state, words] = ["still", `written at ${clock(frame.time)}`];
  else if (frame && frame.mood === "gone") [state, words] = ["still", "ended"];
  box.dataset.state = state;
  setText(byId("live-words"), words);
}

function beginTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const names = ["auto", "light", "dark"], words = { auto: "as the system", light: "light", dark: "dark" };
  let chosen = names.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";
  const apply = () => {
    document.documentElement.dataset.theme = chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
    byId("theme").setAttribute("aria-label", `Colours: ${words[chosen]}`);
    byId("theme").title = `Colours: ${words[chosen]}`;
    setText(byId("theme"), { auto: "◐", light: "○", dark: "●" }[chosen]);
    plan();
  };
  byId("theme").addEventListener("click", () => {
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    localStorage.setItem("theme", chosen);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

function listen() {
  const frames = new EventSource("/frames");
  frames.addEventListener("open", () => { connected = true; showLive(); });
  frames.addEventListener("error", () => { connected = false; showLive(); });
  frames.addEventListener("message", (event) => show(JSON.parse(event.data)));
}

// The link that was opened works once: what stays in the address bar is the page itself.
if (location.pathname !== "/") history.replaceState(null, "", "/");
beginTheme();
beginTimeline();
listen();
setInterval(showLive, 1000);
