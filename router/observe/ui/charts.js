// Two line charts in plain SVG. Each is also a slider: arrow keys move through time, and the caption reads the values.

const CHART = { height: 168, left: 40, right: 8, top: 10, bottom: 22 };
const SPANS_S = { 120: [2, 1, 0], 300: [5, 4, 3, 2, 1, 0], 600: [10, 8, 6, 4, 2, 0] }; // seconds shown: minutes marked

// The shortest span that holds all there is, so that a router's first minutes fill the width.
function spanOf(steps) {
  const needed = steps.length ? view.at - steps[0].at : 0;
  return Object.keys(SPANS_S).map(Number).find((span) => needed <= span) || 600;
}

function makeChart(figure, settings) {
  // settings: title, lines: [{name, cls, value(window)}], format, top(max) → axis end, ticks
  const values = settings.lines.map(() => el("b", {}, "–"));
  const when = el("span", { class: "soft" });
  const caption = el("figcaption", {}, el("strong", {}, settings.title),
    settings.lines.map((line, at) => el("span", { class: "key-line" }, sample(line.cls), line.name, values[at])), when);
  const svg = el("svg", { "aria-hidden": "true" });
  const plot = el("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${settings.title}: move through the last minutes`, "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0" }, svg);
  figure.append(caption, plot);
  const chart = { plot, svg, values, when, settings, at: null, steps: [] };
  plot.addEventListener("pointermove", (event) => pointAt(chart, event));
  plot.addEventListener("pointerleave", () => { chart.at = null; readChart(chart); });
  plot.addEventListener("blur", () => { chart.at = null; readChart(chart); });
  plot.addEventListener("keydown", (event) => moveChart(chart, event));
  new ResizeObserver(() => drawChart(chart)).observe(plot);
  return chart;
}

function sample(cls) {
  return el("svg", { viewBox: "0 0 18 6", "aria-hidden": "true" }, el("path", { d: "M0 3H18", class: cls, "stroke-width": "2", fill: "none" }));
}

function moveChart(chart, event) {
  const last = chart.steps.length - 1;
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -15, PageUp: 15, Home: -last, End: last };
  if (event.key === "Escape") { chart.at = null; readChart(chart); return; }
  if (!(event.key in moves) || last < 0) return;
  event.preventDefault();
  chart.at = Math.max(0, Math.min(last, (chart.at === null ? last : chart.at) + moves[event.key]));
  readChart(chart);
}

function pointAt(chart, event) {
  const box = chart.plot.getBoundingClientRect();
  const wanted = view.at - spanOf(chart.steps) * (1 - (event.clientX - box.left - CHART.left) / (box.width - CHART.left - CHART.right));
  let best = null;
  chart.steps.forEach((step, at) => { if (best === null || Math.abs(step.at - wanted) < Math.abs(chart.steps[best].at - wanted)) best = at; });
  chart.at = best;
  readChart(chart);
}

function updateCharts(charts) {
  const steps = view.points.map((point, at) => {
    const some = view.points.slice(Math.max(0, at - WINDOW_POINTS + 1), at + 1).filter((one) => one.at > point.at - 2.5 * WINDOW_POINTS);
    return { at: point.at, ...windowOf(some) };
  });
  for (const chart of charts) {
    const moved = chart.at === null ? null : chart.steps[chart.at].at;
    chart.steps = steps;
    if (moved !== null) chart.at = Math.max(0, steps.findIndex((step) => step.at >= moved));
    drawChart(chart);
  }
}

function drawChart(chart) {
  const { svg, steps, settings } = chart;
  const width = chart.plot.clientWidth;
  if (!width) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${CHART.height}`);
  const inner = { x0: CHART.left, x1: width - CHART.right, y0: CHART.height - CHART.bottom, y1: CHART.top };
  const all = steps.flatMap((step) => settings.lines.map((line) => line.value(step))).filter((value) => value !== null);
  const top = settings.top(Math.max(0, ...all));
  const spanS = spanOf(steps);
  chart.x = (at) => inner.x1 - ((view.at - at) / spanS) * (inner.x1 - inner.x0);
  chart.y = (value) => inner.y0 - (Math.min(value, top) / top) * (inner.y0 - inner.y1);
  const parts = [];
  for (const tick of [0, top / 2, top]) {
    parts.push(el("line", { x1: inner.x0, x2: inner.x1, y1: chart.y(tick), y2: chart.y(tick), class: tick ? "grid" : "base" }));
    parts.push(el("text", { x: inner.x0 - 8, y: chart.y(tick) + 4, "text-anchor": "end" }, settings.format(tick)));
  }
  const first = spanS / 60;
  for (const minutes of width < 460 ? [first, first / 2, 0] : SPANS_S[spanS]) {
    const anchor = minutes === first ? "start" : minutes ? "middle" : "end";
    parts.push(el("text", { x: chart.x(view.at - minutes * 60), y: CHART.height - 5, "text-anchor": anchor }, minutes ? `−${minutes} min` : "now"));
  }
  for (const line of [...settings.lines].reverse()) parts.push(el("path", { class: line.cls, d: pathOf(chart, line) }));
  svg.replaceChildren(...parts, (chart.marks = el("g")));
  readChart(chart);
}

function pathOf(chart, line) {
  let path = "", pen = false, before = 0;
  for (const step of chart.steps) {
    const value = line.value(step);
    const x = chart.x(step.at);
    if (value === null || x < CHART.left) { pen = false; continue; }
    path += `${pen && step.at - before < 12 ? "L" : "M"}${x.toFixed(1)} ${chart.y(value).toFixed(1)}`;
    pen = true;
    before = step.at;
  }
  return path;
}

function readChart(chart) {
  const { settings, steps } = chart;
  const step = steps[chart.at === null ? steps.length - 1 : chart.at];
  const read = settings.lines.map((line) => (step ? settings.format(line.value(step), true) : "–"));
  read.forEach((text, at) => setText(chart.values[at], text));
  setText(chart.when, chart.at === null || !step ? "" : `at ${clock(step.at)}`);
  setAttribute(chart.plot, "aria-valuemax", String(Math.max(0, steps.length - 1)));
  setAttribute(chart.plot, "aria-valuenow", String(chart.at === null ? Math.max(0, steps.length - 1) : chart.at));
  const words = settings.lines.map((line, at) => `${line.name} ${read[at]}`).join(", ");
  setAttribute(chart.plot, "aria-valuetext", step ? `${chart.at === null ? "now" : clock(step.at)}: ${words}` : "no requests yet");
  if (!chart.marks) return;
  chart.marks.replaceChildren();
  if (chart.at === null || !step) return;
  const x = chart.x(step.at);
  chart.marks.append(el("line", { x1: x, x2: x, y1: CHART.top, y2: CHART.height - CHART.bottom, class: "cursor" }));
  for (const line of settings.lines) {
    const value = line.value(step);
    if (value !== null) chart.marks.append(el("circle", { cx: x, cy: chart.y(value), r: 3, class: line.cls.replace("line", "dot") }));
  }
}

function niceTop(value, least) {
  const wanted = Math.max(value * 1.08, least);
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= wanted);
}
