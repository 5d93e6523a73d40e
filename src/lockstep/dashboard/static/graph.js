// The wait graph: whoever everybody waits for is on the right, waiters in columns to the left.
import { byId, draw, make, seconds, setText } from "./dom.js";

const WIDE = 104, HIGH = 30, ROW = 44, COLUMN = 190;
let shown = "";

export function showGraph(frame) {
  const graph = frame.graph;
  const now = JSON.stringify([graph.nodes, graph.edges.map((edge) => [edge.waiter, edge.on, seconds(edge.seconds)])]);
  if (now === shown) return;
  shown = now;
  setText(byId("graph-note"), graph.nodes.length ? note(frame) : "");
  const box = byId("graph");
  if (!graph.nodes.length) {
    box.replaceChildren(make("p", { class: "empty" }, "Nobody waits for anybody at this moment."));
    return;
  }
  box.replaceChildren(picture(graph), waits(graph));
}

function note(frame) {
  const more = frame.graph.left_out ? `, ${frame.graph.left_out} more not drawn` : "";
  return frame.verdict ? `leads to ${frame.verdict.culprit}${more}` : `waits of this moment${more}`;
}

function picture(graph) {
  const columns = new Map();
  for (const node of graph.nodes) columns.set(node.layer, [...(columns.get(node.layer) ?? []), node]);
  const layers = [...columns.keys()].sort((a, b) => b - a);
  const tallest = Math.max(...[...columns.values()].map((nodes) => nodes.length));
  const height = Math.max(2, tallest) * ROW + 8;
  const width = Math.max(2, layers.length) * COLUMN - (COLUMN - WIDE) + 8;
  const places = new Map();
  layers.forEach((layer, column) => {
    const nodes = columns.get(layer);
    const x = layers.length === 1 ? (width - WIDE) / 2 : 4 + column * COLUMN;
    nodes.forEach((node, row) => places.set(node.name, { x, y: (height - nodes.length * ROW) / 2 + row * ROW + (ROW - HIGH) / 2 }));
  });
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "wait graph; the list below says the same" });
  svg.style.maxWidth = `${Math.max(width, 300) * 1.25}px`;
  for (const edge of graph.edges) svg.append(...arrow(edge, places.get(edge.waiter), places.get(edge.on), graph.edges.length));
  for (const node of graph.nodes) svg.append(box(node, places.get(node.name)));
  return svg;
}

function arrow(edge, from, to, edges) {
  const first = edge.first ? " first" : "";
  const ahead = to.x > from.x;
  const same = to.x === from.x;
  const x1 = ahead || same ? from.x + WIDE : from.x, x2 = ahead ? to.x - 8 : to.x + WIDE + 8;
  // Two tasks that wait for each other get two arrows, one above the other.
  const aside = ahead || same ? -5 : 6;
  const y1 = from.y + HIGH / 2 + aside, y2 = to.y + HIGH / 2 + aside;
  const bend = same ? 44 : (x2 - x1) / 2;
  const path = same ? `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 + bend} ${y2} ${x2} ${y2}` : `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  const tip = ahead ? `M${x2 + 8} ${y2}l-9 -4.5v9z` : `M${x2 - 8} ${y2}l9 -4.5v9z`;
  const line = draw("path", { class: `wait${first}`, d: path });
  line.append(draw("title", {}, words(edge)));
  const found = [line, draw("path", { class: `tip${first}`, d: tip })];
  if (edges <= 8 || edge.first) {
    const text = draw("text", { class: "wait-label", x: (x1 + x2) / 2 + (same ? 20 : 0), y: (y1 + y2) / 2 + (aside < 0 ? -5 : 13), "text-anchor": "middle" });
    text.textContent = seconds(edge.seconds);
    found.push(text);
  }
  return found;
}

function box(node, place) {
  const group = draw("g", { class: node.culprit ? "node culprit" : "node" });
  group.append(draw("rect", { x: place.x, y: place.y, width: WIDE, height: HIGH, rx: 9 }));
  if (node.count > 1) group.prepend(draw("rect", { x: place.x + 4, y: place.y - 4, width: WIDE, height: HIGH, rx: 9 }));
  const text = draw("text", { x: place.x + WIDE / 2, y: place.y + HIGH / 2 + 4.5, "text-anchor": "middle" });
  text.textContent = node.culprit ? `✕ ${node.label}` : node.label;
  group.append(text);
  return group;
}

const words = (edge) => `${edge.what}, ${seconds(edge.seconds)}`;

function waits(graph) {
  const labels = new Map(graph.nodes.map((node) => [node.name, node.label]));
  const rows = [...graph.edges].sort((a, b) => b.first - a.first || b.seconds - a.seconds).slice(0, 3);
  return make("ul", { class: "waits" }, ...rows.map((edge) => make("li", {}, make("b", {}, `${labels.get(edge.waiter)} → ${labels.get(edge.on)}`), ` ${words(edge)}`)));
}
