// The map of the bytes. Only what is near is drawn: a map of all leaves would be slow.

const MOST_CHILDREN = 40;
const MOST_SECTORS = 170;
const DEPTH = 3;

const nodes = [];

function newNode(label, parent) {
  const node = { id: nodes.length, label, parent, below: new Map(), nbytes: 0, bad: false };
  nodes.push(node);
  return node;
}

function grown() {
  const root = newNode(facts.title, null);
  for (const leaf of leaves) {
    let node = root;
    for (const part of leaf.name.split("/")) {
      if (!node.below.has(part)) node.below.set(part, newNode(part, node));
      node = node.below.get(part);
    }
    node.leaf = leaf;
    for (let up = node; up; up = up.parent) {
      up.nbytes += leaf.nbytes;
      up.bad = up.bad || isBad(leaf);
    }
  }
  ordered(root, 0);
  return root;
}

// Numbers the leaves, so that what is below a node is a range.
function ordered(node, next) {
  node.start = next;
  if (node.leaf) node.leaf.order = next++;
  node.children = grouped([...node.below.values()], node);
  for (const child of node.below.values()) next = ordered(child, next);
  node.end = next;
  for (const group of node.children.filter((child) => child.isGroup)) measured(group);
  return next;
}

function measured(group) {
  group.children.filter((child) => child.isGroup).forEach(measured);
  group.start = group.children[0].start;
  group.end = last(group.children).end;
  group.nbytes = group.children.reduce((sum, child) => sum + child.nbytes, 0);
  group.bad = group.children.some((child) => child.bad);
}

// Many children, such as the layers of a model, become ranges of them.
function grouped(children, parent) {
  if (children.length <= MOST_CHILDREN) return children;
  const parts = Math.min(MOST_CHILDREN, Math.ceil(Math.sqrt(children.length)));
  const size = Math.ceil(children.length / parts);
  const groups = [];
  for (let i = 0; i < children.length; i += size) {
    const inside = children.slice(i, i + size);
    const group = newNode(`${inside[0].label} … ${last(inside).label}`, parent);
    group.isGroup = true;
    for (const child of inside) child.parent = group;
    group.children = grouped(inside, group);
    groups.push(group);
  }
  return groups;
}

const root = grown();
let here = root;

function nearby() {
  const shown = [{ node: here, depth: 0, part: -1 }];
  const open = [shown[0]];
  while (open.length) {
    open.sort((a, b) => a.node.nbytes - b.node.nbytes);
    const at = open.pop();
    const inside = at.node.children.filter((child) => child.nbytes > 0);
    const isFull = at.node !== here && shown.length + inside.length > MOST_SECTORS;
    if (at.depth >= DEPTH || isFull) continue;
    inside.forEach((node, i) => {
      const next = { node, depth: at.depth + 1, part: at.depth === 0 ? i : at.part };
      shown.push(next);
      open.push(next);
    });
  }
  return shown;
}

const COLOURS = {
  part: null,
  dtype: (leaf) => leaf.dtype,
  sharding: (leaf) => specInWords(leaf.sharding),
};

function leavesOf(node) {
  return leaves.filter((leaf) => leaf.order >= node.start && leaf.order < node.end);
}

// The change of all leaves of a node together, in relation to their norm.
function movedTogether(node) {
  let [moved, norm] = [0, 0];
  for (const leaf of leavesOf(node)) {
    moved += (changeOf(leaf) || 0) ** 2;
    norm += (last(leaf.norms) || 0) ** 2;
  }
  if (moved === Infinity) return moved;
  return norm > 0 ? Math.sqrt(moved / norm) : 0;
}

function colours(shown) {
  const [card, by] = [style("--card"), byId("colour").value];
  const legend = new Map();
  let found;
  if (by === "change") {
    const moved = shown.map((at) => movedTogether(at.node));
    const most = Math.max(...moved.slice(1).filter(Number.isFinite), 1e-300);
    found = moved.map((m) => mixed(style("--soft"), "#e8705c", Math.sqrt(Math.min(1, m / most))));
    legend.set(`up to ${inWords(most)} of the norm`, "#e8705c");
  } else if (COLOURS[by]) {
    for (const leaf of leaves) {
      const value = COLOURS[by](leaf);
      if (!legend.has(value)) legend.set(value, PALETTE[legend.size % PALETTE.length]);
    }
    found = shown.map(({ node }) => {
      const inside = new Map();
      for (const leaf of leavesOf(node)) {
        const value = COLOURS[by](leaf);
        inside.set(value, (inside.get(value) || 0) + leaf.nbytes);
      }
      const [[most, nbytes]] = [...inside].sort((a, b) => b[1] - a[1]);
      return mixed(card, legend.get(most), nbytes === node.nbytes ? 0.85 : 0.4);
    });
  } else {
    found = shown.map((at) =>
      mixed(PALETTE[Math.max(0, at.part) % PALETTE.length], card, 0.1 + 0.2 * (at.depth - 1)));
  }
  found[0] = style("--soft");
  byId("legend").replaceChildren(
    ...[...legend].slice(0, 20).map(([text, colour]) =>
      el("span", {}, el("i", { style: `background:${colour}` }), text)));
  return found;
}

function drawMap() {
  const shown = nearby();
  const ids = shown.map((at) => `n${at.node.id}`);
  const near = new Set(shown.map((at) => at.node));
  const trace = {
    type: "treemap",
    ids,
    labels: shown.map((at) => plain(at.node === root ? "all leaves" : at.node.label)),
    parents: shown.map((at) =>
      at.node === here ? "" : `n${near.has(at.node.parent) ? at.node.parent.id : here.id}`),
    values: shown.map((at) => at.node.nbytes),
    text: shown.map((at) => inBytes(at.node.nbytes)),
    branchvalues: "total",
    textinfo: "label+text",
    hovertemplate: "%{label}<br>%{text}<extra></extra>",
    pathbar: { visible: false },
    tiling: { pad: 1.5 },
    marker: {
      colors: colours(shown),
      pad: { t: 18, l: 2, r: 2, b: 2 },
      line: {
        width: shown.map((at) => (at.node.bad ? 2 : 0.5)),
        color: shown.map((at) => (at.node.bad ? style("--bad") : style("--card"))),
      },
    },
  };
  draw(byId("map"), [trace], { margin: { l: 0, r: 0, t: 0, b: 0 } });
  const map = byId("map");
  map.removeAllListeners("plotly_treemapclick");
  map.on("plotly_treemapclick", ({ points }) => {
    const node = nodes[Number(points[0].id.slice(1))];
    if (node === here) goTo(node.parent || root);
    else if (node.children.length) goTo(node);
    else choose(node.leaf);
    return false;
  });
}

function goTo(node) {
  here = node;
  showCrumbs();
  drawMap();
  showRows();
}

function showCrumbs() {
  const path = [];
  for (let node = here; node; node = node.parent) path.unshift(node);
  const links = path.map((node) =>
    el("button", { class: "link", onclick: () => goTo(node) },
      node === root ? "all leaves" : node.label));
  byId("crumbs").replaceChildren(
    ...links.flatMap((link, i) => (i ? [" / ", link] : [link])));
}

function showColours() {
  const hasChanges = leaves.some((leaf) => changeOf(leaf) !== null);
  const names = ["part", "dtype", "sharding", ...(hasChanges ? ["change"] : [])];
  byId("colour").append(...names.map((name) => el("option", {}, name)));
  byId("colour").addEventListener("change", drawMap);
}
