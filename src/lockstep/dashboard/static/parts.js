// Where the time of a step goes, worker by worker: the slowest first.
import { byId, make, seconds, setText } from "./dom.js";

const ROWS = 9;
const NAMES = ["computing", "waiting", "collecting", "updating"];
const SLOW = 1.25;

export function showParts(frame) {
  const timed = frame.tasks.filter((task) => task.parts && task.parts.some((part) => part > 0));
  const workers = timed.filter((task) => task.worker).sort((a, b) => own(b) - own(a));
  const servers = timed.filter((task) => !task.worker).sort((a, b) => b.parts[3] - a.parts[3]);
  const box = byId("parts");
  if (!timed.length) {
    box.replaceChildren(make("p", { class: "empty" }, "No step has been timed yet."));
    return;
  }
  const usual = median(workers.map(own));
  const longest = Math.max(...timed.map((task) => sum(task.parts)));
  const some = Math.max(2, ROWS - Math.min(2, servers.length));
  const rows = workers.slice(0, some).map((task) => row(task.short, task.parts, longest, own(task) > SLOW * usual ? own(task) / usual : 0));
  if (workers.length > some) {
    const rest = workers.slice(some);
    rows.push(row(`${rest.length} more`, NAMES.map((_, i) => median(rest.map((task) => task.parts[i]))), longest, 0));
  }
  rows.push(...servers.slice(0, 2).map((task) => row(task.short, task.parts, longest, 0)));
  box.replaceChildren(...rows);
  const slow = workers.filter((task) => own(task) > SLOW * usual).length;
  setText(byId("parts-legend"), slow ? `${slow} of ${workers.length} workers compute ${SLOW} times as long as usual, or longer` : "medians of the last steps");
}

// What a worker does itself: the others wait for it.
const own = (task) => task.parts[0];
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)] ?? 0;

function row(name, parts, longest, factor) {
  const bar = make("span", { class: "bar" });
  const words = [];
  parts.forEach((part, i) => {
    if (part <= 0) return;
    const piece = make("i", { class: NAMES[i] });
    piece.style.width = `${(100 * part) / longest}%`;
    bar.append(piece);
    words.push(`${NAMES[i]} ${seconds(part)}`);
  });
  const much = factor ? make("span", { class: "slow" }, `▲ ${factor.toFixed(1)}× the usual`) : words.slice(0, 1).join();
  const box = make("div", { class: "part-row" }, make("span", { class: "who" }, name), bar, make("span", { class: "much" }, much));
  box.title = `${name}: ${words.join(", ")}`;
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", words.join(", "));
  return box;
}
