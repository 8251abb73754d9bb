// One worker in full, as GET /workers has it: opened from the fleet, refreshed while it is open.

const TIERS = { GPU: "on GPU", CPU_PINNED: "in host memory", DISK: "on disk", EXTERNAL: "external" };
let detailOpener = null;
let detailTimer = 0;

async function openDetail(url, opener) {
  if (view.detail === url) { closeDetail(); return; }
  view.detail = url;
  detailOpener = opener;
  hideTip();
  await drawDetail(true);
}

function closeDetail() {
  view.detail = null;
  clearTimeout(detailTimer);
  $("detail").hidden = true;
  drawFleet();
  if (detailOpener && detailOpener.isConnected) detailOpener.focus();
}

async function drawDetail(first) {
  const url = view.detail;
  clearTimeout(detailTimer);
  let worker = null;
  try {
    const answer = await ask(`ui/worker?url=${encodeURIComponent(url)}`);
    if (answer.ok) worker = await answer.json();
  } catch { /* the link's own state says so */ }
  if (view.detail !== url) return;
  if (worker) fillDetail(worker, first);
  else if (!view.workers.some((one) => one.url === url)) { closeDetail(); return; }
  drawFleet();
  detailTimer = setTimeout(() => drawDetail(false), 2000);
}

function fillDetail(worker, first) {
  const facts = [
    ["State", worker.state + (worker.reason ? `: ${worker.reason}` : "")],
    ["Model", worker.models.join(", ") || "–"],
    ["Engine", [worker.engine, worker.version].filter(Boolean).join(" ") || "–"],
    ["Role", [worker.role, worker.group && `group ${worker.group}`, worker.bootstrap_port && `bootstrap port ${worker.bootstrap_port}`].filter(Boolean).join(", ")],
    ["Incarnation", String(worker.incarnation)],
    ["Block width", worker.block_size === null ? "–" : `${worker.block_size} tokens${worker.block_size === worker.advertised_block_size ? ", as advertised" : `, advertised ${worker.advertised_block_size}`}`],
    ["Block names", worker.hash === "sglang-sha256" ? "the engine's own hashes" : worker.hash === "xxh3" ? "the router's own chain" : "–"],
    ["Capacity a rank", worker.capacity_tokens ? `${count(worker.capacity_tokens)} tokens` : "–"],
  ];
  const close = el("button", { class: "quiet", type: "button", click: closeDetail }, "Close");
  const remarks = [...worker.notes, ...worker.drift.map((drift) => `Drift in ${drift.kind} since ${age(drift.since_s)}: advertised ${drift.advertised}, observed ${drift.observed}. ${drift.advice}`)];
  const columns = [["Rank", ""], ["Stream", ""], ["Why", ""], ["History", "wide"], ["Blocks", "num"], ["Last batch", "num"], ["Event age", "num mid"], ["Gaps", "num mid"], ["Lost", "num mid"], ["Restarts", "num wide"], ["In flight", "num"], ["Prefill", "num wide"]];
  const rows = worker.ranks.map((rank) => el("tr", {},
    el("td", {}, String(rank.rank)),
    el("td", {}, el("span", { class: "state", "data-tone": toneOf(rank.state) }, rank.state)),
    el("td", { class: "why" }, rank.state === "live" ? "" : rank.reason),
    el("td", { class: "wide" }, rank.history),
    el("td", { class: "num" }, Object.entries(rank.blocks).map(([tier, blocks]) => `${count(blocks)} ${TIERS[tier] || tier}`).join(", ") || "0"),
    el("td", { class: "num" }, rank.last_seq === null ? "–" : String(rank.last_seq)),
    el("td", { class: "num mid" }, rank.last_event_age_s === null ? "–" : age(rank.last_event_age_s)),
    el("td", { class: "num mid" }, count(rank.gaps)),
    el("td", { class: "num mid" }, count(rank.batches_lost)),
    el("td", { class: "num wide" }, count(rank.restarts)),
    el("td", { class: "num" }, count(rank.inflight_requests)),
    el("td", { class: "num wide" }, rank.prefill_tokens_per_s === null ? "–" : `${count(rank.prefill_tokens_per_s)} tok/s`)));
  const focusOnClose = $("detail").contains(document.activeElement) && document.activeElement.textContent === "Close";
  const title = el("h3", { id: "detail-title", tabindex: "-1" }, worker.url);
  $("detail").replaceChildren(el("div", { class: "detail-head" }, title, close),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    ...remarks.map((text) => el("p", { class: "remark" }, text)), scroller(`Ranks of ${worker.url}`, headRow(columns), el("tbody", {}, rows)));
  $("detail").hidden = false;
  if (first) title.focus({ preventScroll: false });
  else if (focusOnClose) close.focus();
}
