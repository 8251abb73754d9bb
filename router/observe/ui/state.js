// What the router sent, and what follows from it: rates over the last minute per rank, the problems to be named.

const WINDOW_POINTS = 5; // the curves show ten seconds at a time: single steps are noise
const RANK_WINDOW_S = 60;
const RANK_ENOUGH_S = 15; // until the page has seen so much of a rank, its rate since the start says more
const MAX_DECISIONS = 24;

const view = {
  at: 0, startedAt: 0, version: "", policy: "", running: 0, finished: 0, reasons: {},
  workers: [], points: [], decisions: [], fresh: true,
  shade: "hit", layout: "auto", detail: null, paused: false, seen: new Map(),
  known: new Map(), // decisions by number: those of the list, and those that are held on the page for reading
};
const names = { rank: [], candidate: [], point: [] };

function named(fields, values) {
  return Object.fromEntries(fields.map((field, at) => [field, values[at]]));
}

function takeHello(message) {
  names.rank = message.rank_fields;
  names.candidate = message.candidate_fields;
  names.point = message.point_fields;
  Object.assign(view, { version: message.version, policy: message.policy, startedAt: message.started_at, reasons: message.reasons });
  view.points = message.points.map((point) => named(names.point, point));
  view.decisions = [];
  view.seen.clear();
  view.known.clear();
  takeTick({ ...message, point: null, ended: {} });
}

function takeTick(message) {
  Object.assign(view, { at: message.at, running: message.running, finished: message.finished });
  if (message.point) view.points.push(named(names.point, message.point));
  view.points = view.points.slice(-300);
  learnNames(message.workers.map((worker) => worker.url));
  view.workers = message.workers.map((worker) => ({ ...worker, ranks: worker.ranks.map((values) => rankOf(worker, values)) }));
  const known = new Set(view.workers.flatMap((worker) => worker.ranks.map((rank) => rank.id)));
  for (const id of view.seen.keys()) if (!known.has(id)) view.seen.delete(id);
  takeDecisions(message);
}

function rankOf(worker, values) {
  const rank = named(names.rank, values);
  rank.id = `${worker.url} ${rank.rank}`;
  rank.worker = worker;
  rank.fill = worker.capacity_blocks ? Math.min(1, rank.blocks_gpu / worker.capacity_blocks) : null;
  rank.waitS = rank.tokens_per_s ? rank.queued_tokens / rank.tokens_per_s : null;
  let seen = view.seen.get(rank.id) || [];
  if (seen.length && seen[seen.length - 1][1] > rank.prompt_tokens) seen = []; // another incarnation, or its first report
  seen.push([view.at, rank.prompt_tokens, rank.cached_tokens]);
  while (seen.length > 2 && seen[1][0] < view.at - RANK_WINDOW_S) seen.shift();
  view.seen.set(rank.id, seen);
  const prompt = rank.prompt_tokens - seen[0][1];
  rank.recent = prompt > 0 && view.at - seen[0][0] >= RANK_ENOUGH_S;
  rank.hit = rank.recent ? (rank.cached_tokens - seen[0][2]) / prompt : rank.prompt_tokens ? rank.cached_tokens / rank.prompt_tokens : null;
  rank.tone = worker.state !== "ready" ? (worker.state === "starting" ? "wait" : "bad") : toneOf(rank.state);
  return rank;
}

const TONES = { live: "ok", connecting: "wait", replaying: "wait", off: "off", unreachable: "bad", silent: "warn", gapped: "warn", drifted: "warn", duplicated: "bad" };
const WORKER_TONES = { ready: "ok", starting: "wait", unhealthy: "bad", draining: "off" };
const toneOf = (state) => TONES[state] || "warn";

function takeDecisions(message) {
  for (const decision of message.decisions) {
    if (view.decisions.some((one) => one.number === decision.number)) continue;
    const one = { ...decision, at: message.at - decision.age_s, candidates: decision.candidates.map((values) => named(names.candidate, values)) };
    one.most = Math.max(...one.candidates.map((candidate) => candidate.predicted));
    view.decisions.unshift(one);
    view.known.set(one.number, one);
  }
  for (const [number, end] of Object.entries(message.ended)) if (view.known.has(Number(number))) view.known.get(Number(number)).end = end;
  view.decisions.sort((a, b) => b.number - a.number);
  view.decisions.length = Math.min(view.decisions.length, MAX_DECISIONS);
}

const ranksOf = () => view.workers.flatMap((worker) => worker.ranks);

// Sums over the last `seconds` of points; quantiles are the median of the steps' own.
function lately(seconds) {
  const since = view.at - seconds;
  return windowOf(view.points.filter((point) => point.at > since));
}

function windowOf(points) {
  const sum = (field) => points.reduce((total, point) => total + (point[field] || 0), 0);
  const middle = (field) => {
    const values = points.map((point) => point[field]).filter((value) => value !== null).sort((a, b) => a - b);
    return values.length ? values[Math.floor(values.length / 2)] : null;
  };
  const share = (part, whole) => (sum(whole) > 0 ? sum(part) / sum(whole) : null);
  return {
    spanS: points.length * 2,
    requests: sum("requests"), failed: sum("failed"), prompt: sum("prompt"), predictedTokens: sum("predicted"), blindTokens: sum("blind"),
    reported: sum("reported_cached") > 0 || sum("reported_prompt") > 0 ? share("reported_cached", "reported_prompt") : null,
    predicted: share("predicted", "prompt"), best: share("best", "prompt"), blind: share("blind", "prompt"),
    p50: middle("ttft_p50_s"), p95: middle("ttft_p95_s"),
  };
}

// Every problem: {level, title, text, url}. The worst first. Many of one kind become one.
function problems() {
  const found = [];
  const ready = view.workers.filter((worker) => worker.state === "ready");
  if (!view.workers.length) found.push({ level: "bad", title: "No workers", text: "Give the router engines: --worker URL, workers: in its configuration, or POST /workers on this listener." });
  else if (!ready.length) found.push({ level: "bad", title: "No worker can take a request", text: "Clients get 503 until one is ready. The fleet below says what each one waits for." });
  found.push(...halfPools(ready));
  for (const worker of view.workers) {
    for (const drift of worker.drift || []) {
      found.push({ level: "warn", kind: `drift ${drift.kind} ${drift.advertised} ${drift.observed}`, who: [worker.url],
        title: `Contract drift (${drift.kind}): advertised ${drift.advertised}, observed ${drift.observed}`, text: drift.advice });
    }
    if (worker.state === "unhealthy" && ready.length) found.push({ level: "bad", kind: `unhealthy ${worker.reason}`, who: [worker.url], title: "Worker unhealthy", text: worker.reason });
    for (const rank of worker.ranks) {
      if (worker.state !== "ready" || ["ok", "wait"].includes(rank.tone)) continue;
      if (worker.role === "decode" && rank.state === "off") continue; // without a radix cache it has nothing to announce
      found.push({ level: rank.tone === "bad" ? "bad" : "warn", kind: `rank ${rank.state} ${rank.reason.replace(/\d+/g, "")}`, who: [`${worker.url} rank ${rank.rank}`],
        title: rank.state === "off" ? "No event stream: routed by load only" : `Event stream ${rank.state}: no cache credit`, text: rank.reason });
    }
  }
  found.push(...blindRanks());
  const merged = new Map();
  for (const problem of found) {
    const key = `${problem.level} ${problem.kind || problem.title}`;
    const before = merged.get(key);
    if (before) before.who.push(...problem.who);
    else merged.set(key, { ...problem, who: [...(problem.who || [])] });
  }
  return [...merged.values()].sort((a, b) => (a.level === b.level ? 0 : a.level === "bad" ? -1 : 1));
}

// Prefill and decode engines serve only in pairs: one half alone serves nobody.
function halfPools(ready) {
  const found = [];
  const halves = { prefill: "decode", decode: "prefill" };
  for (const model of new Set(view.workers.filter((worker) => halves[worker.role]).map((worker) => worker.model))) {
    const of = (role) => ready.filter((worker) => worker.role === role && worker.model === model);
    for (const [there, missing] of Object.entries(halves)) {
      if (!of(there).length || of(missing).length) continue;
      const plain = of("plain").length > 0;
      found.push({ level: plain ? "warn" : "bad", title: `Half a pool: no ${missing} engine for ${model}`,
        text: plain ? "Its plain engines take every request meanwhile." : `Clients get 503 no_${missing}_workers until one is ready.` });
    }
  }
  return found;
}

// The failure this router exists to end: stores flow, lookups miss, everything else looks healthy.
function blindRanks() {
  const recent = lately(120);
  if (recent.requests < 30 || recent.reported === null || recent.reported < 0.05 || recent.predicted > recent.reported * 0.1) return [];
  return [{ level: "bad", title: "Hit rate zero while blocks are stored", text: `Engines report ${percent(recent.reported)} of prompt tokens cached, the router predicted ${percent(recent.predicted, 1)}. `
    + "Router and engines name the same prompts differently: check the tokenizer and chat template (kv-router doctor URL)." }];
}
