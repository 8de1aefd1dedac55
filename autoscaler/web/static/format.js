// Values as people read them, and elements without HTML text: whatever comes from a job is set as text only.

export const WAITING = new Set(["pending", "queued", "starting"]);
export const ENDED = new Set(["done", "stopped", "failed", "cancelled"]);

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)}%`);

export function clock(seconds) {
  const then = new Date(1000 * seconds);
  const today = then.toDateString() === new Date().toDateString();
  const time = then.toLocaleTimeString([], { hour12: false });
  return today ? time : `${then.toLocaleDateString()} ${time}`;
}

export function ago(seconds) {
  if (!seconds) return "–";
  const gone = Math.max(0, Date.now() / 1000 - seconds);
  if (gone < 90) return `${Math.round(gone)} s`;
  if (gone < 5400) return `${Math.round(gone / 60)} min`;
  return gone < 129600 ? `${Math.round(gone / 3600)} h` : `${Math.round(gone / 86400)} days`;
}

export function progressText(row) {
  const epoch = row.epoch === null ? "" : `epoch ${row.epoch}${row.epochs ? `/${row.epochs}` : ""}`;
  return row.progress === null ? epoch : `${percent(row.progress)}${epoch ? ` · ${epoch}` : ""}`;
}

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function jobColor(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 3600;
  return `hsl(${((sum * 137.5) % 360).toFixed(0)} 60% 52%)`;
}

const HIDDEN = new Set(["time", "event", "fence", "job", "placements"]);

export function eventItem(event, withJob) {
  const parts = Object.entries(event)
    .filter(([name, value]) => !HIDDEN.has(name) && value !== null && value !== "")
    .map(([name, value]) => (name === "reason" || name === "message" ? String(value) : `${name} ${flat(value)}`));
  const name = withJob && event.job ? `${event.event} ${event.job}` : String(event.event);
  return element(
    "li",
    {},
    element("time", { dateTime: new Date(1000 * event.time).toISOString() }, clock(event.time)),
    element("b", {}, name),
    element("span", {}, parts.join(" · ")),
  );
}

function flat(value) {
  if (typeof value === "number") return number(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
