// Timeline of an iteration: when each stage starts and ends.
const BACKGROUND = ["scoring", "writing"];  // stages that run beside the others

/** Stages of one iteration, one row each, in the order of their first start. */
function drawTimeline(section, { iteration, spans }) {
  const ordered = [...spans].sort((a, b) => a[1] - b[1]);
  const rows = [...new Set(ordered.map(([stage]) => stage))];
  const bars = [["one after the other", (stage) => !BACKGROUND.includes(stage)], ["in the background", (stage) => BACKGROUND.includes(stage)]].map(([name, isIn], place) => {
    const own = ordered.filter(([stage]) => isIn(stage));
    return {
      type: "bar", orientation: "h", name, meta: name, y: own.map(([stage]) => stage), base: own.map(([, start]) => start), x: own.map(([, start, end]) => end - start),
      marker: { color: colourOf(place), line: { width: 0 } }, hovertemplate: "%{y}: %{x:.3g} s, from %{base:.3g} s<extra></extra>",
    };
  }).filter((each) => each.y.length);
  const seconds = (stage) => number(Number(spans.reduce((sum, [each, start, end]) => sum + (each === stage) * (end - start), 0).toFixed(2)));
  draw(section, "Timeline of one iteration", bars, {
    barmode: "overlay", bargap: 0.25, height: 110 + 24 * rows.length, legend: { orientation: "h", y: -56 / (24 * rows.length), yanchor: "top", font: { size: 11 } },
    x: `seconds since the start of iteration ${iteration}`, xaxis: { rangemode: "tozero" },
    yaxis: { categoryorder: "array", categoryarray: rows, tickvals: rows, ticktext: rows.map((stage) => `${stage}, ${seconds(stage)} s`), autorange: "reversed", showgrid: false },
  });
}
