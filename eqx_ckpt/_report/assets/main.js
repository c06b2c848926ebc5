// The page, from top to bottom.

function showTexts() {
  byId("title").textContent = printable(facts.title);
  showTiles();
  showAlerts();
  showSteps();
  showCrumbs();
  showColours();
  showTable();
  showAbout();
  const first = leaves.filter((leaf) => isBad(leaf) && leaf.stats)[0]
    || [...leaves].sort((a, b) => b.nbytes - a.nbytes)[0];
  if (first) choose(first);
}

// A chart at a time, so that the page answers in between.
function drawCharts() {
  const charts = [drawMap, drawLeaf, drawSteps];
  const next = () => {
    const chart = charts.shift();
    if (!chart) {
      document.documentElement.dataset.drawn = "yes";
      return;
    }
    try {
      chart();
    } catch (error) {
      console.error(error);  // The others can be drawn all the same.
    }
    setTimeout(next);
  };
  next();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const chart of [drawMap, drawLeaf, drawSteps]) chart();
  });
}

function showTiles() {
  const statuses = new Map();
  for (const { status } of leaves) {
    const name = status.startsWith("was ") ? "of a different type" : status;
    statuses.set(name, (statuses.get(name) || 0) + 1);
  }
  const tiles = [
    [inBytes(newest.nbytes), "of arrays"],
    [newest.leaves.toLocaleString("en"), "leaves"],
    [newest.numbers.toLocaleString("en"), "numbers"],
  ];
  if (kind === "run") tiles.unshift([columns.length, columns.length > 1 ? "steps" : "step"]);
  if (kind === "run") tiles.push([newest.label, "last step"]);
  if (kind === "comparison") {
    for (const [name, count] of statuses) if (name) tiles.push([count.toLocaleString("en"), name]);
  }
  byId("tiles").append(
    ...tiles.map(([value, name]) => el("div", {}, el("b", {}, String(value)), el("span", {}, name))));
}

function showAlerts() {
  const boxes = facts.alerts.map(({ text, leaves: names }) => {
    const links = names.flatMap((name, i) => [
      i ? ", " : "",
      el("button", { class: "link", onclick: () => choose(leaves.find((leaf) => leaf.name === name)) }, name),
    ]);
    return el("div", { class: "alert", role: "alert" }, el("b", {}, text), el("div", {}, ...links));
  });
  const bare = columns.filter((column) => !column.checksums);
  const where = bare.some(({ label }) => label) ? ` in ${bare.map(({ label }) => label).join(", ")}` : "";
  const bytes = bare.length
    ? `every byte could be read. There are no checksums to compare with${where}.`
    : "every byte agrees with its checksum.";
  const well = el("p", { class: "well" }, `✓ Every number is finite, and ${bytes}`);
  byId("alerts").append(...(boxes.length ? boxes : [well]));
}

function showAbout() {
  for (const column of columns) {
    const { config, metadata, versions, history } = column;
    const about = { ...(config && { config }), metadata, versions, ...(history && { history }) };
    byId("about").append(
      el("h3", {}, [column.label, column.path].filter(Boolean).join(": ")),
      el("pre", {}, JSON.stringify(about, null, 1)));
  }
}
