// The last decisions: where each request went, and on opening one, why.

const decisionParts = new Map(); // number → {item, parts}
const opened = new Set();
let hovered = false;

function drawDecisions() {
  const list = $("decisions");
  const held = view.paused || hovered || list.contains(document.activeElement);
  if (!held) {
    for (const decision of view.decisions) if (!decisionParts.has(decision.number)) decisionParts.set(decision.number, makeDecision(decision));
    const numbers = new Set(view.decisions.map((one) => one.number));
    for (const [number, part] of decisionParts) if (!numbers.has(number)) { part.item.remove(); decisionParts.delete(number); opened.delete(number); }
    view.decisions.forEach((decision, at) => {
      const item = decisionParts.get(decision.number).item;
      if (list.children[at] !== item) list.insertBefore(item, list.children[at] || null);
    });
  }
  const listed = new Set(view.decisions.map((one) => one.number));
  for (const number of view.known.keys()) if (!listed.has(number) && !decisionParts.has(number)) view.known.delete(number);
  for (const [number, parts] of decisionParts) if (view.known.has(number)) updateDecision(view.known.get(number), parts);
  const rate = lately(30);
  const paused = view.paused ? "paused" : held ? "held while you read" : "";
  setText($("decisions-note"), view.decisions.length ? [`${(rate.requests / Math.max(2, rate.spanS)).toFixed(1)} a second`, "a sample of the last", paused].filter(Boolean).join(" · ") : "None yet: send a request to the public listener.");
}

function makeDecision(decision) {
  const parts = { age: el("span", { class: "soft num" }), tokens: el("span", { class: "tokens" }), took: el("span", { class: "num" }), explain: el("div", { class: "explain", hidden: true, id: `why-${decision.number}` }) };
  const cached = el("i"), best = el("u", { hidden: !(decision.most > 0) });
  const share = (tokens) => Math.min(100, (100 * tokens) / Math.max(1, decision.prompt_tokens));
  cached.style.width = `${share(decision.cached)}%`;
  best.style.left = `calc(${share(decision.most)}% - 1px)`;
  parts.button = el("button", { class: "decision", type: "button", "aria-expanded": "false", "aria-controls": `why-${decision.number}`, click: () => toggleDecision(decision.number) },
    parts.age, el("span", { class: "soft route" }, decision.route.replace(/^(\/v1)?\//, "").replace("chat/completions", "chat")), el("span", { class: "to" }, whereTo(decision)),
    el("span", { class: "chip-cell" }, el("span", { class: "why-chip", "data-reason": decision.reason }, decision.reason.replace("_", " "))),
    el("span", { class: "bar-cell", "aria-hidden": "true" }, el("span", { class: "prompt-bar" }, cached, best)), parts.tokens, parts.took);
  parts.item = el("li", {}, parts.button, parts.explain);
  parts.button.querySelector(".prompt-bar").style.display = "block";
  return parts;
}

function placeOf(one) {
  const worker = view.workers.find((other) => other.url === one.worker);
  return shortName(one.worker) + (worker && worker.ranks.length > 1 ? ` · rank ${one.rank}` : "");
}

// Of a pair both halves.
function whereTo(decision) {
  const decode = decision.decode ? placeOf({ worker: decision.decode[0], rank: decision.decode[1] }) : "";
  return decode ? `${placeOf(decision)} → ${decode}` : placeOf(decision);
}

function updateDecision(decision, parts) {
  setText(parts.age, age(view.at - decision.at));
  const end = decision.end;
  const known = decision.ids !== "none";
  const cached = end && end.reported !== null && end.reported !== undefined ? end.reported : decision.cached;
  setText(parts.tokens, known ? `${count(cached)} of ${count(decision.prompt_tokens)} cached` : `≈ ${count(decision.prompt_tokens)} tokens`);
  const bad = end && !["ok", "client_closed", "retried elsewhere"].includes(end.outcome);
  parts.took.className = bad ? "num failed" : end ? "num" : "num soft";
  setText(parts.took, !end ? "…" : bad ? String(end.status || end.outcome) : end.outcome === "retried elsewhere" ? "retried" : end.ttft_s === null || end.ttft_s === undefined ? end.outcome.replace("_", " ") : time(end.ttft_s));
  if (opened.has(decision.number) && parts.ended !== Boolean(end)) { parts.ended = Boolean(end); parts.explain.replaceChildren(...explain(decision)); }
}

function toggleDecision(number) {
  const decision = view.known.get(number);
  const parts = decisionParts.get(number);
  const open = !opened.has(number);
  if (open) opened.add(number); else opened.delete(number);
  parts.button.setAttribute("aria-expanded", String(open));
  parts.explain.hidden = !open;
  if (open && decision) { parts.ended = Boolean(decision.end); parts.explain.replaceChildren(...explain(decision)); }
}

// The sentence a colleague would say, then the numbers.
function explain(decision) {
  const others = decision.candidates.filter((one) => one.worker !== decision.worker || one.rank !== decision.rank);
  const next = others.length ? others.reduce((a, b) => (b.cost_s < a.cost_s ? b : a)) : null;
  const holder = others.length ? others.reduce((a, b) => (b.predicted > a.predicted ? b : a)) : null;
  const where = placeOf(decision);
  const tokens = (n) => `${count(n)} of ${count(decision.prompt_tokens)} prompt tokens`;
  const words = {
    only: `${where} is the only candidate.`,
    prefix: `${where} already holds ${tokens(decision.cached)}; its cost is the lowest, and no rank holds more.`,
    balance: holder ? `${placeOf(holder)} holds ${tokens(holder.predicted)}, but with its queue it would cost ${time(holder.cost_s)}; ${where} costs ${time(decision.cost_s)}.` : "",
    load: `No rank holds any of this prompt, so ${where}, the least loaded, computes it.`,
    no_tokens: `The prompt's tokens are not known here (${decision.ids_reason || "no ids"}), so it went by load.`,
    client_rank: `The client named rank ${decision.rank}; only that rank of each worker was compared.`,
  };
  let sentence = words[decision.reason] || `${view.reasons[decision.reason] || decision.reason}.`;
  if (decision.predicted > decision.cached) sentence += ` Another ${count(decision.predicted - decision.cached)} tokens were sent there moments ago and count as cached.`;
  if (next && decision.reason !== "balance" && decision.reason !== "only") sentence += ` ${decision.cost_s <= next.cost_s ? "Next best" : "Cheapest other"}: ${placeOf(next)}, ${time(next.cost_s)} against ${time(decision.cost_s)}.`;
  if (decision.decode) sentence += ` Its KV then moves to ${placeOf({ worker: decision.decode[0], rank: decision.decode[1] })}, the decode rank with the most room.`;
  return [el("p", {}, sentence), costTable(decision), el("p", { class: "meta" }, outcomeWords(decision))];
}

function outcomeWords(decision) {
  const end = decision.end;
  const parts = [`request ${decision.request_id}`, decision.model ? `model ${decision.model}` : "", `token ids: ${{ given: "in the request", local: "tokenised here", engine: "asked of an engine", none: "unknown" }[decision.ids] || decision.ids}`];
  if (!end) parts.push("still running");
  else if (end.outcome === "retried elsewhere") parts.push("this worker could not be used, another one was tried");
  else {
    parts.push(`${end.outcome.replace("_", " ")}, status ${end.status}`);
    if (end.ttft_s !== null) parts.push(`first byte after ${time(end.ttft_s)}, done after ${time(end.duration_s)}`);
    if (end.reported !== null) parts.push(`the engine reused ${count(end.reported)} tokens, ${count(decision.cached)} were predicted`);
  }
  return parts.filter(Boolean).join(" · ");
}

function costTable(decision) {
  const total = (one) => one.queue + one.prefill + one.share;
  const most = Math.max(1, ...decision.candidates.map(total));
  const rows = decision.candidates.map((one) => {
    const chosen = one.worker === decision.worker && one.rank === decision.rank;
    const bar = el("span", { class: "cost", "aria-hidden": "true" }, ["queue", "prefill", "share"].map((term) => el("i", { class: term[0] })));
    [...bar.children].forEach((part, at) => { part.style.width = `${(100 * [one.queue, one.prefill, one.share][at]) / most}%`; });
    return el("tr", { class: chosen ? "chosen" : null }, el("td", {}, placeOf(one), chosen ? el("span", { class: "vh" }, " (chosen)") : ""),
      el("td", { class: "num" }, one.predicted > one.cached ? `${count(one.cached)} + ${count(one.predicted - one.cached)}` : count(one.cached)), el("td", { class: "num mid" }, count(one.queue)), el("td", { class: "num mid" }, count(one.prefill)), el("td", { class: "num mid" }, count(one.share)),
      el("td", {}, bar), el("td", { class: "num" }, time(one.cost_s)));
  });
  const heads = [["Candidate", ""], ["Cached", "num"], ["Queue", "num mid"], ["Prefill", "num mid"], ["Share", "num mid"], ["Cost in tokens of prefill", ""], ["In time", "num"]];
  const left = decision.of - decision.candidates.length;
  return el("div", {}, scroller("Candidates, cheapest first", headRow(heads), el("tbody", {}, rows)),
    el("p", { class: "legend" }, [["q", "queue: uncached tokens ahead"], ["p", "prefill: this prompt's own"], ["s", "share: what it got lately"]].map(([cls, text]) => el("span", {}, el("i", { class: cls }), text)), left > 0 ? el("span", {}, `${plural(left, "dearer candidate")} not shown`) : ""));
}
