// Start of the page, and what its controls do.
function colourSwatches() {
  document.querySelectorAll(".swatch").forEach((each) => {
    if (each.dataset.run in DATA.runs) each.style.background = colourOfRun(each.dataset.run);
  });
}

function drawVideos() {
  drawnClips = clipsOf();
  drawSlider();
  drawGallery();
  drawPrompts();
  drawGlance();
}

/** Options of a select, without losing the selected one. */
function fillSelect(select, values) {
  const { value } = select;
  select.replaceChildren(...values.map((each) => element("option", each)));
  if (values.includes(value)) select.value = value;
}

/** What the gallery shows; it is drawn again only if this has changed, because that restarts the videos. */
const clipsOf = () => JSON.stringify(cardRuns().map(([name, run]) => [name, run.videos.map(({ entries }) => Object.values(entries).map(({ clip }) => clip))]));

let drawnClips = "";

/** Draws the page again from new data. */
function redrawAll() {
  if (!RUNS.length) return;
  if (byId("run")) fillSelect(byId("run"), RUNS.map(([name]) => name));
  if (byId("runs-table")) {
    drawFilters();
    drawTable();
  }
  colourSwatches();
  if (clipsOf() !== drawnClips) drawVideos();
  drawCurves();
}

/** Draws everything that depends on the selected runs. */
function drawRuns() {
  colourSwatches();
  drawVideos();
  drawCurves();
}

/** Draws what is on the first screen; the rest follows when that can be seen. */
function drawFirst() {
  colourSwatches();
  drawVideos();
  redraw(drawRewards);
}

const ready = plotly.then(() => new Promise((resolve) => setTimeout(() => {
  if (RUNS.length) drawCurves();
  resolve();
})));

readData(byId("data").textContent);
if (RUNS.length) {
  byId("held").addEventListener("change", drawCurves);
  for (const name of ["axis", "log-x", "log-y", "smoothing", "run"]) byId(name)?.addEventListener("input", drawCurves);
  byId("grouped")?.addEventListener("input", drawRuns);
  byId("order").addEventListener("change", drawGallery);
  byId("play").addEventListener("click", togglePlay);
  byId("more").addEventListener("click", () => { numShown += 12; drawGallery(); });
  byId("validation").addEventListener("input", () => { showSelected(); cards.forEach(({ update }) => update(selectedIteration())); });
  document.addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.id !== "validation";
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") selectValidation(-1);
    if (event.key === "l") selectValidation(1);
  });
  if (byId("run")) fillSelect(byId("run"), RUNS.map(([name]) => name));
  if (byId("runs-table")) startTable();
  drawFirst();
}
if (DATA.served) startRefresh();
if (DATA.rows.length) drawFolders();
