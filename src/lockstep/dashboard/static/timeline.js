// The last steps of all tasks, the present on the right. Parts differ in height, so that they can be told apart without
// colours. Only the rows in sight are drawn: a thousand tasks scroll as smoothly as ten.
import { byId, colour, make, seconds, setText } from "./dom.js";

const HEIGHTS = [0.82, 0.3, 0.14, 0.56];
const NAMES = ["computing", "waiting", "collecting", "updating"];
const LABELS = 96;
let frame = null;
let planned = false;

export function beginTimeline() {
  const box = byId("timeline-box");
  box.addEventListener("scroll", plan, { passive: true });
  new ResizeObserver(plan).observe(box);
  box.addEventListener("pointermove", (event) => caption(event.offsetX, event.clientY - box.getBoundingClientRect().top + box.scrollTop));
  byId("timeline-legend").replaceChildren(...NAMES.map((name) => make("span", {}, make("i", { class: `key ${name}`, "aria-hidden": "true" }), name)));
}

export function showTimeline(next) {
  frame = next;
  plan();
}

export function plan() {
  if (planned || !frame) return;
  planned = true;
  requestAnimationFrame(() => { planned = false; paint(); });
}

const rowHeight = () => (frame.tasks.length <= 40 ? 24 : frame.tasks.length <= 200 ? 10 : 5);

function span() {
  // A long wait must be seen as such, and the steps before it as well.
  const median = frame.numbers.median || 0.1;
  const ages = frame.tasks.flatMap((task) => (task.spans ?? []).map((one) => one[1]));
  const oldest = ages.length ? Math.max(...sample(ages)) : 1;
  const open = Math.max(0, ...sample(frame.tasks.map((task) => openSince(task))));
  return Math.max(0.01, Math.min(oldest, Math.max(10 * median, 1.6 * open)));
}

// Math.max takes its numbers as arguments, of which there may not be too many.
const sample = (numbers) => (numbers.length > 20000 ? numbers.filter((_, i) => i % 2 === 0) : numbers);

function openSince(task) {
  const last = (task.spans ?? []).at(-1);
  return last && last[2] === 0 ? last[1] : 0;
}

function paint() {
  const box = byId("timeline-box"), canvas = byId("timeline");
  const row = rowHeight(), all = row * frame.tasks.length + 10;
  byId("timeline-space").style.height = `${all}px`;
  const width = box.clientWidth, height = Math.min(all, box.clientHeight || all), scale = Math.min(2, devicePixelRatio || 1);
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const left = row >= 10 ? (width < 500 ? 66 : LABELS) : 10;
  const longest = span(), tones = NAMES.map((name) => colour(name)), ink = colour("soft"), bad = colour("bad");
  const first = Math.max(0, Math.floor(box.scrollTop / row)), last = Math.min(frame.tasks.length, first + Math.ceil(height / row) + 1);
  for (let number = first; number < last; number += 1) {
    const task = frame.tasks[number], top = 5 + number * row - box.scrollTop;
    if (task.culprit) { context.fillStyle = colour("bad-soft"); context.fillRect(0, top, width, row); }
    for (const one of task.spans ?? []) bar(context, one, tones, { left, width, top, row, longest });
    if (!task.lives) silent(context, task, { left: edge(task, left, width, longest), width, top, row, bad });
    if (row >= 20 || (row >= 10 && number % 2 === 0) || (row >= 10 && task.culprit)) {
      context.fillStyle = task.culprit ? bad : ink;
      context.font = `${task.culprit ? 600 : 500} ${Math.min(12, row)}px Inter, system-ui, sans-serif`;
      context.textBaseline = "middle";
      context.fillText(task.culprit ? `! ${task.short}` : task.short, 10, top + row / 2);
    }
  }
  setText(byId("timeline-caption"), `from ${seconds(longest)} ago to now`);
}

function bar(context, one, tones, at) {
  const [part, begin, end] = one;
  if (end >= at.longest) return;
  const room = at.width - at.left - 10;
  const from = at.left + room * (1 - Math.min(begin, at.longest) / at.longest), to = at.left + room * (1 - end / at.longest);
  const high = Math.max(1, at.row * 0.86 * HEIGHTS[part]);
  context.fillStyle = tones[part];
  const gap = to - from > 4 ? 0.8 : 0;
  context.fillRect(from, at.top + (at.row - high) / 2, Math.max(0.7, to - from - gap), high);
}

// Where the last that is known of a silent task ends.
function edge(task, left, width, longest) {
  const newest = Math.min(longest, ...(task.spans ?? []).map((one) => one[2]));
  return left + (width - left - 10) * (1 - newest / longest);
}

function silent(context, task, at) {
  context.strokeStyle = at.bad;
  context.setLineDash([2, 4]);
  context.beginPath();
  context.moveTo(at.left, at.top + at.row / 2);
  context.lineTo(at.width - 10, at.top + at.row / 2);
  context.stroke();
  context.setLineDash([]);
  if (at.row >= 20) {
    context.font = "12px Inter, system-ui, sans-serif";
    context.fillStyle = colour("card");
    const words = ` ${task.light}: ${task.doing} `, wide = context.measureText(words).width;
    context.fillRect(at.left + 12, at.top + 3, wide, at.row - 6);
    context.fillStyle = at.bad;
    context.textBaseline = "middle";
    context.fillText(words, at.left + 12, at.top + at.row / 2);
  }
}

function caption(x, y) {
  if (!frame) return;
  const row = rowHeight(), task = frame.tasks[Math.floor((y - 5) / row)];
  if (!task) return;
  const box = byId("timeline-box"), left = row >= 10 ? (box.clientWidth < 500 ? 66 : LABELS) : 10;
  const ago = span() * (1 - (x - left) / (box.clientWidth - left - 10));
  const hit = (task.spans ?? []).find((one) => one[1] >= ago && one[2] <= ago);
  const what = hit ? `${hit[3] ?? frame.parts[hit[0]]}, ${seconds(hit[1] - hit[2])}` : task.doing;
  setText(byId("timeline-caption"), `${task.short} on ${task.host}: ${what}`);
}
