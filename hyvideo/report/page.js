const RUNS = Object.entries(DATA.runs);
const COLOURS = ["#3f7fe0", "#e0862f", "#2fa277", "#c9508b", "#8467d7", "#9a8a3c", "#39a7bd", "#8b95a1"];
const colourOf = (place) => COLOURS[place % COLOURS.length];
// Numbers as in formats.html.j2: scores with three decimals, other quantities with three significant digits.
const minus = (text) => text.replace(/e-(\d)$/, "e-0$1").replaceAll("-", "−");
const number = (value) => (Number.isFinite(value) ? minus(String(Number(value.toPrecision(3)))) : "–");
const format = (value) => {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return "–";
  if (size >= 100) return minus(Math.round(value).toLocaleString("en-US"));
  return minus(!value || size >= 0.1 ? value.toFixed(3) : size < 1e-4 ? value.toExponential(2) : value.toPrecision(3));
};
const signed = (value) => (Math.abs(value) < 0.0005 ? "0.000" : (value > 0 ? "+" : "") + minus(Math.abs(value) < 100 ? value.toFixed(3) : Math.round(value).toLocaleString("en-US")));

/** Link to the file of a video that is shown as a preview. */
function fileLink(entry) {
  return element("a", `full size, ${DATA.originals[entry.clip]}`, { href: entry.file, target: "_blank", rel: "noopener" });
}

function element(tag, text, attributes = {}) {
  const made = Object.assign(document.createElement(tag), attributes);
  if (text !== undefined) made.textContent = text;
  return made;
}

const BACKGROUND = ["scoring", "writing"];  // stages that run beside the others

// --- curves -----------------------------------------------------------------------------------------------------------

function xOf(run, iterations) {
  const axis = byId("axis").value;
  if (axis === "iterations") return iterations;
  if (axis === "rollouts") return iterations.map((iteration) => iteration * run.rollouts);
  const known = run.metrics.iteration || [];
  return iterations.map((iteration) => {
    const place = known.findLastIndex((each) => each <= iteration);
    return place < 0 ? 0 : run.hours[place];
  });
}

/** Traces of one metric by iteration, or by validation, for every run that has it. */
function traces(metric, label, { place = 0, ofValidation = false, dash = "solid", log = false } = {}) {
  const found = [];
  RUNS.forEach(([name, run], number) => {
    const points = ofValidation ? run.validations.filter((each) => metric in each.means) : [];
    const all = ofValidation ? points.map((each) => each.means[metric]) : run.metrics[metric];
    const y = log ? all?.map((value) => (value > 0 ? value : null)) : all;
    if (!y || !y.some(Number.isFinite)) return;
    const iterations = ofValidation ? points.map((each) => each.iteration) : run.metrics.iteration;
    const several = RUNS.length > 1;
    found.push({
      x: xOf(run, iterations), y, type: "scatter", mode: ofValidation || y.length < 3 ? "lines+markers" : "lines",
      name: several ? `${name}: ${label}` : label, meta: label,
      line: { color: colourOf(several ? number : place), width: 2, dash: several && place && !ofValidation ? "dot" : dash },
      marker: { size: ofValidation ? 8 : 5, symbol: dash === "solid" ? "circle" : "diamond" },
    });
  });
  return found;
}

const DASHES = { solid: "solid", dash: "dashed", dot: "dotted" };
const CSS = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Titles and values of the plots whose lines are constant; they are listed in a fold instead. */
const still = new Map();
function isStill(data) {
  const values = (trace) => (trace.type === "scatter" ? trace.y : trace.z?.flat() ?? []).filter(Number.isFinite);
  return data.every((trace) => trace.type !== "bar" && values(trace).length > 2 && Math.max(...values(trace)) - Math.min(...values(trace)) <= 1e-6 * Math.max(...values(trace).map(Math.abs)));
}

function draw(section, title, data, layout = {}, note = "") {
  if (!data.length) return;
  if (isStill(data)) return still.set(title, data.map((trace) => `${data.length > 1 ? trace.name + " " : ""}${number((trace.y ?? trace.z.flat()).find(Number.isFinite))}`).join(", "));
  const box = document.querySelector(section);
  const id = `${section} ${title}`;
  let plot = [...box.querySelectorAll(".plot")].find((each) => each.dataset.of === id);
  if (!plot) {
    const figure = box.appendChild(element("figure"));
    const styles = new Map(data.filter((each) => each.meta && each.line).map((each) => [each.meta, each.line.dash]));
    const caption = figure.appendChild(element("figcaption", title));
    if (RUNS.length > 1 && styles.size > 1) caption.append(element("small", "  " + [...styles].map(([meta, dash]) => `${DASHES[dash]}: ${meta}`).join(", ")));
    if (note) caption.append(element("small", `: ${note}`));
    plot = figure.appendChild(element("div", undefined, { className: "plot" }));
    plot.dataset.of = id;
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${title}: ${data.map((each) => each.name || "values").join(", ")}`);
  }
  const axis = { gridcolor: CSS("--line"), zerolinecolor: CSS("--line"), linecolor: CSS("--line"), automargin: true };
  const { xaxis, yaxis, ...rest } = layout;
  const whole = {
    height: 230, margin: { l: 48, r: 12, t: 10, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: CSS("--ink"), size: 12, family: "system-ui, sans-serif" },
    colorway: COLOURS, hoverlabel: { bgcolor: CSS("--card"), font: { color: CSS("--ink") }, namelength: -1 },
    showlegend: data.length > 1 && (RUNS.length === 1 || data[0].type === "bar") && data[0].type !== "heatmap", legend: { orientation: "h", y: -58 / ((layout.height ?? 230) - 90), yanchor: "top", font: { size: 11 } },
    xaxis: { ...axis, title: { text: byId("axis").value, standoff: 4 }, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
  Plotly.react(plot, data, whole, { responsive: true, displaylogo: false, displayModeBar: false });
}

/** First parts of the names of metrics that every run has, and metrics of the built-in objectives. Others are drawn under their name. */
const OF_RUN = new Set(["advantage", "anchor", "by_step", "cost", "grad", "iteration", "kl", "loss", "lr", "memory", "nft", "perf", "reward", "time", "update", "validation"]);
const DRAWN = new Set(["policy/ratio_mean", "policy/ratio_max_deviation", "policy/ratio_first_deviation", "policy/clip_fraction", "policy/log_prob"]);

function drawCurves() {
  const names = [...new Set(RUNS.flatMap(([, run]) => Object.keys(run.metrics)))];
  const held = [...new Set(RUNS.flatMap(([, run]) => run.validations.flatMap((each) => Object.keys(each.means))))];
  const dimensions = names.filter((name) => name.startsWith("reward/")).map((name) => name.slice(7));
  const scored = dimensions.filter((name) => !["mean", "std", "missing", "overall", "Overall"].includes(name));
  const pair = (training, validation) => [
    ...traces(training, "rollouts"), ...traces(validation, "validation", { place: 1, ofValidation: true, dash: RUNS.length > 1 ? "dash" : "solid" }),
  ];
  const unseen = traces("unseen/reward", "validation, unseen prompts", { place: 2, ofValidation: true, dash: "dot" });
  draw(".curve", "Reward", [...pair("reward/mean", "reward"), ...unseen], { height: RUNS.length > 1 ? 330 : 385 });
  for (const name of scored) {
    const truth = held.includes(`true/${name}`) ? traces(`true/${name}`, "true reward", { place: 2, ofValidation: true, dash: "dot" }) : [];
    draw("#rewards .plots", name, [...pair(`reward/${name}`, name), ...truth]);
  }
  const both = (first, second, options = {}) => [...traces(...first, options), ...traces(...second, { place: 1, ...options })];
  const log = { yaxis: { type: "log", exponentformat: "power", nticks: 5 } };
  draw("#trust .plots", "KL", both(["kl/position", "to the anchor"], ["kl/velocity", "to the rollout policy"], { log: true }), log, RUNS.some(([, run]) => run.moves) ? "falls to 0 when the anchor moves" : "");
  draw("#trust .plots", "KL coefficient", traces("kl/coef", "coefficient"));
  draw("#trust .plots", "Clip fraction", traces("policy/clip_fraction", "clipped"), { yaxis: { rangemode: "tozero" } });
  draw("#trust .plots", "Gradient norm", traces("grad/norm", "norm before clipping"), { yaxis: { rangemode: "tozero" } });
  draw("#trust .plots", "Largest deviation of a ratio from 1", both(["policy/ratio_max_deviation", "all updates"], ["policy/ratio_first_deviation", "first update"]));
  draw("#trust .plots", "Velocity error", traces("nft/error", "mean square"), { yaxis: { rangemode: "tozero" } });
  draw("#trust .plots", "Velocity distance to the rollout policy", both(["nft/distance_max", "largest"], ["nft/distance", "mean"]));
  draw("#trust .plots", "Clipped advantages", traces("nft/advantage_clipped", "fraction"), { yaxis: { rangemode: "tozero" } });
  for (const name of names.filter((each) => !OF_RUN.has(each.split("/")[0]) && !DRAWN.has(each))) draw("#trust .plots", name, traces(name, name));
  draw("#trust .plots", "Loss", both(["loss/policy", "policy"], ["loss/total", "total"]), { yaxis: { exponentformat: "power" } });
  const toZero = { yaxis: { rangemode: "tozero" } };
  draw("#health .plots", "Standard deviation of the reward within a group", traces("reward/std", "standard deviation"), toZero);
  draw("#health .plots", "Zero groups", traces("advantage/zero_groups", "groups"), toZero);
  const where = (found) => found.filter((each) => each.y.some((value) => value > 0));
  draw("#health .plots", "Failed rewards", where(traces("reward/missing", "rollouts")), toZero);
  draw("#health .plots", "Skipped updates", where(traces("update/skipped", "updates")), toZero);
  draw("#cost .plots", "Peak memory, GiB", traces("memory/peak_gib", "peak"), toZero);
  draw("#cost .plots", "Forward passes per rollout", traces("cost/forwards", "forward passes"), toZero);
  draw("#cost .plots", "Seconds per iteration", traces("time/iteration", "seconds"), toZero);
  drawShifts();
  drawDetails();
  drawPareto();
  byId("still").hidden = !still.size;
  byId("still").firstChild.textContent = `${still.size} ${still.size === 1 ? "measure" : "measures"} did not move`;
  byId("still").lastChild.replaceChildren(...[...still].map(([title, value]) => element("li", `${title}: ${value}`)));
}

function drawShifts() {
  const data = [], near = [];
  RUNS.forEach(([name, run], number) => {
    const measures = [...new Set(run.validations.flatMap((each) => Object.keys(each.shifts)))];
    measures.forEach((measure) => {
      const points = run.validations.filter((each) => measure in each.shifts);
      const y = points.map((each) => each.shifts[measure]), isNear = y.some((value) => Math.abs(value) > 0.5);
      const label = RUNS.length > 1 ? `${name}: ${measure}` : measure;
      const place = near.indexOf(measure) < 0 && isNear ? near.push(measure) - 1 : near.indexOf(measure);
      data.push({
        x: xOf(run, points.map((each) => each.iteration)), y, type: "scatter", mode: "lines+markers", name: label, showlegend: isNear, opacity: isNear ? 1 : 0.55,
        line: { color: isNear ? colourOf(RUNS.length > 1 ? number : place) : "#9aa3ad", width: isNear ? 2.5 : 1, dash: isNear && RUNS.length > 1 ? ["solid", "dash", "dot", "dashdot"][place % 4] : "solid" }, marker: { size: isNear ? 7 : 4 },
      });
    });
  });
  data.sort((a, b) => a.showlegend - b.showlegend);  // the highlighted lines above
  const limit = (y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: CSS("--suspect"), dash: "dash", width: 1.5 } });
  draw("#held-out .plots", "Shift relative to the limit", data, { shapes: [limit(1), limit(-1)], height: 380, showlegend: true, yaxis: { zeroline: true } });
}

// --- trained reward against what is held out -------------------------------------------------------------------------

/** Held-out scores of which more is better, each with its value and the reward's: of a validation's means. */
function heldOutScores() {
  const names = new Set(RUNS.flatMap(([, run]) => run.validations.flatMap((each) => Object.keys(each.means))));
  const weights = Object.assign({}, ...RUNS.map(([, run]) => run.weights));
  const truths = Object.keys(weights).filter((name) => weights[name] && names.has(`true/${name}`));
  const found = new Map();
  if (truths.length) found.set("true reward", (means, run) => truths.reduce((sum, name) => sum + (run?.weights ?? weights)[name] * means[`true/${name}`], 0));
  const others = [...names].sort((a, b) => (a === "unseen/reward") - (b === "unseen/reward")).filter((name) => !weights[name] && !/^(reward|reward_std|missing|Overall|seen\/reward|frechet_distance|true\/.*|held_out\/[^\/]*)$/.test(name));
  for (const name of others) if (names.has(name)) found.set(name, (means) => means[name]);
  return found;
}

function drawPareto() {
  const found = heldOutScores(), select = byId("held");
  byId("pareto").hidden = !found.size;
  if (!found.size) return;
  if (!select.length) for (const name of found.keys()) select.append(element("option", name));
  const name = select.value, value = found.get(name), isUnseen = name === "unseen/reward";
  const reward = isUnseen ? "seen/reward" : "reward";
  const lines = RUNS.map(([run, { validations, weights }], place) => {
    const points = validations.filter(({ means }) => Number.isFinite(means[reward]) && Number.isFinite(value(means, { weights })));
    return {
      type: "scatter", mode: "lines+markers", name: run, x: points.map(({ means }) => means[reward]), y: points.map(({ means }) => value(means, { weights })), text: points.map(({ iteration }) => `iteration ${iteration}`),
      line: { color: colourOf(place), width: 1.5 }, marker: { size: points.map(({ iteration }) => (iteration ? 8 : 11)), symbol: points.map(({ iteration }) => (iteration ? "circle" : "x")) },
      hovertemplate: `${reward} %{x:.3f}, ${name} %{y:.3f}, %{text}<extra></extra>`,
    };
  });
  const policies = Object.entries(DATA.scores).filter(([each]) => !(each in DATA.runs) && !each.startsWith("base model"));
  policies.forEach(([policy, scores], place) => {
    const means = Object.fromEntries(Object.entries(scores).map(([score, { mean }]) => [score, mean]));
    if (Number.isFinite(means[reward]) && Number.isFinite(value(means)))
      lines.push({ type: "scatter", mode: "markers", name: policy, x: [means[reward]], y: [value(means)], marker: { size: 12, symbol: "star", color: colourOf(RUNS.length + place) }, hovertemplate: `${reward} %{x:.3f}, ${name} %{y:.3f}<extra></extra>` });
  });
  const points = lines.flatMap(({ x, y }) => x.map((each, place) => [each, y[place]]));
  const front = points.filter(([x, y]) => !points.some(([a, b]) => a >= x && b >= y && (a > x || b > y))).sort((a, b) => a[0] - b[0]);
  lines.push({ type: "scatter", mode: "lines", name: "Pareto front", x: front.map(([x]) => x), y: front.map(([, y]) => y), line: { color: CSS("--quiet"), dash: "dot", width: 2, shape: "vh" }, hoverinfo: "skip" });
  draw("#pareto .plots", "Trained reward and held-out score", lines.filter(({ x }) => x.length), { height: 380, showlegend: true, xaxis: { title: { text: `${reward} (trained)` } }, yaxis: { title: { text: `${name} (held out)` } } });
}

/** Plots of one run at a time: heat maps and stages. */
function drawDetails() {
  const run = DATA.runs[byId("run") ? byId("run").value : RUNS[0][0]];
  const x = xOf(run, run.metrics.iteration || []);
  const maps = [["by_step/ratio_mean", "Mean ratio", { colorscale: "RdBu", zmid: 1 }], ["by_step/ratio_max_deviation", "Largest deviation of a ratio from 1", { colorscale: "Cividis" }], ["by_step/kl", "KL", { colorscale: "Cividis" }]];
  document.querySelectorAll("#steps .plots figure, #cost figure.stages, #timeline figure").forEach((figure) => figure.remove());
  for (const [metric, title, scale] of maps) {
    const rows = (run.metrics[metric] || []).map((row) => row || []);
    const steps = Math.max(0, ...rows.map((row) => row.length));
    if (!steps) continue;
    const z = Array.from({ length: steps }, (_, step) => rows.map((row) => row[step] ?? null));
    const map = { type: "heatmap", x, z, ...scale, hoverongaps: false, colorbar: { thickness: 12, outlinewidth: 0, exponentformat: "power" }, hovertemplate: "%{x}, step %{y}: %{z:.4g}<extra></extra>" };
    draw("#steps .plots", title, [map], { height: 280, xaxis: { showgrid: false }, yaxis: { title: { text: "denoising step" }, autorange: "reversed", dtick: steps > 20 ? 5 : 1, showgrid: false } });
  }
  if (!document.querySelector("#steps figure") && !document.querySelector("#steps .plots p"))
    document.querySelector("#steps .plots").append(element("p", "No metrics by step: the objective trains noise levels or reports none, and older runs did not record them.", { className: "quiet" }));
  const stages = Object.keys(run.metrics).filter((name) => name.startsWith("time/") && !["time/iteration", "time/since_start", "time/scoring"].includes(name));
  const bars = stages.map((name) => ({ type: "bar", name: name.slice(5), x, y: run.metrics[name], marker: { line: { width: 0 } } }));
  drawStages("Seconds by stage", bars, { barmode: "stack", bargap: 0.1, height: 280 });
  const rates = (prefix) => Object.keys(run.metrics).filter((name) => name.startsWith(prefix)).map((name, place) => (
    { x, y: run.metrics[name], type: "scatter", mode: x.length < 3 ? "lines+markers" : "lines", name: name.slice(prefix.length), line: { color: colourOf(place), width: 2 } }
  ));
  const toZero = { yaxis: { rangemode: "tozero" }, height: 280 };
  drawStages("TFLOP/s of a rank, without recomputation", rates("perf/tflops/"), toZero);
  drawStages("MFU: share of the GPU's peak", rates("perf/mfu/"), toZero);
  if (run.timeline) drawTimeline(run.timeline);
}

/** A plot of the section on cost that `drawDetails` removes before it draws another run. */
function drawStages(title, data, layout) {
  draw("#cost .plots", title, data, layout);
  if (data.length) [...document.querySelectorAll("#cost > .plots:first-of-type figure")].at(-1).classList.add("stages");
}

/** Stages of one iteration, one row each, in the order of their first start. */
function drawTimeline({ iteration, spans }) {
  const ordered = [...spans].sort((a, b) => a[1] - b[1]);
  const rows = [...new Set(ordered.map(([stage]) => stage))];
  const bars = [["one after the other", (stage) => !BACKGROUND.includes(stage)], ["in the background", (stage) => BACKGROUND.includes(stage)]].map(([name, isIn], place) => {
    const own = ordered.filter(([stage]) => isIn(stage));
    return {
      type: "bar", orientation: "h", name, meta: name, y: own.map(([stage]) => stage), base: own.map(([, start]) => start), x: own.map(([, start, end]) => end - start),
      marker: { color: colourOf(place), line: { color: CSS("--card"), width: 1 } }, hovertemplate: "%{y}: %{x:.3g} s, from %{base:.3g} s<extra></extra>",
    };
  }).filter((each) => each.y.length);
  const seconds = (stage) => number(Number(spans.reduce((sum, [each, start, end]) => sum + (each === stage) * (end - start), 0).toFixed(2)));
  draw("#timeline", "Timeline of one iteration", bars, {
    barmode: "overlay", bargap: 0.25, height: 110 + 24 * rows.length, legend: { orientation: "h", y: -56 / (24 * rows.length), yanchor: "top", font: { size: 11 } },
    xaxis: { title: { text: `seconds since the start of iteration ${iteration}`, standoff: 4 }, rangemode: "tozero" },
    yaxis: { categoryorder: "array", categoryarray: rows, tickvals: rows, ticktext: rows.map((stage) => `${stage}, ${seconds(stage)} s`), autorange: "reversed", showgrid: false },
  });
}

// --- videos -----------------------------------------------------------------------------------------------------------

const urls = new Map();
function clipUrl(digest) {
  if (!urls.has(digest)) {
    const bytes = Uint8Array.from(atob(DATA.clips[digest]), (letter) => letter.charCodeAt(0));
    urls.set(digest, URL.createObjectURL(new Blob([bytes], { type: "video/mp4" })));
  }
  return urls.get(digest);
}

function player(digest, label) {
  const clip = element("video", undefined, { muted: true, playsInline: true, preload: "auto", tabIndex: 0 });
  clip.dataset.clip = digest;
  clip.setAttribute("aria-label", label);
  clip.setAttribute("muted", "");
  return clip;
}

/** Videos of the same prompt, seed and number in all runs. */
function comparedVideos() {
  const found = new Map();
  RUNS.forEach(([, run], place) => {
    for (const video of run.videos) {
      const { prompt, seed, number } = video.before || video.after;
      const key = JSON.stringify([prompt, seed, number]);
      if (!found.has(key)) found.set(key, { prompt, seed, number, drawn: video.drawn, of: RUNS.map(() => null) });
      found.get(key).of[place] = video;
    }
  });
  for (const video of found.values()) {
    const gains = video.of.filter((each) => each && Number.isFinite(each.gain)).map((each) => each.gain);
    video.gain = gains.length ? gains.reduce((a, b) => a + b) / gains.length : NaN;
    video.clips = [];
    video.of.forEach((each, place) => {
      const isShown = (entry, title) => video.clips.some((clip) => clip.title === title && clip.entry.clip === entry.clip);  // the base of several runs
      const add = (entry, title) => entry && entry.clip && !isShown(entry, title) && video.clips.push({ entry, title });
      if (!each) return;
      add(each.before, "before");
      add(each.after, RUNS.length > 1 ? RUNS[place][0] : "after");
    });
  }
  return [...found.values()];
}

const VIDEOS = comparedVideos();
const ORDERS = {
  drawn: (a, b) => a.drawn - b.drawn,
  worst: (a, b) => a.gain - b.gain,
  best: (a, b) => b.gain - a.gain,
  number: (a, b) => a.number - b.number,
};
let shown = 6;

function gainText(gain) {
  return Number.isFinite(gain) ? element("b", signed(gain), { className: gain < 0 ? "down" : "up" }) : element("span", "no gain available");
}

function scoresOf(entry) {
  const others = ["number", "seed", "iteration", "group", "member", "reward", "advantage", "Overall"];
  return Object.keys(entry).filter((name) => Number.isFinite(entry[name]) && !others.includes(name));
}

function card(video) {
  const made = element("article");
  made.append(element("h3", video.prompt));
  const clips = made.appendChild(element("div", undefined, { className: "clips" }));
  clips.style.setProperty("--clips", Math.min(5, video.clips.length));
  for (const { entry, title } of video.clips) {
    const figure = clips.appendChild(element("figure"));
    const caption = element("figcaption", `${title}: ${format(entry.reward ?? NaN)}`);
    if (entry.clip in DATA.originals) caption.append(" ", fileLink(entry));
    figure.append(player(entry.clip, `${title}: ${video.prompt}`), caption);
  }
  video.of.forEach((each, place) => {
    if (!each) return;
    const line = made.appendChild(element("p", RUNS.length > 1 ? `${RUNS[place][0]} ` : "", { className: "chips" }));
    const chip = (name, value) => line.appendChild(element("span", `${name} `)).append(value);
    chip("reward", gainText(each.gain));
    if (!each.before || !each.after) return;
    for (const name of scoresOf(each.after)) {
      if (Number.isFinite(each.before[name])) chip(name, signed(each.after[name] - each.before[name]));
    }
  });
  made.append(element("small", `seed ${video.seed}, video ${video.number}`));
  inStep(made);
  return made;
}

function drawGallery() {
  const kept = VIDEOS.filter((video) => video.clips.length).sort(ORDERS[byId("order").value]);
  visible.disconnect();
  byId("gallery").replaceChildren(...kept.slice(0, shown).map(card));
  document.querySelectorAll(".gallery article").forEach((each) => visible.observe(each));
  byId("more").hidden = kept.length <= shown;
}

/** A few randomly selected videos beside the verdict. */
function drawGlance() {
  const kept = VIDEOS.filter((video) => video.clips.length).sort(ORDERS.drawn);
  document.querySelector(".glance").replaceChildren(...kept.slice(0, RUNS.length > 2 ? 2 : RUNS.length > 1 ? 3 : 4).map(card));
}

function drawGains() {
  const data = RUNS.map(([name, run], place) => {
    const known = run.videos.filter((video) => Number.isFinite(video.gain)).sort((a, b) => a.gain - b.gain);
    const colour = RUNS.length > 1 ? colourOf(place) : known.map((video) => CSS(video.gain < 0 ? "--worse" : "--better"));
    const text = known.map((video) => video.before.prompt.replace(/[<>&]/g, (letter) => `&#${letter.charCodeAt(0)};`));
    return { type: "bar", name, y: known.map((video) => video.gain), text, textposition: "none", hovertemplate: "%{y:+.3f} %{text}<extra></extra>", marker: { color: colour, line: { width: 0 } } };
  }).filter((each) => each.y.length);
  draw("#gains", "Gain of each validation video, sorted", data, { xaxis: { title: { text: "videos, smallest gain first" }, showticklabels: false, showgrid: false, zeroline: false }, bargap: 0.05 });
  const table = byId("prompts");
  const head = table.createTHead().insertRow();
  for (const name of ["Prompt", ...RUNS.flatMap(([name]) => ["before", "after", "gain"].map((what) => (RUNS.length > 1 ? `${name} ${what}` : what)))]) head.append(element("th", name, { scope: "col" }));
  const body = table.createTBody();
  for (const video of VIDEOS.sort(ORDERS.worst).slice(0, 500)) {
    const row = body.insertRow();
    row.append(element("th", video.prompt, { scope: "row" }));
    for (const each of video.of) {
      const numbers = each ? [each.before?.reward, each.after?.reward] : [undefined, undefined];
      for (const value of numbers) row.insertCell().textContent = format(value ?? NaN);
      row.insertCell().append(gainText(each?.gain ?? NaN));
    }
  }
}

/** Videos of folders, the same prompt, image and seed side by side. */
function drawFolders() {
  byId("matched").append(...DATA.rows.map((row) => {
    const first = row.find(Boolean), made = element("article");
    made.append(element("h3", first.prompt));
    const clips = made.appendChild(element("div", undefined, { className: "clips" }));
    clips.style.setProperty("--clips", Math.min(5, row.length));
    row.forEach((video, place) => {
      const figure = clips.appendChild(element("figure"));
      const caption = element("figcaption", DATA.folders[place].replace(/[/_]/g, "$&\u200b"));
      if (video?.clip in DATA.originals) caption.append(" ", fileLink(video));
      figure.append(video?.clip ? player(video.clip, `${DATA.folders[place]}: ${video.prompt}`) : element("p", video ? "cannot be read" : "no such video", { className: "quiet" }), caption);
    });
    made.append(element("small", `seed ${first.seed ?? "–"}${first.image && first.image !== "–" ? `, image ${first.image}` : ""}`));
    inStep(made);
    visible.observe(made);
    return made;
  }));
}

// --- the page ---------------------------------------------------------------------------------------------------------

document.querySelectorAll(".swatch").forEach((each) => {
  each.style.background = colourOf(RUNS.findIndex(([name]) => name === each.dataset.run));
});
if (RUNS.length) {
  byId("held").addEventListener("change", drawPareto);
  byId("axis").addEventListener("change", drawCurves);
  byId("run")?.addEventListener("change", drawDetails);
  byId("order").addEventListener("change", drawGallery);
  byId("play").addEventListener("click", togglePlay);
  byId("more").addEventListener("click", () => { shown += 12; drawGallery(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCurves);
  drawGlance();
  drawGallery();
  drawGains();
  drawCurves();
}
document.body.style.setProperty("--clips", Math.min(5, Math.max(DATA.folders.length, ...VIDEOS.map((video) => video.clips.length))));
if (DATA.rows.length) drawFolders();
