// Small line charts as SVG. A chart says in words what it shows, for those who cannot see it.
import { clock, element, number } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 400, HEIGHT = 150, LEFT = 46, RIGHT = 8, TOP = 10, BOTTOM = 22;

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function bounds(lines, fromZero) {
  const values = lines.flatMap((line) => line.points.map((point) => point[1]));
  let low = Math.min(...values), high = Math.max(...values);
  if (fromZero) low = Math.min(0, low);
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  return [low, high];
}

// lines: [{ name, points: [[seconds, value], …] }]; steps: a value holds until the next one
export function chart({ title, unit = "", lines, steps = false, fromZero = false, until }) {
  const drawn = lines.filter((line) => line.points.length > 0);
  const figure = element("figure", { className: "chart" });
  const now = drawn.map((line) => number(line.points.at(-1)[1])).join(" / ");
  const legend = drawn.map((line, index) => {
    const key = element("i", { className: `s${index}` });
    key.setAttribute("aria-hidden", "true");
    return element("span", {}, key, drawn.length > 1 ? `${line.name} ${number(line.points.at(-1)[1])}` : `${now} ${unit}`);
  });
  figure.append(element("figcaption", {}, element("b", {}, title), ...legend));
  if (drawn.length === 0) return null;
  const times = drawn.flatMap((line) => line.points.map((point) => point[0]));
  const first = Math.min(...times), last = Math.max(until ?? 0, ...times, first + 1);
  const [low, high] = bounds(drawn, fromZero);
  const x = (time) => LEFT + ((time - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  svg.setAttribute("aria-label", `${title}: now ${now} ${unit}; between ${number(low)} and ${number(high)} since ${clock(first)}`);
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(Number(value.toPrecision(3)))));
  }
  svg.append(shape("text", { x: LEFT, y: HEIGHT - 5 }, clock(first)));
  svg.append(shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, clock(last)));
  drawn.forEach((line, index) => {
    let path = "";
    line.points.forEach(([time, value], number) => {
      if (number === 0) path = `M${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      else if (steps) path += `H${x(time).toFixed(1)}V${y(value).toFixed(1)}`;
      else path += `L${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    if (steps) path += `H${x(last).toFixed(1)}`;
    else if (line.points.length === 1) path += "h3";
    svg.append(shape("path", { class: `s${index}`, d: path }));
  });
  figure.append(svg);
  return figure;
}
