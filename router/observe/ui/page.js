// The frame: link to the router, theme, key figures, alarms. Everything is drawn from `view` once a message came.

const STALE_MS = 4000;
const RETRY_MS = [500, 1000, 2000, 5000];
let adminKey = sessionStorage.getItem("kv-router-key") || "";
let heard = 0;
let tries = 0;

function ask(path, options = {}) {
  return fetch(path, { ...options, headers: adminKey ? { Authorization: `Bearer ${adminKey}` } : {} });
}

// EventSource cannot carry a key, so the stream is read by hand.
async function listen() {
  try {
    const answer = await ask("ui/events");
    if (answer.status === 401) { askForKey(); return; }
    if (!answer.ok) throw new Error(await answer.text());
    $("key-form").hidden = true;
    $("main").hidden = false;
    tries = 0;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      held += value;
      const events = held.split("\n\n");
      held = events.pop();
      for (const event of events) take(event);
    }
  } catch { /* a broken link is tried again; its state is shown */ }
  showLink("lost", "not connected");
  setTimeout(listen, RETRY_MS[Math.min(tries++, RETRY_MS.length - 1)]);
}

function take(event) {
  const [first, second] = event.split("\n");
  const message = JSON.parse(second.slice("data: ".length));
  if (first === "event: hello") takeHello(message); else takeTick(message);
  heard = performance.now();
  showLink("live", "live");
  draw();
}

function askForKey() {
  showLink("wait", "key needed");
  setText($("summary"), "");
  $("main").hidden = true;
  $("key-form").hidden = false;
  setText($("key-error"), adminKey ? "That key was not taken." : "");
  $("key").focus();
}

function showLink(state, text) {
  $("link").dataset.link = state;
  setText($("link-text"), text);
}

const charts = [];

function draw() {
  drawSummary();
  drawAlarms();
  drawFigures();
  updateCharts(charts);
  drawFleet();
  drawDecisions();
  setText($("foot"), `kv-router ${view.version} · policy ${view.policy} · up ${age(view.at - view.startedAt)} · ${count(view.finished)} requests since the start · updated ${clock(view.at)}`);
}

function drawSummary() {
  const ranks = ranksOf();
  const ready = view.workers.filter((worker) => worker.state === "ready").length;
  const live = ranks.filter((rank) => rank.state === "live").length;
  const models = new Set(view.workers.map((worker) => worker.model).filter(Boolean));
  $("summary").replaceChildren(el("b", {}, `${ready} of ${plural(view.workers.length, "worker")}`), " ready, ", el("b", {}, `${live} of ${plural(ranks.length, "event stream")}`), " live",
    models.size ? ` · ${[...models].slice(0, 3).join(", ")}${models.size > 3 ? ` and ${models.size - 3} more models` : ""}` : "");
  document.title = `${ready}/${view.workers.length} · kv-router`;
}

let alarmKey = "";
function drawAlarms() {
  const found = problems().slice(0, 6);
  const key = JSON.stringify(found);
  if (key === alarmKey) return; // the region is live: only a change may be announced
  alarmKey = key;
  $("alarms").replaceChildren(...found.map((problem) => {
    const who = problem.who.slice(0, 3).map((name) => name.replace(/^https?:\/\//, "")).join(", ") + (problem.who.length > 3 ? ` and ${problem.who.length - 3} more` : "");
    return el("div", { class: "alarm", "data-level": problem.level }, el("span", { class: "mark", "aria-hidden": "true" }, problem.level === "bad" ? "✕" : "!"),
      el("p", {}, el("b", {}, problem.title), who ? ` · ${who}` : ""), el("p", {}, problem.text.charAt(0).toUpperCase() + problem.text.slice(1)));
  }));
}

const figureParts = {};
function figure(name, value, unit, more) {
  let parts = figureParts[name];
  if (!parts) {
    parts = figureParts[name] = { value: document.createTextNode(""), unit: el("small"), more: el("dd", { class: "more" }) };
    $("figures").append(el("div", {}, el("dt", {}, name), el("dd", { class: "value" }, parts.value, parts.unit), parts.more));
  }
  if (parts.value.data !== value) parts.value.data = value;
  setText(parts.unit, unit);
  setText(parts.more, more);
}

function drawFigures() {
  const minute = lately(60);
  const reports = minute.reported !== null;
  const hit = reports ? minute.reported : minute.predicted;
  const bare = (share) => (share === null ? "–" : (share * 100).toFixed(1));
  figure(reports || hit === null ? "Hit rate, as engines report" : "Hit rate, predicted", bare(hit), hit === null ? "" : "%", hit === null ? "no requests in the last minute" : `predicted ${percent(minute.predicted, 1)}, best possible ${percent(minute.best, 1)}`);
  const [p50, unit] = timeParts(minute.p50);
  figure("Time to first token, median", p50, unit, minute.p95 === null ? "" : `p95 ${time(minute.p95)}`);
  const perS = minute.requests / Math.max(2, minute.spanS);
  figure("Requests", minute.spanS ? perS.toFixed(perS < 10 ? 1 : 0) : "–", "/s", `${count(view.running)} in flight${minute.failed ? `, ${minute.failed} failed` : ", none failed"}`);
  const ranks = ranksOf();
  const speeds = ranks.map((rank) => rank.tokens_per_s).filter(Boolean).sort((a, b) => a - b);
  const speed = speeds[Math.floor(speeds.length / 2)];
  const gained = minute.predictedTokens - minute.blindTokens;
  const saved = speed && minute.requests ? gained / speed / minute.requests : null;
  const [value, savedUnit] = timeParts(saved === null ? null : Math.max(0, saved));
  figure("Prefill saved a request", value, savedUnit, minute.requests ? `${count(Math.max(0, gained / minute.requests))} tokens over a blind choice` : "");
  const queued = ranks.reduce((total, rank) => total + rank.queued_tokens, 0);
  const waits = ranks.map((rank) => rank.waitS).filter((wait) => wait !== null);
  figure("Queued prefill", count(queued), "tokens", waits.length ? `longest wait ${time(Math.max(...waits))}` : "");
}

// ---- theme: as the system says unless chosen here

const dark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = ["auto", "light", "dark"];
let theme = THEMES.includes(localStorage.getItem("kv-router-theme")) ? localStorage.getItem("kv-router-theme") : "auto";

function applyTheme() {
  document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  setText($("theme"), `Theme: ${theme}`);
}

function begin() {
  applyTheme();
  dark.addEventListener("change", applyTheme);
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("kv-router-theme", theme);
    applyTheme();
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    adminKey = $("key").value;
    sessionStorage.setItem("kv-router-key", adminKey);
    listen();
  });
  makeChoice($("shade"), Object.fromEntries(Object.entries(SHADES).map(([key, shade]) => [key, shade.name])), view.shade, (value) => { view.shade = value; drawFleet(); });
  makeChoice($("layout"), LAYOUTS, view.layout, (value) => { view.layout = value; drawFleet(); });
  $("pause").addEventListener("click", () => {
    view.paused = !view.paused;
    $("pause").setAttribute("aria-pressed", String(view.paused));
    setText($("pause"), view.paused ? "Paused" : "Pause");
    drawDecisions();
  });
  $("decisions").addEventListener("pointerenter", () => { hovered = true; });
  $("decisions").addEventListener("pointerleave", () => { hovered = false; });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    hideTip();
    if (view.detail && $("fleet").contains(document.activeElement)) closeDetail();
  });
  const inPercent = (value) => (value === null ? "–" : percent(value));
  charts.push(makeChart($("chart-hit"), { title: "Hit rate", format: inPercent, top: () => 1, lines: [
    { name: "reported", cls: "line-a", value: (step) => step.reported }, { name: "predicted", cls: "line-b", value: (step) => step.predicted }, { name: "best possible", cls: "line-c", value: (step) => step.best }] }));
  charts.push(makeChart($("chart-ttft"), { title: "Time to first token", format: (value) => (value === null ? "–" : value ? time(value) : "0"), top: (most) => niceTop(most, 0.02), lines: [
    { name: "median", cls: "line-d", value: (step) => step.p50 }, { name: "p95", cls: "line-e", value: (step) => step.p95 }] }));
  setInterval(() => { if (heard && performance.now() - heard > STALE_MS && $("link").dataset.link === "live") showLink("lost", "no news"); }, 1000);
  listen();
}

begin();
