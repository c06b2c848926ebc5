// One leaf: its numbers, its histogram, its way over the steps, and its sharding.

const MOST_DEVICES = 1024;

function choose(leaf) {
  chosen = leaf;
  showSight();
  showLeaf();
  drawLeaf();
}

function showLeaf() {
  const leaf = chosen;
  const share = newest.nbytes ? ` (${Number(((100 * leaf.nbytes) / newest.nbytes).toPrecision(2))} %)` : "";
  const stats = leaf.stats || {};
  const numbers = ["count", "norm", "mean", "std", "min", "max", "nan", "inf"].flatMap(
    (name) => [el("span", {}, name), el("span", { class: stats[name] && /nan|inf/.test(name) ? "warn" : "" }, inWords(stats[name]))]);
  const parts = [
    el("h2", {}, leaf.name),
    el("div", { class: "muted" },
      leaf.value === null ? `${leaf.type}, ${inBytes(leaf.nbytes)}${share}` : `${leaf.type} = ${leaf.value}`),
    leaf.status && leaf.status !== "equal" ? el("div", { class: isBad(leaf) ? "warn" : "" }, leaf.status) : null,
    leaf.stats ? el("div", { class: "numbers" }, ...numbers) : null,
  ];
  if (leaf.histogram) {
    const both = leaf.first ? `, ${columns[0].label} in yellow, ${newest.label} in blue` : "";
    parts.push(el("h3", {}, `Histogram${both}`), el("div", { class: "chart", id: "histogram" }));
  }
  if (leaf.sharding) parts.push(el("h3", {}, specInWords(leaf.sharding)), meshes(leaf));
  else if (leaf.value === null) parts.push(el("h3", {}, "Whole, on one device when it was saved"));
  if (kind === "run" && columns.length > 1 && leaf.stats) {
    const name = leaf.value === null ? "Norm" : "Size";
    parts.push(el("h3", {}, `${name}, and change since the step before`), el("div", { class: "chart", id: "way" }));
  }
  byId("leaf").replaceChildren(...parts.filter(Boolean));
}

// The limits of a chart, and how wide one value is in it: its bin is the narrowest there
// is, which nobody could see.
function limitsOf(histograms) {
  const ends = histograms.flatMap(({ low, width, counts }) =>
    counts.length > 1 ? [low, low + width * counts.length] : [low]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const widthOfOne = high / 50 - low / 50 || Math.abs(low) / 20 || 0.05;
  return { range: [low - 2 * widthOfOne, high + 2 * widthOfOne], widthOfOne };
}

function bars({ low, width, counts }, colour, widthOfOne) {
  const isOne = counts.length === 1;
  return {
    type: "bar",
    x: isOne ? [low] : counts.map((_, i) => low + (i + 0.5) * width),
    y: counts,
    width: isOne ? widthOfOne : width,
    marker: { color: colour, line: { width: 0 } },
    opacity: 0.75,
    hovertemplate: "%{y} near %{customdata}<extra></extra>",
  };
}

function drawLeaf() {
  const leaf = chosen;
  if (!leaf || !window.Plotly) return;
  if (byId("histogram")) {
    const { range, widthOfOne } = limitsOf([leaf.first, leaf.histogram].filter(Boolean));
    const before = leaf.first ? [bars(leaf.first, style("--ghost"), widthOfOne)] : [];
    const traces = [...before, bars(leaf.histogram, style("--bar"), widthOfOne)];
    const layout = { barmode: "overlay", bargap: 0, xaxis: { range }, yaxis: {} };
    inUnits(traces, layout, "x");
    draw(byId("histogram"), traces, layout);
  }
  if (byId("way")) {
    const x = columns.map((column) => Number(column.label));
    const line = { type: "scatter", mode: "lines+markers", marker: { size: 4 } };
    const traces = [
      { ...line, x, y: leaf.norms, line: { color: style("--accent") }, hovertemplate: "%{customdata} at step %{x}<extra>norm</extra>" },
      { ...line, x: x.slice(1), y: leaf.changes, yaxis: "y2", line: { color: style("--ghost") }, hovertemplate: "%{customdata} at step %{x}<extra>change</extra>" },
    ];
    const layout = {
      yaxis: { domain: [0.56, 1], title: { text: "norm" } },
      yaxis2: { domain: [0, 0.44], title: { text: "change" }, rangemode: "tozero" },
      xaxis: { anchor: "y2" },
    };
    inUnits(traces, layout, "y");
    draw(byId("way"), traces, layout);
  }
}

function specInWords(sharding) {
  if (!sharding) return "on one device";
  const spec = sharding.spec.map((part) => (part === null ? "–" : [part].flat().join("×")));
  const axes = sharding.axis_names.map((name, i) => `${name}=${sharding.mesh_shape[i]}`);
  return `(${spec.join(", ")}) on the mesh (${axes.join(", ")})`;
}

// Which block of the array a device has, along each of its axes.
function blockOf(device, { axis_names: names, mesh_shape: sizes, spec }) {
  return spec.map((part) => {
    let [index, count] = [0, 1];
    for (const name of part === null ? [] : [part].flat()) {
      const i = names.indexOf(name);
      index = index * sizes[i] + device[i];
      count *= sizes[i];
    }
    return { index, count };
  });
}

function devicesOf(sizes) {
  return sizes.reduce(
    (all, size) => all.flatMap((device) => [...Array(size).keys()].map((i) => [...device, i])),
    [[]]);
}

function meshes(leaf) {
  const { sharding, shape } = leaf;
  const devices = devicesOf(sharding.mesh_shape);
  if (devices.length > MOST_DEVICES) return el("div", { class: "muted" }, `${devices.length} devices are too many to draw.`);
  const counts = blockOf(devices[0], sharding).map((block) => block.count);
  const numberOf = (device) =>
    blockOf(device, sharding).reduce((n, { index, count }) => n * count + index, 0);
  const colour = (n) => {
    const total = counts.reduce((a, b) => a * b, 1);
    return `hsl(${Math.round((360 * n) / total + 220) % 360} 48% 62%)`;
  };
  const box = el("div", { class: "meshes" });
  box.append(arrayPicture(shape, counts, colour), meshPicture(sharding, devices, numberOf, colour));
  return box;
}

// The array, cut into its blocks: two axes of it, those that are cut first.
function arrayPicture(shape, counts, colour) {
  const axes = shape.map((_, i) => i).filter((i) => counts[i] > 1).slice(0, 2);
  for (let i = 0; axes.length < Math.min(2, shape.length); i++) if (!axes.includes(i)) axes.push(i);
  axes.sort((a, b) => a - b);
  const [down, across] = axes.length > 1 ? axes : [undefined, axes[0]];
  const [high, wide] = [down === undefined ? 1 : counts[down] || 1, counts[across] || 1];
  const picture = svg("svg", { class: "mesh", width: 150, height: 130, viewBox: "0 0 150 130" });
  for (let y = 0; y < high; y++) {
    for (let x = 0; x < wide; x++) {
      const n = counts.reduce((m, count, i) => m * count + (i === down ? y : i === across ? x : 0), 0);
      picture.append(svg("rect", {
        x: (x * 145) / wide, y: 14 + (y * 92) / high, width: 145 / wide, height: 92 / high, fill: colour(n),
      }));
    }
  }
  picture.append(svg("text", { class: "axis", x: 0, y: 10 }, `array [${shape.join(", ")}]`));
  const block = shape.map((size, i) => Math.ceil(size / (counts[i] || 1)));
  picture.append(svg("text", { class: "axis", x: 0, y: 122 }, `blocks [${block.join(", ")}]`));
  return picture;
}

// The mesh: its last axis across, all others down. Devices of one colour have one block.
function meshPicture(sharding, devices, numberOf, colour) {
  const sizes = sharding.mesh_shape;
  const wide = last(sizes) || 1;
  const high = devices.length / wide;
  const side = Math.max(6, Math.min(36, 190 / wide, 300 / high));
  const picture = svg("svg", { class: "mesh", width: wide * side + 4, height: high * side + 32 });
  devices.forEach((device, i) => {
    const [x, y] = [(i % wide) * side, 14 + Math.floor(i / wide) * side];
    const cell = svg("rect", { x, y, width: side, height: side, rx: 3, fill: colour(numberOf(device)) });
    const where = sharding.axis_names.map((name, j) => `${name}=${device[j]}`);
    cell.append(svg("title", {}, `${where.join(", ")}: block ${numberOf(device)}`));
    picture.append(cell);
    if (side >= 18) {
      picture.append(svg("text", { x: x + side / 2, y: y + side / 2 + 4, "text-anchor": "middle" }, numberOf(device)));
    }
  });
  const names = sharding.axis_names;
  const rowsOf = names.slice(0, -1).join("×");
  picture.append(svg("text", { class: "axis", x: 0, y: 10 }, `${rowsOf ? `${rowsOf} ↓ ` : ""}${last(names) || ""} →`));
  picture.append(svg("text", { class: "axis", x: 0, y: high * side + 28 }, `${devices.length} devices`));
  return picture;
}
