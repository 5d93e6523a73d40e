// Curves of throughput and loss since the page's command began to look.
import { byId, count, draw, make, seconds, setText } from "./dom.js";

const WIDE = 640, HIGH = 150, LEFT = 44, BOTTOM = 18;

export function showCharts(frame, points) {
  const examples = points.some((point) => point[2] != null);
  setText(byId("speed-note"), examples ? "examples per second, all workers" : "steps per second");
  curve("speed-chart", points, examples ? 2 : 1, "No step has been timed yet.", 0);
  setText(byId("loss-note"), frame.numbers.loss == null ? "" : `now ${frame.numbers.loss.toPrecision(4)}`);
  const why = frame.source.kind === "simulated" ? "A simulated job has no loss." : "The program has told no loss yet; lockstep bench tells it with every line that it prints.";
  curve("loss-chart", points, 3, why, null);
}

function curve(id, points, column, empty, floor) {
  const box = byId(id);
  const known = points.filter((point) => point[column] != null);
  if (known.length < 2) {
    if (box.dataset.empty !== "yes") box.replaceChildren(make("p", { class: "empty" }, empty));
    box.dataset.empty = "yes";
    return;
  }
  box.dataset.empty = "";
  const values = known.map((point) => point[column]);
  const high = Math.max(...values), low = floor ?? Math.min(...values);
  const top = high === low ? high + Math.abs(high || 1) * 0.1 : high + (high - low) * 0.08;
  const begin = known[0][0], length = known.at(-1)[0] - begin || 1;
  const x = (time) => LEFT + ((time - begin) / length) * (WIDE - LEFT);
  const y = (value) => (HIGH - BOTTOM) * (1 - (value - low) / (top - low)) + 4;
  const path = known.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[column]).toFixed(1)}`).join("");
  const ground = y(low);
  const svg = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH + 6}`, preserveAspectRatio: "none", role: "img", "aria-label": `from ${count(values[0])} to ${count(values.at(-1))}` });
  for (const value of [low, (low + high) / 2, high]) svg.append(draw("line", { class: "grid", x1: LEFT, x2: WIDE, y1: y(value), y2: y(value) }));
  svg.append(draw("path", { class: "under", d: `${path}L${x(known.at(-1)[0]).toFixed(1)} ${ground}L${LEFT} ${ground}z` }), draw("path", { class: "curve", d: path }));
  box.replaceChildren(svg);
  // Letters must not be stretched with the curve: each label lies in a picture of its own, above it.
  const labels = draw("svg", { "aria-hidden": "true" });
  labels.style.cssText = "position:absolute;inset:0;pointer-events:none";
  for (const value of [low, (low + high) / 2, high]) labels.append(label(0, `${(100 * y(value)) / (HIGH + 6)}%`, count(value)));
  labels.append(label(0, "100%", `${seconds(length)} ago`), label("100%", "100%", "now", "end"));
  box.style.position = "relative";
  box.append(labels);
}

function label(x, y, words, anchor = "start") {
  const text = draw("text", { x, y, "text-anchor": anchor, dy: y === "100%" ? "-1" : "4" });
  text.textContent = words;
  return text;
}
