// Start of the page, and what its controls do.
document.querySelectorAll(".swatch[data-run]").forEach((each) => { each.style.background = colourOfRun(each.dataset.run); });

/** Draws everything that depends on the selected runs. */
function drawRuns() {
  drawGallery();
  drawPrompts();
  drawCurves();
}

if (RUNS.length) {
  byId("held").addEventListener("change", drawCurves);
  byId("order").addEventListener("change", drawGallery);
  byId("play").addEventListener("click", togglePlay);
  byId("more").addEventListener("click", () => {
    numShown += 12;
    drawGallery();
  });
  byId("filter")?.addEventListener("input", filterRuns);
  if (byId("runs-table")) {
    drawTable();
    drawOtherSettings();
  }
  drawRuns();
}
if (DATA.rows.length) drawFolders();
