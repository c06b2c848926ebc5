// A run: its metrics, and how far its parts moved from step to step.

const MOST_METRICS = 4;
const shownMetrics = new Set(Object.keys(facts.curve.metrics).slice(0, MOST_METRICS));

function showSteps() {
  byId("steps").hidden = kind !== "run" || facts.curve.steps.length < 2;
  byId("histories").replaceChildren(
    ...columns.filter(({ notes }) => notes.length).map(({ label, notes }) =>
      el("div", {}, `Step ${label}: ${notes.join(", ")}`)));
  byId("chosen-metrics").replaceChildren(
    ...Object.keys(facts.curve.metrics).map((name) =>
      el("button", { "aria-pressed": shownMetrics.has(name), onclick: () => toggle(name) }, name)));
}

function toggle(name) {
  if (!shownMetrics.delete(name)) shownMetrics.add(name);
  showSteps();
  drawSteps();
}

function drawSteps() {
  if (byId("steps").hidden) return;
  const x = facts.curve.steps;
  const names = [...shownMetrics];
  const across = Math.min(2, names.length) || 1;
  const down = Math.ceil(names.length / across) || 1;
  const layout = {
    grid: { rows: down, columns: across, pattern: "independent", ygap: 0.35, xgap: 0.18 },
    annotations: [],
    margin: { l: 42, r: 8, t: 20, b: 26 },
  };
  const traces = names.map((name, i) => {
    const n = i ? i + 1 : "";
    layout[`xaxis${n}`] = {};
    layout[`yaxis${n}`] = {};
    layout.annotations.push({
      text: plain(name), showarrow: false, xref: `x${n} domain`, yref: `y${n} domain`,
      x: 0, y: 1, xanchor: "left", yanchor: "bottom", font: { color: style("--muted") },
    });
    return {
      type: "scatter", mode: "lines+markers", x, y: facts.curve.metrics[name], marker: { size: 4 },
      xaxis: `x${n}`, yaxis: `y${n}`, line: { color: PALETTE[i % PALETTE.length] },
      hovertemplate: "%{customdata} at step %{x}<extra></extra>",
    };
  });
  byId("metrics").style.height = `${Math.max(190, 135 * down)}px`;
  byId("metrics").hidden = !names.length;
  inUnits(traces, layout, "y");
  if (names.length) draw(byId("metrics"), traces, layout);
  byId("parts").hidden = columns.length < 2;
  drawParts(columns.slice(1).map((column) => Number(column.label)));
}

// For each part of the tree: the change since the step before, relative to the norm.
function drawParts(x) {
  const parts = new Map();
  for (const leaf of leaves) {
    if (!leaf.nbytes) continue;
    const name = leaf.name.split("/")[0];
    if (!parts.has(name)) parts.set(name, { moved: x.map(() => 0), norm: x.map(() => 0) });
    const part = parts.get(name);
    x.forEach((_, i) => {
      part.moved[i] += (leaf.changes[i] || 0) ** 2;
      part.norm[i] += (leaf.norms[i + 1] || 0) ** 2;
    });
  }
  const moving = [...parts].filter(([, part]) => part.moved.some((m) => m > 0));
  const traces = moving.slice(0, PALETTE.length).map(([name, { moved, norm }], i) => ({
    type: "scatter", mode: "lines+markers", name: plain(name), x, marker: { size: 4 },
    y: moved.map((m, j) => (norm[j] > 0 && m > 0 ? Math.sqrt(m / norm[j]) : null)),
    line: { color: PALETTE[i] }, hovertemplate: "%{y:.4g} at step %{x}<extra>%{fullData.name}</extra>",
  }));
  draw(byId("parts"), traces, {
    yaxis: { type: "log", dtick: "D2", tickformat: "~g" }, xaxis: {}, showlegend: true,
    legend: { orientation: "h", y: -0.15, yanchor: "top" }, margin: { l: 48, r: 8, t: 20, b: 26 },
    annotations: [{
      text: "change / norm", showarrow: false, xref: "x domain", yref: "y domain", x: 0, y: 1,
      xanchor: "left", yanchor: "bottom", font: { color: style("--muted") },
    }],
  });
}
