// The table of leaves. Only the rows in sight are in the page.

const ROW = 30;
const MARGIN = 10;
const collator = new Intl.Collator("en", { numeric: true });

const stat = (name) => (leaf) => (leaf.stats ? leaf.stats[name] : null);
const TABLE = [
  { title: "name", of: (leaf) => leaf.name, isText: true },
  { title: "type", of: (leaf) => (leaf.value === null ? leaf.type : `${leaf.type} = ${leaf.value}`), isText: true },
  { title: "bytes", of: (leaf) => leaf.nbytes, show: inBytes },
  { title: "distribution", of: (leaf) => leaf.histogram && leaf.histogram.counts.length, spark: true },
  ...(columns.length > 1
    ? [
        { title: "change", of: changeOf },
        { title: "relative", of: movedBy },
      ]
    : []),
  ...(kind === "comparison"
    ? [
        { title: "differ", of: (leaf) => leaf.differ },
        { title: "largest", of: (leaf) => leaf.largest },
      ]
    : []),
  ...["norm", "mean", "std", "min", "max"].map((name) => ({ title: name, of: stat(name) })),
  { title: "not finite", of: (leaf) => last(leaf.bad) || null },
  { title: "status", of: (leaf) => leaf.status || null, isText: true },
];

const ONLY = {
  "all leaves": () => true,
  "only damaged or not finite": isBad,
  "only sharded": (leaf) => leaf.sharding !== null,
  ...(columns.length > 1
    ? { "only changed": (leaf) => leaf.differ !== 0 || leaf.status.length > 0 }
    : {}),
};
if (kind === "comparison") {
  ONLY["only changed"] = (leaf) => leaf.status !== "equal";
}

let rows = leaves;
let chosen = null;
let order = { column: null, sign: 1 };

function compared(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return Infinity;
  if (b === null || b === undefined) return -Infinity;
  if (typeof a === "number" && typeof b === "number") return (a - b) * order.sign;
  return collator.compare(String(a), String(b)) * order.sign;
}

function showRows() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [dtype, only] = [byId("dtype").value, ONLY[byId("only").value]];
  rows = leaves.filter((leaf) => {
    if (leaf.order < here.start || leaf.order >= here.end) return false;
    if (dtype && leaf.dtype !== dtype) return false;
    const text = `${leaf.name} ${leaf.type} ${leaf.status}`.toLowerCase();
    return words.every((word) => text.includes(word)) && only(leaf);
  });
  if (order.column) {
    const { of } = order.column;
    rows.sort((a, b) => compared(of(a), of(b)));
  }
  const [some, all] = [rows.length, leaves.length].map((n) => n.toLocaleString("en"));
  byId("count").textContent = some === all ? `${all} leaves` : `${some} of ${all} leaves`;
  byId("rows").scrollTop = 0;
  showSight();
}

function showSight() {
  const box = byId("rows");
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - MARGIN);
  const end = Math.min(rows.length, first + Math.ceil(box.clientHeight / ROW) + 2 * MARGIN);
  const gap = (count) =>
    el("tr", { class: "gap", "aria-hidden": "true" },
      el("td", { colspan: TABLE.length, style: `height:${count * ROW}px` }));
  box.querySelector("tbody").replaceChildren(
    gap(first), ...rows.slice(first, end).map(row), gap(rows.length - end));
}

function row(leaf) {
  const names = ["leaf", isBad(leaf) ? "bad" : "", leaf === chosen ? "chosen" : ""];
  const cells = TABLE.map((column) => {
    if (column.spark) return el("td", {}, leaf.histogram ? spark(leaf.histogram.counts) : "");
    const value = column.of(leaf);
    if (column.isText) return el("td", { class: "text", title: value || "" }, value || "");
    return el("td", {}, (column.show || inWords)(value));
  });
  return el("tr", { class: names.join(" ").trim(), onclick: () => choose(leaf) }, ...cells);
}

function spark(counts) {
  const most = Math.max(...counts);
  const width = 96 / counts.length;
  const bars = counts.map((count, i) => {
    const height = count ? Math.max(1, (22 * count) / most) : 0;
    return `M${(i * width).toFixed(1)} 22v-${height.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}z`;
  });
  // One value only is a line, not a wall.
  if (counts.length === 1) bars[0] = "M46 22v-22h4v22z";
  const picture = svg("svg", { viewBox: "0 0 96 22", "aria-hidden": "true" });
  picture.append(svg("path", { class: "spark", d: bars.join("") }));
  return picture;
}

function sortBy(column) {
  const isSame = order.column === column;
  order = { column, sign: isSame ? -order.sign : column.isText ? 1 : -1 };
  showHead();
  showRows();
}

function showHead() {
  const cells = TABLE.map((column) => {
    const isSorted = order.column === column;
    const arrow = isSorted ? (order.sign > 0 ? " ↑" : " ↓") : "";
    const sort = isSorted ? (order.sign > 0 ? "ascending" : "descending") : "none";
    return el("th", { "aria-sort": sort, class: column.isText ? "text" : "", scope: "col" },
      el("button", { onclick: () => sortBy(column) }, column.title + arrow));
  });
  byId("rows").querySelector("thead").replaceChildren(el("tr", {}, ...cells));
}

function moveBy(event) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const next = rows[rows.indexOf(chosen) + by];
  if (!by || !next) return;
  event.preventDefault();
  choose(next);
  const [box, top] = [byId("rows"), rows.indexOf(next) * ROW];
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top > box.scrollTop + box.clientHeight - 3 * ROW) {
    box.scrollTop = top - box.clientHeight + 3 * ROW;
  }
}

function showTable() {
  const dtypes = [...new Set(leaves.map((leaf) => leaf.dtype))].sort(collator.compare);
  byId("dtype").append(
    el("option", { value: "" }, "all dtypes"),
    ...dtypes.map((name) => el("option", { value: name }, name)));
  byId("only").append(...Object.keys(ONLY).map((name) => el("option", {}, name)));
  if (kind === "comparison") {
    byId("only").value = "only changed";
    order = { column: TABLE.find((column) => column.title === "relative"), sign: -1 };
  }
  for (const id of ["search", "dtype", "only"]) byId(id).addEventListener("input", showRows);
  byId("rows").addEventListener("scroll", showSight, { passive: true });
  byId("rows").addEventListener("keydown", moveBy);
  showHead();
  showRows();
}
