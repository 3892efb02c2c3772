// Plots: each is drawn when it comes near the screen, and all share one cursor.
const DASHES = { solid: "solid", dash: "dashed", dot: "dotted" };
const AXES = { iterations: "iteration", rollouts: "rollouts", hours: "hours" };
const MAX_SHARED_HOVER = 6;  // lines of a plot whose values are shown together

/** Loads Plotly: a compressed script in the page, or a file of the server. A browser compiles files in the background. */
async function loadPlotly() {
  const packed = byId("packed-plotly"), script = document.createElement("script");
  script.src = "plotly.js";
  if (packed) {
    const unpacked = new Blob([bytesOf(packed.textContent.trim())]).stream().pipeThrough(new DecompressionStream("gzip"));
    script.src = URL.createObjectURL(await new Response(unpacked, { headers: { "Content-Type": "text/javascript" } }).blob());
    packed.remove();
  }
  await new Promise((resolve, reject) => {
    script.onload = resolve;
    script.onerror = reject;
    document.head.append(script);
  });
  Plotly.setPlotConfig({ logging: 0 });  // it warns if the margin of a small plot is still changing after a few steps
}

const specs = new Map();  // data, layout and state of each plot, by its element

const nearby = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  specs.get(target).isNear = isIntersecting;
  render(target);
}), { rootMargin: "300px" });

function render(plot) {
  const spec = specs.get(plot);
  if (!spec?.isNear || spec.isDrawn || !window.Plotly) return;
  spec.isDrawn = true;
  Plotly.react(plot, spec.data, themed(spec.layout), { responsive: true, displaylogo: false, displayModeBar: false });
  if (spec.isLinked || !spec.sharesX) return;
  spec.isLinked = true;
  plot.on("plotly_hover", ({ points }) => plot.matches(":hover") && showCursor(points[0].x, plot));
  plot.on("plotly_unhover", () => plot.matches(":hover") || hideCursor());
  plot.addEventListener("mouseleave", hideCursor);
}

/** Draws all plots, for a print, except those in a closed fold, which have no size. */
function renderAll() {
  for (const [plot, spec] of specs) {
    spec.isNear = plot.checkVisibility();
    render(plot);
  }
}

const plotly = loadPlotly().then(() => specs.forEach((_, plot) => render(plot)));
addEventListener("beforeprint", renderAll);

function showCursor(x, from) {
  for (const [plot, spec] of specs) {
    const axis = plot._fullLayout?.xaxis;
    if (plot === from || !spec.isNear || !spec.sharesX || !axis) continue;
    const line = plot.querySelector(".cursor") ?? plot.appendChild(element("div", undefined, { className: "cursor" }));
    const pixel = axis.d2p(x), isInside = pixel >= 0 && pixel <= axis._length;
    line.hidden = !isInside;
    const { _offset: top, _length: height } = plot._fullLayout.yaxis;
    Object.assign(line.style, { left: `${axis._offset + pixel}px`, top: `${top}px`, height: `${height}px` });
    if (!isInside) Plotly.Fx.unhover(plot);
    else if (spec.layout.hovermode === "x") Plotly.Fx.hover(plot, { xval: x }, ["xy"]);
  }
}

function hideCursor() {
  document.querySelectorAll(".cursor").forEach((line) => { line.hidden = true; });
  for (const [plot, spec] of specs) if (spec.isLinked && !plot.matches(":hover")) Plotly.Fx.unhover(plot);
}

/** A layout in the colours of the page, which change with light and dark mode. */
function themed({ xaxis, yaxis, shapes = [], ...rest }) {
  const axis = { gridcolor: CSS("--line"), zerolinecolor: CSS("--line"), linecolor: CSS("--line"), automargin: true };
  return {
    margin: { l: 48, r: 12, t: 10, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "kept",
    font: { color: CSS("--ink"), size: 12, family: "system-ui, sans-serif" }, colorway: COLOURS,
    hoverlabel: { bgcolor: CSS("--card"), bordercolor: CSS("--line"), font: { color: CSS("--ink"), size: 11 }, namelength: -1 },
    shapes: shapes.map((shape) => ({ ...shape, line: { color: CSS("--suspect"), dash: "dash", width: 1.5 } })),
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
}

/** Titles and values of the plots whose lines are constant; they are listed in a fold instead. */
const still = new Map();
function isStill(data) {
  const values = (trace) => (trace.type === "scatter" ? trace.y : trace.z?.flat() ?? []).filter(Number.isFinite);
  return data.every((trace) => trace.type !== "bar" && values(trace).length > 2 && Math.max(...values(trace)) - Math.min(...values(trace)) <= 1e-6 * Math.max(...values(trace).map(Math.abs)));
}

/**
 * Draws a plot, or updates the one of this title. `x` names the horizontal axis, by default the chosen one, which plots
 * share; `unit` the vertical axis; `note` follows the title; a constant is drawn only if it `isKept`.
 */
function draw(section, title, data, { x, unit = "", note = "", isKept = false, xaxis = {}, yaxis = {}, height = 230, ...layout } = {}) {
  if (!data.length) return;
  if (!isKept && isStill(data)) return still.set(title, data.map((trace) => `${data.length > 1 ? trace.name + " " : ""}${number((trace.y ?? trace.z.flat()).find(Number.isFinite))}`).join(", "));
  const box = document.querySelector(section);
  let plot = [...box.querySelectorAll(".plot")].find((each) => each.dataset.title === title);
  if (!plot) {
    const figure = box.appendChild(element("figure"));
    figure.append(element("figcaption"));
    plot = figure.appendChild(element("div", undefined, { className: "plot" }));
    plot.dataset.title = title;
    plot.setAttribute("role", "img");
    specs.set(plot, {});
    nearby.observe(plot);
  }
  const lines = data.filter((trace) => trace.hoverinfo !== "skip");
  plot.setAttribute("aria-label", `${title}: ${lines.map((each) => each.name || "values").join(", ")}`);
  const caption = plot.previousSibling, styles = new Map(data.filter((each) => each.meta && each.line).map((each) => [each.meta, each.line.dash]));
  caption.replaceChildren(title);
  if (RUNS.length > 1 && styles.size > 1) caption.append(element("small", "  " + [...styles].map(([meta, dash]) => `${DASHES[dash]}: ${meta}`).join(", ")));
  if (note) caption.append(element("small", `: ${note}`));
  const across = x ?? byId("axis").value;
  for (const trace of lines) {
    if (trace.type === "scatter") trace.hovertemplate ??= `${AXES[across] ?? plain(across)} %{x:,.4~g}: ${plain(title)} %{y:.4~g}${unit ? ` ${unit}` : ""}<extra>%{fullData.name}</extra>`;
    if (trace.name) trace.name = plain(trace.name);
  }
  const last = Math.max(...data.flatMap((trace) => (trace.x ?? []).slice(-1)));
  const whole = across === "iterations" && last < 12 && xaxis.type !== "log" ? { dtick: 1 } : {};  // no half iterations
  plot.style.minHeight = `${height}px`;
  const spec = specs.get(plot);
  spec.isFresh = true;
  spec.isDrawn = false;
  spec.sharesX = !x;
  spec.data = data;
  spec.layout = {
    height, hovermode: lines.length > MAX_SHARED_HOVER || lines.some((trace) => trace.type !== "scatter") || x ? "closest" : "x",
    showlegend: lines.length > 1 && (RUNS.length === 1 || data[0].type === "bar") && data[0].type !== "heatmap",
    legend: { orientation: "h", y: -58 / (height - 90), yanchor: "top", font: { size: 11 } },
    xaxis: { title: { text: plain(across), standoff: 4 }, ...whole, ...xaxis }, yaxis: { ...(unit ? { title: { text: unit, standoff: 6 } } : {}), ...yaxis }, ...layout,
  };
  render(plot);
}

/** Removes the plots that `drawing` did not draw, for example of runs that are no longer selected. */
function redraw(drawing) {
  still.clear();
  specs.forEach((spec) => { spec.isFresh = false; });
  drawing();
  for (const [plot, spec] of specs) {
    if (spec.isFresh) continue;
    nearby.unobserve(plot);
    specs.delete(plot);
    plot.closest("figure").remove();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => specs.forEach((spec, plot) => { spec.isDrawn = false; render(plot); }));
