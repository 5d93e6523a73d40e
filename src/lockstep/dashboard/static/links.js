// Links by path, those that are down first, then the fastest.
import { byId, make, rate, setText } from "./dom.js";

let shown = "";

export function showLinks(frame) {
  const links = frame.links;
  const now = JSON.stringify(links);
  if (now === shown) return;
  shown = now;
  const down = links.rows.filter((row) => !row.up).length;
  const more = links.count > links.rows.length ? `; ${links.rows.length} of ${links.count} shown` : "";
  const unheard = links.rows.filter((row) => row.up && row.unheard).length;
  const words = [down ? `${down} down` : "", unheard ? `${unheard} unheard` : ""].filter(Boolean).join(", ") || `${links.count} up`;
  setText(byId("links-note"), `${words}${more}`);
  byId("paths").replaceChildren(...links.paths.map((path) => make("span", { class: "chip" }, make("b", {}, path.path), ` ${path.links} link${path.links === 1 ? "" : "s"} · ${rate(path.rate)}`)));
  const head = make("tr", {}, ...["between", "path", "→", "←", "heard"].map((name, i) => make("th", { scope: "col", class: i > 1 ? "num" : "" }, name)));
  byId("links").replaceChildren(make("thead", {}, head), make("tbody", {}, ...links.rows.map(line)));
}

function line(row) {
  if (!row.up) return make("tr", { class: "down" }, make("td", {}, `✕ ${row.from} – ${row.to}`), make("td", { colspan: "3" }, row.finding || row.state), make("td", { class: "num" }, ago(row)));
  return make("tr", { class: row.unheard ? "unheard" : "" }, make("td", {}, `${row.unheard ? "! " : ""}${row.from} – ${row.to}`), make("td", {}, row.path || "control only"), make("td", { class: "num" }, rate(row.out)), make("td", { class: "num" }, rate(row.in)), make("td", { class: "num" }, ago(row)));
}

const ago = (row) => (row.heard >= 0 ? `${row.heard.toFixed(1)} s ago` : "");
