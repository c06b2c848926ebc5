"use strict";
// What all other scripts use. Texts of the checkpoint become text nodes, never HTML.

const facts = JSON.parse(document.getElementById("facts").textContent);
const { leaves, columns, kind } = facts;
// Where there is no distance, as from a number to a NaN.
const distance = (value) => (value === "inf" ? Infinity : value);
for (const leaf of leaves) {
  if (!leaf.changes) continue;
  leaf.changes = leaf.changes.map(distance);
  leaf.largest = distance(leaf.largest);
}
const newest = columns[columns.length - 1];
const PALETTE = [
  "#4269d0", "#e0a02f", "#e8705c", "#4fae9c", "#3f9b58", "#d977a8", "#8f6bd8", "#7fa6e0",
  "#9c6b4e", "#8d929b",
];

const byId = (id) => document.getElementById(id);

// What would not be seen, or would turn a text around, is written as an escape.
const escapedUnits = (text) =>
  text.split("").map((unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`).join("");
const printable = (text) =>
  String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (found) => found === "\n" ? found : escapedUnits(found));

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  const given = children.filter((child) => child !== null && child !== undefined);
  node.append(...given.map((child) => child instanceof Node ? child : printable(child)));
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = printable(text);
  return node;
}

function inBytes(count) {
  if (count < 1024) return `${count} B`;
  let unit = "";
  for (unit of ["KiB", "MiB", "GiB", "TiB"]) {
    count /= 1024;
    if (count < 1024) break;
  }
  return `${count.toFixed(1)} ${unit}`;
}

function inWords(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === Infinity) return "∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

const isBad = (leaf) =>
  /^(damaged|unreadable)/.test(leaf.status) || leaf.bad.some((count) => count > 0);
const last = (list) => (list && list.length ? list[list.length - 1] : null);
const changeOf = (leaf) => last(leaf.changes);

// How far a leaf moved, in relation to what it is now.
function movedBy(leaf) {
  const change = changeOf(leaf);
  const norm = last(leaf.norms);
  if (change === Infinity) return change;
  if (change === null || norm === null) return null;
  return change === 0 ? 0 : norm > 0 ? change / norm : null;
}

const style = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function mixed(from, to, share) {
  const parts = [1, 3, 5].map((i) => {
    const [a, b] = [from, to].map((colour) => parseInt(colour.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * share).toString(16).padStart(2, "0");
  });
  return `#${parts.join("")}`;
}

// The plotting library reads some HTML in texts.
const plain = (text) =>
  printable(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// The plotting library fails where an axis nears the ends of what numbers can be.
function unitOf(values) {
  const largest = values.reduce((most, v) => (Number.isFinite(v) ? Math.max(most, Math.abs(v)) : most), 0);
  if (largest > 1e290) return 1e300;
  return largest > 0 && largest < 1e-290 ? 1e-300 : 1;
}

// Draws the numbers of an axis, "x" or "y", in a unit, which its title says if it is not 1.
function inUnits(traces, layout, axis) {
  const groups = new Map();
  for (const trace of traces) {
    const name = (trace[`${axis}axis`] || axis).replace(axis, `${axis}axis`);
    groups.set(name, [...(groups.get(name) || []), trace]);
  }
  for (const [name, group] of groups) {
    const unit = unitOf(group.flatMap((trace) => trace[axis]));
    for (const trace of group) {
      trace.customdata = trace[axis].map(inWords);
      trace[axis] = trace[axis].map((v) => (Number.isFinite(v) ? v / unit : null));
      if (axis === "x" && trace.width) trace.width /= unit;
    }
    if (unit === 1) continue;
    const { title, range } = layout[name];
    const words = [title && title.text, `× ${unit}`].filter(Boolean).join(" ");
    layout[name] = { ...layout[name], title: { text: words } };
    if (range) layout[name].range = range.map((end) => end / unit);
  }
}

function draw(node, traces, layout) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--text"), size: 11, family: "system-ui, sans-serif" },
    margin: { l: 42, r: 8, t: 8, b: 28 },
    showlegend: false,
    hoverlabel: { bgcolor: style("--card"), font: { color: style("--text") } },
  };
  const full = { ...base, ...layout };
  for (const name of Object.keys(full)) {
    if (/^[xy]axis/.test(name)) full[name] = { ...axis, ...full[name] };
  }
  return Plotly.react(node, traces, full, { displayModeBar: false, responsive: true });
}
