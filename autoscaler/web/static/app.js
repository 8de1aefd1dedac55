// The page: it keeps the rows that the server sends, and draws what has changed.
import { ENDED, WAITING, ago, element, eventItem, jobColor, number, percent, progressText, setText } from "./format.js";
import { JobPage } from "./job.js";

const $ = (id) => document.getElementById(id);
const jobs = new Map();
const nodes = new Map();
const jobRows = new Map(); // name → { tr, cells }
const nodeItems = new Map();
let summary = null;
let session = { title: "", request: "" };
const changed = { jobs: new Set(), nodes: new Set() };
let drawing = false;
let eventsDue = 0;

const jobPage = new JobPage({ request: () => session.request, confirm: ask });

function route() {
  const match = location.hash.match(/^#\/jobs\/(.+)$/);
  return match ? decodeURIComponent(match[1]) : null;
}

function show() {
  const job = route();
  $("cluster").hidden = job !== null;
  $("job").hidden = job === null;
  document.title = job === null ? `adaptdl · ${session.title}` : `${job} · adaptdl`;
  jobPage.open(job);
  if (job === null) drawAll();
  else $("job-heading").focus();
}

// Rows

const byName = new Intl.Collator("en", { numeric: true }).compare;
const order = (row) => (row.state === "running" || row.state === "stopping" ? 0 : ENDED.has(row.state) ? 2 : 1);

function listed(row) {
  const words = $("filter").value.trim().toLowerCase();
  if (ENDED.has(row.state) && !$("ended").checked && !words) return false;
  return !words || `${row.job} ${row.owner ?? ""} ${row.state} ${row.reason}`.toLowerCase().includes(words);
}

const COLUMNS = ["Job", "State", "Replicas", "Batch", "Goodput", "Loss", "Progress", "Why"];

function newRow(name) {
  const tr = element("tr", {});
  tr.setAttribute("role", "row");
  const cells = COLUMNS.map((label, index) => {
    const cell = element("td", { className: index > 1 && index < 6 ? "number" : "" });
    cell.setAttribute("role", "cell");
    cell.dataset.label = label;
    return cell;
  });
  const link = element("a", { href: `#/jobs/${encodeURIComponent(name)}` }, name);
  const swatch = element("i", { className: "swatch" });
  swatch.setAttribute("aria-hidden", "true");
  const owner = element("small", {});
  cells[0].append(swatch, link, owner);
  cells[0].title = name;
  const state = element("span", {});
  cells[1].append(state);
  const bar = element("progress", { max: 1 });
  bar.setAttribute("aria-label", `Progress of ${name}`);
  const text = element("small", {});
  cells[6].append(bar, text);
  const why = element("div", { className: "why" });
  cells[7].append(why);
  tr.append(...cells);
  return { tr, cells, swatch, owner, state, bar, text, why };
}

function fillRow(made, row) {
  const since = row.started ?? row.created;
  setText(made.owner, [row.owner, since ? ago(since) : ""].filter(Boolean).join(" · "));
  setText(made.state, row.state);
  const kind = `state ${row.state}`;
  if (made.state.className !== kind) made.state.className = kind;
  const color = row.replicas ? jobColor(row.job) : "";
  if (made.color !== color) made.swatch.style.background = made.color = color;
  fillNumber(made.cells[2], row.replicas || null);
  fillNumber(made.cells[3], row.batch_size);
  fillNumber(made.cells[4], row.goodput, "/s");
  fillNumber(made.cells[5], row.loss);
  made.cells[6].classList.toggle("empty", row.progress === null && row.epoch === null);
  made.bar.hidden = row.progress === null;
  if (row.progress !== null && made.bar.value !== row.progress) made.bar.value = row.progress;
  setText(made.text, progressText(row));
  setText(made.why, row.reason);
  if (made.cells[7].title !== row.reason) made.cells[7].title = row.reason;
}

function fillNumber(cell, value, unit = "") {
  setText(cell, value === null ? "–" : number(value) + unit);
  cell.classList.toggle("empty", value === null);
}

function placeRows() {
  const body = $("jobs-body");
  const rows = [...jobs.values()].filter(listed);
  rows.sort((a, b) => order(a) - order(b) || byName(a.job, b.job));
  const wanted = rows.map((row) => {
    let made = jobRows.get(row.job);
    if (!made) {
      made = newRow(row.job);
      jobRows.set(row.job, made);
      fillRow(made, row);
    }
    made.placedAs = row.state;
    return made.tr;
  });
  if (wanted.length !== body.children.length || wanted.some((tr, index) => body.children[index] !== tr)) {
    body.replaceChildren(...wanted);
  }
  $("no-jobs").hidden = wanted.length > 0;
  $("jobs").hidden = wanted.length === 0;
}

function drawQueue() {
  const waiting = [...jobs.values()].filter((row) => WAITING.has(row.state));
  waiting.sort((a, b) => (a.created ?? 0) - (b.created ?? 0));
  $("queue").hidden = waiting.length === 0;
  const items = waiting.slice(0, 50).map((row) =>
    element(
      "li",
      {},
      element("a", { href: `#/jobs/${encodeURIComponent(row.job)}` }, row.job),
      element("span", {}, `${row.reason}${row.created ? ` (for ${ago(row.created)})` : ""}`),
    ),
  );
  if (waiting.length > items.length) items.push(element("li", {}, `and ${waiting.length - items.length} more`));
  $("queue-list").replaceChildren(...items);
}

// Nodes

function newNode(name) {
  const load = element("div", { className: "load" });
  const slots = element("div", { className: "slots" });
  const count = element("span", {});
  const li = element("li", {}, element("div", { className: "top" }, element("b", {}, name), count), slots, load);
  return { li, load, slots, count };
}

function fillNode(made, node) {
  const held = Object.entries(node.jobs);
  const used = held.reduce((sum, [, count]) => sum + count, 0);
  setText(made.count, `${used}/${node.slots}`);
  const stops = [];
  let at = 0;
  for (const [job, count] of held) {
    const to = at + (100 * count) / node.slots;
    stops.push(`${jobColor(job)} ${at}% ${to}%`);
    at = to;
  }
  const gradient = held.length ? `linear-gradient(90deg, ${stops.join(", ")}, transparent ${at}%)` : "none";
  if (made.gradient !== gradient) {
    made.gradient = gradient;
    made.slots.style.backgroundImage = gradient;
  }
  const load = [
    node.state === "ok" ? "" : node.state,
    node.kind,
    node.gpu === null ? "" : `GPU ${percent(node.gpu)}`,
    node.cpu === null ? "" : `CPU ${percent(node.cpu)}`,
    node.memory === null ? "" : `mem ${percent(node.memory)}`,
  ];
  setText(made.load, load.filter(Boolean).join(" · ") || (used ? "" : "idle"));
  made.li.classList.toggle("draining", node.state !== "ok");
  const title = `${node.node} (${node.host}): ${held.map(([job, count]) => `${job} ${count}`).join(", ") || "idle"}`;
  if (made.li.title !== title) made.li.title = title;
}

function placeNodes() {
  const names = [...nodes.keys()].sort(byName);
  const wanted = names.map((name) => {
    let made = nodeItems.get(name);
    if (!made) {
      made = newNode(name);
      nodeItems.set(name, made);
      fillNode(made, nodes.get(name));
    }
    return made.li;
  });
  $("nodes").replaceChildren(...wanted);
  $("no-nodes").hidden = wanted.length > 0;
}

// Drawing

function drawSummary() {
  if (!summary) return;
  setText($("tile-slots"), `${summary.used} of ${summary.slots}`);
  setText($("tile-nodes"), String(nodes.size));
  setText($("tile-running"), String(summary.running));
  setText($("tile-waiting"), String(summary.waiting));
  $("tile-cost").parentElement.hidden = summary.hourly_cost === null;
  setText($("tile-cost"), number(summary.hourly_cost));
  $("problem").hidden = !summary.problem;
  setText($("problem"), summary.problem ? `What is shown may be old: ${summary.problem}` : "");
}

function drawAll() {
  changed.jobs = new Set(jobs.keys());
  changed.nodes = new Set(nodes.keys());
  draw(true);
}

function draw(whole = false) {
  drawing = false;
  drawSummary();
  if (route() !== null) return; // the first screen is drawn when it is shown again
  let moved = whole || $("filter").value !== "";
  for (const name of changed.jobs) {
    const row = jobs.get(name), made = jobRows.get(name);
    if (!row) jobRows.delete(name);
    else if (made) fillRow(made, row);
    moved ||= !row || !made || made.placedAs !== row.state;
  }
  if (moved) placeRows();
  if (moved || [...changed.jobs].some((name) => WAITING.has(jobs.get(name)?.state))) drawQueue();
  let placed = whole;
  for (const name of changed.nodes) {
    const node = nodes.get(name), made = nodeItems.get(name);
    if (!node) nodeItems.delete(name);
    else if (made) fillNode(made, node);
    placed ||= !node || !made;
  }
  if (placed) placeNodes();
  changed.jobs.clear();
  changed.nodes.clear();
  if (jobs.size > 0) performance.mark("adaptdl-drawn");
  if (Date.now() > eventsDue) drawEvents();
}

async function drawEvents() {
  eventsDue = Date.now() + 2000;
  const answer = await fetch("/api/events");
  if (!answer.ok) return;
  const found = await answer.json();
  $("cluster-events").replaceChildren(...found.slice(-50).reverse().map((event) => eventItem(event, true)));
}

function soon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => draw());
}

// What the server sends

function take(table, kind, rows) {
  for (const [name, row] of Object.entries(rows ?? {})) {
    if (row === null) table.delete(name);
    else table.set(name, row);
    changed[kind].add(name);
  }
}

function announce(rows) {
  const said = [];
  for (const [name, row] of Object.entries(rows ?? {})) {
    const before = jobs.get(name);
    if (row && before && before.state !== row.state) said.push(`${name} is ${row.state}`);
    else if (row && !before) said.push(`${name} is new`);
  }
  if (said.length > 0) {
    setText($("live"), said.length > 3 ? `${said.length} jobs have changed their state` : said.join(", "));
  }
}

// A browser has six connections to a server, for all its tabs together: only tabs that are seen have a stream.
let stream = null;

function connectWhileSeen() {
  if (document.visibilityState === "hidden") {
    stream?.close();
    stream = null;
  } else if (stream === null) {
    connect();
  }
}

function connect() {
  const own = (stream = new EventSource("/api/stream"));
  own.addEventListener("overview", (message) => {
    const whole = JSON.parse(message.data);
    jobs.clear();
    nodes.clear();
    jobRows.clear();
    nodeItems.clear();
    take(jobs, "jobs", whole.jobs);
    take(nodes, "nodes", whole.nodes);
    summary = whole.summary;
    drawAll();
  });
  own.addEventListener("patch", (message) => {
    const patch = JSON.parse(message.data);
    announce(patch.jobs);
    take(jobs, "jobs", patch.jobs);
    take(nodes, "nodes", patch.nodes);
    summary = patch.summary ?? summary;
    soon();
    if (patch.jobs && route() in patch.jobs) jobPage.refresh();
  });
  own.onopen = () => {
    setText($("connection"), "live");
    $("connection").classList.add("live");
  };
  own.onerror = () => {
    if (stream !== own) return;
    const ended = own.readyState === EventSource.CLOSED; // refused: the server is another one now
    setText($("connection"), ended ? "not connected" : "connecting again …");
    $("connection").classList.remove("live");
    if (!ended) return;
    $("problem").hidden = false;
    setText($("problem"), "adaptdl web was started again: open the address that it has printed");
  };
}

// A question before what cannot be undone

function ask(text, button) {
  return new Promise((resolve) => {
    const dialog = $("confirm");
    setText($("confirm-text"), text);
    setText($("confirm-yes"), button);
    let answer = false;
    $("confirm-yes").onclick = () => {
      answer = true;
      dialog.close();
    };
    $("confirm-no").onclick = () => dialog.close();
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
  });
}

async function start() {
  const answer = await fetch("/api/session");
  if (!answer.ok) {
    $("problem").hidden = false;
    setText($("problem"), (await answer.json()).error);
    return;
  }
  session = await answer.json();
  setText($("title"), session.title);
  for (const id of ["filter", "ended"]) $(id).addEventListener("input", () => placeRows());
  addEventListener("hashchange", show);
  show();
  document.addEventListener("visibilitychange", connectWhileSeen);
  connectWhileSeen();
}

start();
