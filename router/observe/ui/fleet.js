// The fleet: a table for the few, a map of tiles for the many. Elements are kept between updates, so that focus stays.

const SHADES = {
  hit: { name: "hit rate", value: (rank) => rank.hit, words: (rank) => percent(rank.hit) },
  load: { name: "load", value: (rank) => rank.running / Math.max(8, busiest()), words: (rank) => `${rank.running} in flight` },
  blocks: { name: "blocks", value: (rank) => (rank.fill === null ? rank.blocks / Math.max(1, fullest()) : rank.fill), words: (rank) => `${count(rank.blocks)} blocks` },
};
const LAYOUTS = { auto: "auto", table: "table", map: "map" };
const TABLE_RANKS = 24; // up to so many are shown as a table
const busiest = () => Math.max(0, ...ranksOf().map((rank) => rank.running));
const fullest = () => Math.max(0, ...ranksOf().map((rank) => rank.blocks));

const fleetParts = { kind: "", key: "", tiles: new Map(), rows: new Map() };

function makeChoice(fieldset, options, chosen, take) {
  for (const [value, name] of Object.entries(options)) {
    const input = el("input", { type: "radio", name: fieldset.id, value, checked: value === chosen, change: () => take(value) });
    fieldset.append(el("label", {}, input, el("span", {}, name)));
  }
}

function drawFleet() {
  const ranks = ranksOf();
  const kind = !view.workers.length ? "none" : view.layout !== "auto" ? view.layout : ranks.length <= TABLE_RANKS ? "table" : "map";
  const key = view.workers.map((worker) => `${worker.url}#${worker.ranks.length}`).join(" ");
  if (kind !== fleetParts.kind || key !== fleetParts.key) {
    const focused = document.activeElement && document.activeElement.dataset.id;
    Object.assign(fleetParts, { kind, key, tiles: new Map(), rows: new Map() });
    $("fleet-body").replaceChildren(kind === "none" ? el("p", { class: "empty" }, "No workers yet.") : kind === "table" ? makeTable() : makeMap());
    if (focused && fleetParts.tiles.has(focused)) fleetParts.tiles.get(focused).focus();
  }
  const live = ranks.filter((rank) => rank.state === "live").length;
  const sums = { gpu: 0, below: 0 };
  for (const rank of ranks) { sums.gpu += rank.blocks_gpu; sums.below += rank.blocks - rank.blocks_gpu; }
  setText($("fleet-note"), `${plural(view.workers.length, "worker")}, ${plural(ranks.length, "rank")}, ${live} live · ${count(sums.gpu)} blocks on GPU${sums.below ? `, ${count(sums.below)} below` : ""}`);
  for (const rank of ranks) updateTile(rank);
  for (const worker of view.workers) if (fleetParts.rows.has(worker.url)) updateRow(worker, fleetParts.rows.get(worker.url));
  const scale = $("scale");
  if (scale) setText(scale, SHADES[view.shade].name);
}

function rankWords(rank) {
  const parts = [rank.state, `${rank.running} in flight`, `${count(rank.blocks)} blocks${rank.fill === null ? "" : ` (${percent(rank.fill)} of its GPU cache)`}`, `hit rate ${percent(rank.hit)}${rank.recent || rank.hit === null ? "" : " so far"}`];
  if (rank.reason && rank.state !== "live") parts.push(rank.reason);
  if (rank.worker.state !== "ready") parts.unshift(`worker ${rank.worker.state}`);
  return parts;
}

function makeTile(worker, rank, tight) {
  const tile = el("button", { class: tight ? "tile tight" : "tile", type: "button", tabindex: "-1", "data-id": rank.id, "aria-controls": "detail",
    click: () => openDetail(worker.url, tile),
    pointerenter: () => showTip(tile), focus: () => showTip(tile), pointerleave: hideTip, blur: hideTip });
  fleetParts.tiles.set(rank.id, tile);
  return tile;
}

function updateTile(rank) {
  const tile = fleetParts.tiles.get(rank.id);
  if (!tile) return;
  setAttribute(tile, "data-tone", rank.tone);
  setAttribute(tile, "aria-label", `${shortName(rank.worker.url)} rank ${rank.rank}: ${rankWords(rank).join(", ")}`);
  setAttribute(tile, "aria-current", view.detail === rank.worker.url ? "true" : null);
  const shade = String(Math.round(100 * Math.min(1, SHADES[view.shade].value(rank) || 0)));
  if (tile.style.getPropertyValue("--v") !== shade) tile.style.setProperty("--v", shade);
  if (tile === tipFor) fillTip(rank);
}

function makeMap() {
  const widest = Math.max(...view.workers.map((worker) => worker.ranks.length));
  const tight = ranksOf().length > 160;
  const flat = widest <= 1;
  const box = el("div", { class: flat ? "map flat" : "map", role: "group", "aria-label": "Ranks; arrow keys move, Enter opens the worker", keydown: moveTile });
  if (!flat) box.style.setProperty("--group", `${Math.max(96, Math.min(8, widest) * (tight ? 19 : 23))}px`);
  for (const worker of view.workers) {
    const tiles = worker.ranks.map((rank) => makeTile(worker, rank, tight));
    if (flat) box.append(...tiles);
    else {
      const group = el("div", { class: "group" }, el("h3", {}, shortName(worker.url)), el("div", { class: "tiles" }, tiles));
      fleetParts.rows.set(worker.url, { group });
      box.append(group);
    }
  }
  firstStop();
  const legend = el("div", { class: "scale" },
    el("span", {}, "low", el("i", { class: "ramp" }), "high ", el("span", { id: "scale" }, SHADES[view.shade].name)),
    [["wait", "starting, connecting"], ["warn", "stream in doubt"], ["bad", "unreachable, unhealthy"], ["off", "no stream"]].map(([tone, text]) => el("span", {}, el("i", { class: "tile", "data-tone": tone }), text)));
  return el("div", {}, box, legend);
}

function firstStop() {
  const first = fleetParts.tiles.values().next().value;
  if (first) first.tabIndex = 0;
}

function moveTile(event) {
  const tiles = [...fleetParts.tiles.values()];
  const at = tiles.indexOf(document.activeElement);
  if (at < 0) return;
  let next = at;
  if (event.key === "ArrowRight") next = at + 1;
  else if (event.key === "ArrowLeft") next = at - 1;
  else if (event.key === "Home") next = 0;
  else if (event.key === "End") next = tiles.length - 1;
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = above(tiles, at, event.key === "ArrowDown" ? 1 : -1);
  else return;
  event.preventDefault();
  next = Math.max(0, Math.min(tiles.length - 1, next));
  tiles[at].tabIndex = -1;
  tiles[next].tabIndex = 0;
  tiles[next].focus();
}

function above(tiles, at, sign) {
  const here = tiles[at].getBoundingClientRect();
  let best = at, least = Infinity;
  tiles.forEach((tile, index) => {
    const there = tile.getBoundingClientRect();
    const down = (there.top - here.top) * sign;
    if (down < here.height / 2) return;
    const far = down * 4 + Math.abs(there.left - here.left);
    if (far < least) [best, least] = [index, far];
  });
  return best;
}

const COLUMNS = [["Worker", ""], ["State", ""], ["Ranks", ""], ["In flight", "num"], ["Queued", "num mid"], ["Cache", "gap mid"], ["Hit rate", "gap"], ["Prefill", "num wide"]];

function makeTable() {
  const body = el("tbody");
  for (const worker of view.workers) {
    const name = el("button", { class: "name", type: "button", "aria-controls": "detail", "aria-expanded": "false", click: () => openDetail(worker.url, name) }, shortName(worker.url));
    const cells = { state: el("span", { class: "state" }), running: el("td", { class: "num" }), queued: el("td", { class: "num mid" }), cache: barCell("gap mid"), hit: barCell("gap"), speed: el("td", { class: "num wide" }) };
    const tiles = el("span", { class: "tiles", role: "group", "aria-label": `Ranks of ${shortName(worker.url)}` }, worker.ranks.map((rank) => makeTile(worker, rank, false)));
    fleetParts.rows.set(worker.url, { name, ...cells });
    body.append(el("tr", {}, el("td", {}, name), el("td", {}, cells.state), el("td", { keydown: moveTile }, tiles), cells.running, cells.queued, cells.cache.cell, cells.hit.cell, cells.speed));
  }
  firstStop();
  return scroller("Workers", headRow(COLUMNS), body);
}

function barCell(cls) {
  const fill = el("i");
  const text = el("span");
  return { fill, text, cell: el("td", { class: cls || null }, el("span", { class: "bar", "aria-hidden": "true" }, fill), text) };
}

function setBar(bar, share, text) {
  const width = `${Math.round(1000 * Math.min(1, share || 0)) / 10}%`;
  if (bar.fill.style.width !== width) bar.fill.style.width = width;
  setText(bar.text, text);
}

function updateRow(worker, row) {
  const sum = (field) => worker.ranks.reduce((total, rank) => total + (rank[field] || 0), 0);
  if (row.group) {
    row.group.classList.toggle("open", view.detail === worker.url);
    setAttribute(row.group, "data-tone", worker.state === "unhealthy" ? "bad" : "ok");
    return;
  }
  setAttribute(row.name, "aria-expanded", String(view.detail === worker.url));
  const worst = worker.ranks.find((rank) => !["ok"].includes(rank.tone));
  setAttribute(row.state, "data-tone", worker.state === "ready" && worst ? worst.tone : WORKER_TONES[worker.state] || "warn");
  const role = worker.role === "plain" ? "" : `${worker.role}, `;
  setText(row.state, role + (worker.state === "ready" && worst ? (worker.ranks.length > 1 ? `ready, a rank ${worst.state}` : `ready, ${worst.state}`) : worker.state));
  setText(row.running, count(sum("running")));
  const speed = sum("tokens_per_s") / Math.max(1, worker.ranks.filter((rank) => rank.tokens_per_s).length);
  setText(row.queued, sum("queued_tokens") ? `${count(sum("queued_tokens"))} tok` : "0");
  const capacity = (worker.capacity_blocks || 0) * worker.ranks.length;
  setBar(row.cache, capacity ? sum("blocks_gpu") / capacity : 0, `${count(sum("blocks"))}${capacity ? ` of ${count(capacity)}` : ""}`);
  const weight = worker.ranks.reduce((total, rank) => total + (rank.hit === null ? 0 : rank.prompt_tokens), 0);
  const hit = weight ? worker.ranks.reduce((total, rank) => total + (rank.hit || 0) * rank.prompt_tokens, 0) / weight : null;
  setBar(row.hit, hit, percent(hit));
  setText(row.speed, speed ? `${count(speed)} tok/s` : "–");
}

// ---- the hint beside a tile

let tipFor = null;

function showTip(tile) {
  tipFor = tile;
  const rank = ranksOf().find((one) => one.id === tile.dataset.id);
  if (rank) fillTip(rank);
}

function fillTip(rank) {
  const tip = $("tip");
  tip.replaceChildren(el("b", {}, `${shortName(rank.worker.url)} · rank ${rank.rank}`), ...rankWords(rank).flatMap((text) => [text, el("br")]));
  tip.hidden = false;
  const box = tipFor.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${box.bottom + size.height + 12 > innerHeight ? box.top - size.height - 8 : box.bottom + 8}px`;
}

function hideTip() {
  tipFor = null;
  $("tip").hidden = true;
}
