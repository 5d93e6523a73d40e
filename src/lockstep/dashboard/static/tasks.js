// Tasks as a grid by host: cards where there is room, small squares where there are many.
import { byId, make, seconds, setText } from "./dom.js";

export const SIGNS = { computing: "●", waiting: "○", serving: "◆", busy: "◐", starting: "·", stopped: "‖", silent: "?", gone: "✕", ended: "✓" };
const CARDS = 32;
const BESIDE = 8;
let layout = "";
let cells = new Map();
let chosen = "";
let newest = null;

export function showTasks(frame) {
  newest = frame;
  const now = frame.tasks.map((task) => `${task.host}/${task.name}`).join();
  if (now !== layout) {
    layout = now;
    build(frame.tasks);
  }
  for (const task of frame.tasks) update(cells.get(task.name), task);
  legend(frame.tasks);
  detail();
}

function build(tasks) {
  const hosts = Map.groupBy ? Map.groupBy(tasks, (task) => task.host) : grouped(tasks);
  cells = new Map();
  const box = make("div", { class: tasks.length > CARDS ? "hosts many" : "hosts" });
  for (const [host, own] of hosts) {
    const group = make("div", { class: "cells" });
    for (const task of own) {
      const cell = { sign: make("span", { class: "sign", "aria-hidden": "true" }), who: make("span", { class: "who" }, task.short), at: make("span", { class: "at" }), what: make("span", { class: "what" }) };
      cell.button = make("button", { type: "button", class: "task" }, cell.sign, cell.who, cell.at, cell.what);
      cell.button.addEventListener("click", () => { chosen = chosen === task.name ? "" : task.name; showTasks(newest); });
      cells.set(task.name, cell);
      group.append(cell.button);
    }
    box.append(make("section", { class: "host", "aria-label": `host ${host || "unknown"}` }, make("h3", {}, host || "host not known"), group));
  }
  byId("tasks").replaceChildren(box);
  // Few tasks leave room beside the curves.
  (tasks.length <= BESIDE ? byId("left") : byId("panels")).append(byId("links-card"));
}

function grouped(tasks) {
  const found = new Map();
  for (const task of tasks) found.set(task.host, [...(found.get(task.host) ?? []), task]);
  return found;
}

function update(cell, task) {
  const button = cell.button;
  if (button.dataset.light !== task.light) button.dataset.light = task.light;
  button.classList.toggle("culprit", task.culprit);
  button.setAttribute("aria-pressed", task.name === chosen);
  setText(cell.sign, task.culprit ? "!" : SIGNS[task.light]);
  setText(cell.at, task.step >= 0 ? `step ${task.step}` : "");
  const words = task.wait && task.light !== "computing" ? `waits for ${task.wait.on}, ${seconds(task.wait.seconds)}` : task.doing;
  setText(cell.what, words);
  const label = `${task.short}: ${task.culprit ? "the culprit, " : ""}${task.light}, ${words}`;
  if (button.title !== label) { button.title = label; button.setAttribute("aria-label", label); }
}

function legend(tasks) {
  const counts = new Map();
  for (const task of tasks) counts.set(task.light, (counts.get(task.light) ?? 0) + 1);
  const words = [...counts].map(([light, number]) => `${SIGNS[light]} ${number} ${light}`);
  const box = byId("tasks-legend");
  if (box.dataset.words === words.join()) return;
  box.dataset.words = words.join();
  box.replaceChildren(...words.map((one) => make("span", {}, one)));
}

function detail() {
  const box = byId("task-detail");
  const task = newest.tasks.find((one) => one.name === chosen);
  box.hidden = !task;
  if (!task) return;
  const rows = [["task", task.name], ["host", task.pid ? `${task.host}, process ${task.pid}` : task.host], ["state", task.light], ["doing", task.doing]];
  if (task.step >= 0) rows.push(["step", String(task.step)]);
  if (task.wait) rows.push(["waits for", `${task.wait.on}, ${seconds(task.wait.seconds)}: ${task.wait.what}`]);
  if (task.parts) rows.push(["a step", newest.parts.map((name, i) => [name, task.parts[i]]).filter(([, s]) => s > 0).map(([name, s]) => `${name} ${seconds(s)}`).join(", ")]);
  box.replaceChildren(make("h3", {}, task.short), make("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
}
