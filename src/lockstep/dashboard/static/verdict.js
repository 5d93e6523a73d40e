// The verdict in plain words, with the command that helps, what was seen, and the stack.
import { byId, clock, make, seconds, setText } from "./dom.js";

const SIGNS = { healthy: "✓", starting: "…", partial: "?", warning: "!", notice: "?", stuck: "✕", ended: "■", gone: "■" };
const WORDS = {
  healthy: "healthy", starting: "starting", partial: "not all tasks answer", warning: "slow, and going on",
  notice: "stuck, not yet known why", stuck: "stuck", ended: "the job has ended", gone: "nobody answers any more",
};
const FRAMES = 9;
let shown = "";

export function showVerdict(frame) {
  const card = byId("verdict");
  const good = frame.mood === "ended" && !frame.verdict;
  card.dataset.mood = frame.mood;
  card.toggleAttribute("data-good", good);
  setText(byId("mood-sign"), good ? "✓" : SIGNS[frame.mood] ?? "?");
  setText(byId("mood"), WORDS[frame.mood] ?? frame.mood);
  setText(byId("verdict-title"), title(frame));
  const body = JSON.stringify([frame.mood, frame.verdict, frame.also, frame.log, frame.summary]);
  if (body === shown) return;
  shown = body;
  const open = new Set([...card.querySelectorAll("details[open]")].map((one) => one.dataset.name));
  byId("verdict-body").replaceChildren(...parts(frame));
  for (const one of card.querySelectorAll("details")) {
    if (open.has(one.dataset.name)) one.open = true;
  }
}

function title(frame) {
  if (frame.verdict) return sentence(named(frame.verdict));
  return { healthy: "Every step completes on every task", starting: "The tasks are starting", ended: "The job is done", gone: "The job is over" }[frame.mood] ?? "Not all tasks answer";
}

const named = (verdict) => (verdict.proven ? `${verdict.culprit}: ${verdict.title}` : `${verdict.culprit} is waited for; it is not proven why`);

const full = (text) => (text ? `${sentence(text)}${/[.!?]$/.test(text) ? "" : "."}` : "");

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function parts(frame) {
  const found = [];
  if (frame.mood === "gone") {
    found.push(make("p", { class: "said" }, `Since ${clock(frame.gone_since)} no task and no monitor answers. Below is what was seen last.`));
  }
  if (!frame.verdict && frame.summary) found.push(make("p", { class: "said" }, full(frame.summary)));
  if (frame.verdict) found.push(told(frame.verdict), ...seen(frame.verdict));
  for (const other of frame.also) found.push(make("p", { class: "do" }, `Besides, ${named(other)}. `, make("span", { class: "said" }, full(other.what))));
  const past = frame.log.filter((one) => !frame.verdict || one !== frame.log.at(-1));
  if (past.length) found.push(fold("log", `Found before (${past.length})`, make("ul", { class: "log" }, ...past.slice(-8).reverse().map(entry))));
  return found;
}

function told(verdict) {
  const words = make("div", {},
    make("p", {}, full(verdict.stuck)),
    make("p", {}, full(verdict.what)),
    make("p", { class: "do" }, verdict.remedy));
  if (verdict.command) words.append(command(verdict.command));
  const rows = [
    ["task", verdict.culprit], ["host", verdict.host && verdict.pid ? `${verdict.host}, process ${verdict.pid}` : verdict.host],
    ["waited for by", verdict.peer], ["step", verdict.step >= 0 ? String(verdict.step) : ""],
    ["for", verdict.seconds > 0 ? seconds(verdict.seconds) : ""], ["missing", verdict.key], ["which holds", verdict.names.join(", ")],
    ["the job ends in", verdict.left >= 0 ? seconds(verdict.left) : ""],
  ].filter(([, value]) => value);
  const facts = make("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  return make("div", { class: "told" }, words, facts);
}

function command(text) {
  const button = make("button", { type: "button", class: "quiet", "aria-label": "Copy the command" }, "copy");
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { button.textContent = "select it"; }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  return make("div", { class: "command" }, make("code", {}, text), button);
}

function seen(verdict) {
  const found = [];
  const pair = make("div", { class: "pair" });
  if (verdict.evidence.length) pair.append(fold("evidence", "What each side saw", make("ul", {}, ...verdict.evidence.map((line) => make("li", {}, line)))));
  if (verdict.stack.length) pair.append(fold("stack", `Where ${verdict.culprit} is`, make("pre", {}, verdict.stack.slice(0, FRAMES).join("\n"))));
  if (pair.children.length) found.push(pair);
  if (verdict.stack.length > FRAMES) found.push(fold("callers", "The rest of its stack", make("pre", {}, verdict.stack.slice(FRAMES).join("\n"))));
  return found;
}

function fold(name, words, content) {
  const open = name === "evidence" || name === "stack";
  return make("details", { "data-name": name, open }, make("summary", {}, words), content);
}

function entry(one) {
  const until = one.until ? `, for ${seconds(one.until - one.time)}` : "";
  return make("li", {}, make("time", {}, clock(one.time)), make("span", {}, `${sentence(one.culprit)}: ${one.title}${until}`));
}
