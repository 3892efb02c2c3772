// Plots: each is drawn when it comes near the screen, and the others while the page is idle.
const DASHES = { solid: "solid", dash: "dashed", dot: "dotted" };
const MAX_SHARED_HOVER = 6;  // lines of a plot whose values are shown together

/** Loads Plotly from the compressed script in the page. A browser compiles a file in the background. */
async function loadPlotly() {
  const packed = byId("packed-plotly");
  const unpacked = new Blob([bytesOf(packed.textContent.trim())]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.src = URL.createObjectURL(await new Response(unpacked, { headers: { "Content-Type": "text/javascript" } }).blob());
  packed.remove();
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
  if (plot.classList.toggle("constant", Boolean(spec.text))) {
    Plotly.purge(plot);
    plot.textContent = spec.text;
    return;
  }
  if (!plot.querySelector(".plotly")) plot.replaceChildren();
  Plotly.react(plot, spec.data, themed(spec.layout), { responsive: true, displaylogo: false, displayModeBar: false });
}

/** Draws one of the plots that are not near the screen, so that a picture or a print of the whole page has them. */
function renderNext() {
  const next = [...specs].find(([plot, spec]) => !spec.isDrawn && plot.checkVisibility());
  if (!next) return;
  next[1].isNear = true;
  render(next[0]);
  whenIdle(renderNext);
}

/** Safari has no idle callbacks. */
const whenIdle = (call) => (window.requestIdleCallback ? requestIdleCallback(call, { timeout: 200 }) : setTimeout(call, 50));

/** Draws all plots again, at the width of the paper or of the screen, except those in a closed fold, which have no size. */
function renderAll({ isPrinted = false } = {}) {
  document.body.classList.toggle("printed", isPrinted);
  for (const [plot, spec] of specs) {
    if (!plot.checkVisibility()) continue;
    spec.isNear = true;
    spec.isDrawn = false;
    Object.assign(spec.layout, isPrinted ? { autosize: false, width: plot.clientWidth } : { autosize: true, width: undefined });
    render(plot);
  }
}

const plotly = loadPlotly().then(() => {
  specs.forEach((_, plot) => render(plot));
  whenIdle(renderNext);
});
addEventListener("beforeprint", () => renderAll({ isPrinted: true }));
addEventListener("afterprint", () => renderAll({ isPrinted: false }));

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

/**
 * Draws a plot, or updates the one of this title. `x` names the horizontal axis, `unit` the vertical one; `note` follows
 * the title.
 */
function draw(section, title, data, { x = "iteration", unit = "", note = "", xaxis = {}, yaxis = {}, height = 230, ...layout } = {}) {
  if (!data.length) return;
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
  const text = constantText(lines, unit);
  plot.style.minHeight = text ? "" : `${height}px`;
  const caption = plot.previousSibling;
  const styles = new Map(data.filter((each) => each.meta && each.line).map((each) => [each.meta, each.line.dash]));
  caption.replaceChildren(title);
  if (RUNS.length > 1 && styles.size > 1) caption.append(element("small", "  " + [...styles].map(([meta, dash]) => `${DASHES[dash]}: ${meta}`).join(", ")));
  if (note) caption.append(element("small", `: ${note}`));
  for (const trace of lines) {
    if (trace.type === "scatter") trace.hovertemplate ??= `${plain(x)} %{x:,.4~g}: ${plain(title)} %{y:.4~g}${unit ? ` ${unit}` : ""}<extra>%{fullData.name}</extra>`;
    if (trace.name) trace.name = plain(trace.name);
  }
  const last = Math.max(...data.flatMap((trace) => (trace.x ?? []).slice(-1)));
  const whole = x === "iteration" && last < 12 ? { dtick: 1 } : {};  // no half iterations
  const isShared = lines.length <= MAX_SHARED_HOVER && lines.every((trace) => trace.type === "scatter");
  const spec = specs.get(plot);
  spec.isFresh = true;
  spec.isDrawn = false;
  spec.text = text;
  spec.data = data;
  spec.layout = {
    height,
    hovermode: isShared ? "x" : "closest",
    showlegend: lines.length > 1 && RUNS.length === 1 && data[0].type !== "heatmap",
    legend: { orientation: "h", y: -58 / (height - 90), yanchor: "top", font: { size: 11 } },
    xaxis: { title: { text: plain(x), standoff: 4 }, ...whole, ...xaxis },
    yaxis: { ...(unit ? { title: { text: unit, standoff: 6 } } : {}), ...yaxis },
    ...layout,
  };
  render(plot);
}

/** The values of lines or of a map in words if none of them changes in any iteration, or "". */
function constantText(lines, unit) {
  const parts = [];
  for (const { name, type, y, z } of lines) {
    if (!["scatter", "heatmap"].includes(type)) return "";
    const values = (type === "heatmap" ? z.flat() : y).filter(Number.isFinite);
    if (values.length < 2 || values.some((value) => value !== values[0])) return "";
    parts.push([name, `${number(values[0])}${values[0] && unit ? ` ${unit}` : ""}`]);
  }
  const texts = new Set(parts.map(([, text]) => text));
  if (parts.length > 4 && texts.size > 1) return "";
  if (texts.size === 1) return `${[...texts][0]} in every iteration`;
  return parts.map(([name, text]) => `${name}: ${text}`).join(", ");
}

/** Removes the plots that `drawing` did not draw, for example of runs that are no longer selected. */
function redraw(drawing) {
  specs.forEach((spec) => { spec.isFresh = false; });
  drawing();
  for (const [plot, spec] of specs) {
    if (spec.isFresh) continue;
    nearby.unobserve(plot);
    specs.delete(plot);
    plot.closest("figure").remove();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => specs.forEach((spec, plot) => {
  spec.isDrawn = false;
  render(plot);
}));
