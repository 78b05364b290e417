// Line charts over the last hour, one value a minute; null is a gap. Arrow keys and the pointer read single minutes.

import { h } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 150;
const TOP = 10;
const BOTTOM = 20;

// `lines`: [{name, kind, values}]; `format` writes a value; `area` fills below the first line.
export function chart({ title, lines, format, area = false, cursor = null }) {
  const values = lines.flatMap((line) => line.values).filter((value) => value != null);
  const most = niceCeiling(Math.max(0, ...values));
  const num = lines[0].values.length;
  const x = (place) => (place * WIDTH) / (num - 1);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
  const marks = [most, most / 2].map((value) => grid(y(value), format(value)));
  const drawn = lines.flatMap((line) => paths(line, x, y, area && line === lines[0]));
  const svg = h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    h("line", { class: "base", x1: 0, x2: WIDTH, y1: y(0), y2: y(0) }), marks.map((mark) => mark.line), drawn,
    cursor != null && h("line", { class: "cursor", x1: x(cursor), x2: x(cursor), y1: TOP, y2: HEIGHT - BOTTOM }));
  return h("figure", { class: "card chart", "data-key": title },
    h("figcaption", {}, h("h3", {}, title), legend(lines, format, cursor)),
    h("div", { class: "plot", tabindex: "0", role: "img", "data-chart": title, "data-num": num,
      "aria-label": describe(title, lines, format, cursor, num) },
    svg, marks.map((mark) => mark.label), h("span", { class: "from" }, "an hour ago"), h("span", { class: "to" }, "now")));
}

function paths(line, x, y, filled) {
  const pieces = [];
  let piece = [];
  line.values.forEach((value, place) => {
    if (value == null) {
      if (piece.length) pieces.push(piece);
      piece = [];
    } else piece.push([x(place), y(value)]);
  });
  if (piece.length) pieces.push(piece);
  const road = (points) => {
    // A minute that stands alone still has to be seen.
    const road = points.length > 1 ? points : [[points[0][0] - 2, points[0][1]], [points[0][0] + 2, points[0][1]]];
    return `M${road.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join("L")}`;
  };
  return pieces.flatMap((points) => [
    filled && h("path", { class: `fill ${line.kind}`,
      d: `${road(points)}L${points.at(-1)[0].toFixed(1)},${y(0)}L${points[0][0].toFixed(1)},${y(0)}Z` }),
    h("path", { class: `line ${line.kind}`, d: road(points) }),
  ]);
}

function grid(at, text) {
  return {
    line: h("line", { class: "grid", x1: 0, x2: WIDTH, y1: at, y2: at }),
    label: h("span", { class: "mark", style: { top: `${(100 * at) / HEIGHT}%` } }, text),
  };
}

function legend(lines, format, cursor) {
  return h("ul", { class: "legend" }, lines.map((line) => {
    const value = cursor == null ? lastKnown(line.values) : line.values[cursor];
    return h("li", {}, h("i", { class: `swatch line-${line.kind}` }), `${line.name} `,
      h("b", {}, value == null ? "–" : format(value)));
  }));
}

function describe(title, lines, format, cursor, num) {
  const when = cursor == null ? "the last hour; now" : minutesAgo(num - 1 - cursor);
  const parts = lines.map((line) => {
    const value = cursor == null ? lastKnown(line.values) : line.values[cursor];
    return `${line.name} ${value == null ? "nothing" : format(value)}`;
  });
  return `${title}, ${when}: ${parts.join(", ")}. Arrow keys read single minutes.`;
}

function minutesAgo(minutes) {
  return minutes === 0 ? "this minute" : `${minutes} minutes ago`;
}

function lastKnown(values) {
  return values.findLast((value) => value != null) ?? null;
}

function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((bound) => bound >= value * 1.05) ?? 20 * power;
}

// Where the reader's cursor stands in each chart; `changed` draws again.
export function followCursors(container, cursors, changed) {
  const move = (plot, place) => {
    const num = Number(plot.dataset.num);
    cursors.set(plot.dataset.chart, place == null ? null : Math.max(0, Math.min(num - 1, place)));
    changed();
  };
  container.addEventListener("pointermove", (event) => {
    const plot = event.target.closest("[data-chart]");
    if (!plot) return;
    const box = plot.getBoundingClientRect();
    move(plot, Math.round(((event.clientX - box.left) / box.width) * (plot.dataset.num - 1)));
  });
  container.addEventListener("pointerout", (event) => {
    const plot = event.target.closest("[data-chart]");
    if (plot && !plot.contains(event.relatedTarget)) move(plot, null);
  });
  container.addEventListener("focusout", (event) => {
    const plot = event.target.closest("[data-chart]");
    if (plot) move(plot, null);
  });
  container.addEventListener("keydown", (event) => {
    const plot = event.target.closest("[data-chart]");
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -1e6, End: 1e6 };
    if (!plot || !(event.key in steps)) return;
    event.preventDefault();
    move(plot, (cursors.get(plot.dataset.chart) ?? plot.dataset.num - 1) + steps[event.key]);
  });
}
