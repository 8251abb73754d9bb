// Making elements and words. Nothing here knows the router.

const $ = (id) => document.getElementById(id);

// el("td", {class: "num"}, "12") — attributes by name, functions as listeners, children as text or nodes.
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "g"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function count(number) {
  if (number === null || number === undefined) return "–";
  if (number < 10000) return grouped.format(number);
  if (number < 999500) return `${(number / 1000).toFixed(number < 99950 ? 1 : 0)}k`;
  return number < 999.5e6 ? `${(number / 1e6).toFixed(1)}M` : `${(number / 1e9).toFixed(1)}G`;
}

function percent(share, digits = 0) {
  return share === null || share === undefined || Number.isNaN(share) ? "–" : `${(share * 100).toFixed(digits)} %`;
}

// [number, unit], so that a unit can be set smaller.
function timeParts(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return ["–", ""];
  if (seconds < 0.0995) return [(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0), "ms"];
  if (seconds < 0.9995) return [(seconds * 1000).toFixed(0), "ms"];
  if (seconds < 99.5) return [seconds.toFixed(seconds < 9.95 ? 2 : 1), "s"];
  return [grouped.format(seconds), "s"];
}

const time = (seconds) => timeParts(seconds).join(" ").trim();

function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} days`;
}

const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

// A table that may be wider than the page: then it scrolls, also by keyboard.
function scroller(name, head, body) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, el("table", {}, el("caption", { class: "vh" }, name), el("thead", {}, head), body));
}

const headRow = (columns) => el("tr", {}, columns.map(([name, cls]) => el("th", { scope: "col", class: cls || null }, name)));

function plural(number, one, many = `${one}s`) {
  return `${grouped.format(number)} ${number === 1 ? one : many}`;
}

// Workers are called by what tells them apart: the scheme, and a port or domain they all share, say nothing.
let commonPort = "";
let commonTail = "";
function learnNames(urls) {
  const parts = urls.map((url) => url.replace(/^https?:\/\//, "")).map((text) => [text.replace(/:\d+$/, ""), (text.match(/:\d+$/) || [""])[0]]);
  const hosts = new Set(parts.map((part) => part[0]));
  const ports = new Set(parts.map((part) => part[1]));
  commonPort = ports.size === 1 && hosts.size > 1 ? [...ports][0] : "";
  const tails = new Set([...hosts].map((host) => (/^[\d.]+$|[[\]]/.test(host) ? "" : host.replace(/^[^.]+/, ""))));
  commonTail = tails.size === 1 && hosts.size > 1 ? [...tails][0] : "";
}

function shortName(url) {
  let name = url.replace(/^https?:\/\//, "");
  if (commonPort && name.endsWith(commonPort)) name = name.slice(0, -commonPort.length);
  return commonTail && name.endsWith(commonTail) ? name.slice(0, -commonTail.length) : name;
}
