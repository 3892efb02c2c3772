// Curves of the report: rewards, trust region, health and cost over training.
const NO_CURVE = /^(iteration|update|validation\/|time\/|perf\/)/;  // metrics that have a plot of another kind, or none

/** Options of a curve over training: logarithmic axes, if they are selected and the values allow it. */
function axes(data, options = {}) {
  const isPositive = data.every((trace) => trace.y.every((value) => value > 0));
  const y = byId("log-y").checked && isPositive ? { type: "log", rangemode: "normal", exponentformat: "power" } : {};
  const x = byId("log-x").checked ? { type: "log" } : {};
  return { ...options, xaxis: { ...options.xaxis, ...x }, yaxis: { ...options.yaxis, ...y } };
}

/** Lines that a legend may name without taking the room of the plot; a hover names them too. */
const mostInLegend = () => (innerWidth < 600 ? 4 : RUNS.length > 1 ? 6 : 12);

const drawnMetrics = new Set();  // names of the metrics that have a plot

function curve(section, title, data, options) {
  draw(section, title, data, axes(data, options));
}

function drawCurves() {
  redraw(() => {
    drawnMetrics.clear();
    drawRewards();
    drawTrust();
    drawHealth();
    drawShifts();
    drawDetails();
    drawPareto();
    drawGains();
    drawOthers();
  });
  byId("still").hidden = !still.size;
  byId("still").firstChild.textContent = `${still.size} ${still.size === 1 ? "measure" : "measures"} did not move`;
  byId("still").lastChild.replaceChildren(...[...still].map(([title, value]) => element("li", `${title}: ${value}`)));
}

const metricNames = () => [...new Set(shownRuns().flatMap(([, run]) => Object.keys(run.metrics)))];
const validationNames = () => [...new Set(shownRuns().flatMap(([, run]) => Object.keys(run.validations.means)))];

/** Traces of the metrics with these ends of names, whatever objective wrote them, each with its label. */
function ending(labels, options = {}) {
  const names = metricNames();
  return Object.entries(labels).flatMap(([end, label], place) => names.filter((name) => name === end || name.endsWith(`/${end}`)).flatMap((name) => {
    drawnMetrics.add(name);
    return traces(name, label, { place, ...options });
  }));
}

function drawRewards() {
  const held = validationNames(), rewards = linesByReward(), several = rewards.size > 1;
  byId("rewards-differ").hidden = !several;
  byId("rewards-differ").textContent = `These runs were trained with ${rewards.size} different rewards. Their values cannot be compared, so each reward has its own plots.`;
  const dimensions = metricNames().filter((name) => name.startsWith("reward/")).map((name) => name.slice(7));
  const scored = dimensions.filter((name) => !["mean", "std", "missing", "overall", "Overall"].includes(name));
  for (const name of dimensions) drawnMetrics.add(`reward/${name}`);
  for (const name of ["reward", "unseen/reward", ...scored, ...scored.map((each) => `true/${each}`)]) drawnMetrics.add(`validation/${name}`);
  for (const [reward, of] of rewards) {
    const title = (text) => (several ? `${text}, ${reward}` : text);
    const dashed = { of, place: 1, ofValidation: true, dash: RUNS.length > 1 ? "dash" : "solid" };
    const pair = (training, validation) => [...traces(training, "rollouts", { of }), ...traces(validation, "validation", dashed)];
    const unseen = traces("unseen/reward", "validation, unseen prompts", { of, place: 2, ofValidation: true, dash: "dot" });
    curve(".curve", title("Reward"), [...pair("reward/mean", "reward"), ...unseen], { height: RUNS.length > 1 ? 330 : 385, unit: "reward", note: isGrouped() ? "mean over the seeds; the band is from the lowest to the highest" : "" });
    for (const name of scored) {
      const truth = held.includes(`true/${name}`) ? traces(`true/${name}`, "true reward", { of, place: 2, ofValidation: true, dash: "dot" }) : [];
      curve("#rewards .plots", title(name), [...pair(`reward/${name}`, name), ...truth], { unit: "score" });
    }
    const within = traces("reward/std", "standard deviation", { of });
    curve("#health .plots", title("Standard deviation of the reward within a group"), within, { unit: "reward", yaxis: { rangemode: "tozero" } });
  }
}

function drawTrust() {
  const toZero = { rangemode: "tozero" };
  const log = { type: "log", exponentformat: "power", nticks: 5 };
  const moves = shownRuns().some(([, run]) => run.moves);
  const kl = ending({ position: "to the anchor", velocity: "to the rollout policy" }, { log: true });
  draw("#trust .plots", "KL", kl, { unit: "per element", yaxis: log, xaxis: byId("log-x").checked ? { type: "log" } : {}, note: moves ? "falls to 0 when the anchor moves" : "" });
  curve("#trust .plots", "KL coefficient", ending({ "kl/coef": "coefficient" }));
  curve("#trust .plots", "Clip fraction", ending({ clip_fraction: "clipped" }), { unit: "fraction of terms", yaxis: toZero });
  curve("#trust .plots", "Gradient norm", ending({ "grad/norm": "norm before clipping" }), { yaxis: toZero });
  curve("#trust .plots", "Largest deviation of a ratio from 1", ending({ ratio_max_deviation: "all updates", ratio_first_deviation: "first update" }));
  curve("#trust .plots", "Loss", ending({ "loss/policy": "policy", "loss/total": "total" }), { yaxis: { exponentformat: "power" }, note: "does not measure progress: around 0 with one update per iteration" });
}

function drawHealth() {
  const toZero = { rangemode: "tozero" };
  const where = (found) => found.filter((each) => each.y.some((value) => value > 0));
  curve("#health .plots", "Zero groups", ending({ zero_groups: "groups" }), { unit: "groups", yaxis: toZero });
  curve("#health .plots", "Failed rewards", where(ending({ "reward/missing": "rollouts" })), { unit: "rollouts", yaxis: toZero });
  curve("#health .plots", "Skipped updates", where(ending({ "update/skipped": "updates" })), { unit: "updates", yaxis: toZero });
  curve("#cost .plots", "Peak memory", ending({ peak_gib: "peak" }), { unit: "GiB", yaxis: toZero });
  curve("#cost .plots", "Forward passes per rollout", ending({ "cost/forwards": "forward passes" }), { yaxis: toZero });
  curve("#cost .plots", "Time per iteration", traces("time/iteration", "seconds"), { unit: "s", yaxis: toZero });
}

/** Metrics without a plot above, so that a new objective or scorer needs no change of this page. */
function drawOthers() {
  for (const name of metricNames()) if (!drawnMetrics.has(name) && !NO_CURVE.test(name)) curve("#others .plots", name, traces(name, name));
  for (const name of validationNames()) {
    if (drawnMetrics.has(`validation/${name}`)) continue;
    curve("#others .plots", `validation/${name}`, traces(name, "validation", { ofValidation: true }));
  }
  byId("others").hidden = !document.querySelector("#others figure");
}

function drawShifts() {
  const data = [], near = [];
  for (const [name, run] of shownRuns()) {
    const { iteration, shifts } = run.validations;
    for (const [measure, values] of Object.entries(shifts)) {
      const kept = values.flatMap((value, place) => (Number.isFinite(value) ? [place] : []));
      const y = kept.map((place) => values[place]), isNear = y.some((value) => Math.abs(value) > 0.5);
      const label = RUNS.length > 1 ? `${name}: ${measure}` : measure;
      const place = near.indexOf(measure) < 0 && isNear ? near.push(measure) - 1 : near.indexOf(measure);
      const colour = RUNS.length > 1 ? colourOfRun(name) : colourOf(place);
      data.push({
        x: xOf(run, kept.map((each) => iteration[each])), y, type: "scatter", mode: "lines+markers", name: label, showlegend: isNear, opacity: isNear ? 1 : 0.55,
        line: { color: isNear ? colour : "#9aa3ad", width: isNear ? 2.5 : 1, dash: isNear && RUNS.length > 1 ? ["solid", "dash", "dot", "dashdot"][place % 4] : "solid" }, marker: { size: isNear ? 7 : 4 },
      });
    }
  }
  data.sort((a, b) => a.showlegend - b.showlegend);  // the highlighted lines above
  const limit = (y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y });
  const hasLegend = data.filter((each) => each.showlegend).length <= mostInLegend();
  draw("#held-out .plots", "Shift relative to the limit", data, { shapes: [limit(1), limit(-1)], height: 380, showlegend: hasLegend, yaxis: { zeroline: true }, unit: "allowed shifts", hovermode: "closest" });
}

// --- trained reward against what is held out -------------------------------------------------------------------------

/** Held-out scores of which more is better, each as a function of the values of a validation and a run. */
function heldOutScores() {
  const names = new Set(validationNames());
  const weights = Object.assign({}, ...shownRuns().map(([, run]) => run.weights));
  const truths = Object.keys(weights).filter((name) => weights[name] && names.has(`true/${name}`));
  const found = new Map();
  if (truths.length) found.set("true reward", (of, run) => truths.reduce((sum, name) => sum + (run?.weights ?? weights)[name] * of(`true/${name}`), 0));
  const others = [...names].sort((a, b) => (a === "unseen/reward") - (b === "unseen/reward")).filter((name) => !weights[name] && !/^(reward|reward_std|missing|Overall|seen\/reward|frechet_distance|true\/.*|held_out\/[^\/]*)$/.test(name));
  for (const name of others) found.set(name, (of) => of(name));
  return found;
}

function drawPareto() {
  const found = heldOutScores(), select = byId("held");
  byId("pareto").hidden = !found.size;
  if (!found.size) return;
  fillSelect(select, [...found.keys()]);
  const name = select.value, value = found.get(name), isUnseen = name === "unseen/reward";
  const rewards = new Map();
  for (const [run, content] of shownRuns()) rewards.set(content.reward, [...(rewards.get(content.reward) ?? []), [run, content]]);
  for (const [trained, runs] of rewards) drawFront(runs, rewards.size > 1 ? trained : "", isUnseen ? "seen/reward" : "reward", name, value);
}

/** Reward and held-out score of runs with the same reward. */
function drawFront(runs, trained, reward, name, value) {
  const data = runs.map(([run, content]) => {
    const { iteration, means } = content.validations, at = (place) => (each) => means[each]?.[place];
    const places = iteration.map((_, place) => place).filter((place) => Number.isFinite(means[reward]?.[place]) && Number.isFinite(value(at(place), content)));
    return {
      type: "scatter", mode: "lines+markers", name: run, x: places.map((place) => means[reward][place]), y: places.map((place) => value(at(place), content)), text: places.map((place) => `iteration ${iteration[place]}`),
      line: { color: colourOfRun(run), width: 1.5 }, marker: { size: places.map((place) => (iteration[place] ? 8 : 11)), symbol: places.map((place) => (iteration[place] ? "circle" : "x")) },
      hovertemplate: `${reward} %{x:.3f}, ${plain(name)} %{y:.3f}, %{text}<extra>%{fullData.name}</extra>`,
    };
  });
  const policies = trained ? [] : Object.entries(DATA.scores).filter(([each]) => !(each in DATA.runs) && !each.startsWith("base model"));
  policies.forEach(([policy, scores], place) => {
    const of = (each) => scores[each]?.mean;
    if (!Number.isFinite(of(reward)) || !Number.isFinite(value(of))) return;
    data.push({ type: "scatter", mode: "markers", name: policy, x: [of(reward)], y: [value(of)], marker: { size: 12, symbol: "star", color: colourOf(RUNS.length + place) }, hovertemplate: `${reward} %{x:.3f}, ${plain(name)} %{y:.3f}<extra>%{fullData.name}</extra>` });
  });
  const points = data.flatMap(({ x, y }) => x.map((each, place) => [each, y[place]]));
  const front = [];
  for (const [x, y] of points.sort((a, b) => b[0] - a[0] || b[1] - a[1])) if (!front.length || y > front[0][1]) front.unshift([x, y]);
  data.push({ type: "scatter", mode: "lines", name: "Pareto front", x: front.map(([x]) => x), y: front.map(([, y]) => y), line: { color: CSS("--quiet"), dash: "dot", width: 2, shape: "vh" }, hoverinfo: "skip" });
  draw("#pareto .plots", trained ? `Trained reward and held-out score, ${trained}` : "Trained reward and held-out score", data.filter(({ x }) => x.length), { height: 380, showlegend: data.length <= mostInLegend(), x: `${reward} (trained)`, yaxis: { title: { text: `${plain(name)} (held out)` } } });
}

// --- plots of one run at a time ---------------------------------------------------------------------------------------

function drawDetails() {
  const [name] = shownRuns().length ? shownRuns()[0] : RUNS[0], run = DATA.runs[byId("run")?.value || name];
  drawSteps(run);
  drawHistograms(run);
  const x = xOf(run, run.metrics.iteration || []), several = RUNS.length > 1 ? "of the selected run" : "";
  const of = (prefix, isOmitted) => Object.keys(run.metrics).filter((each) => each.startsWith(prefix) && !isOmitted?.includes(each));
  const stages = of("time/", ["time/iteration", "time/since_start", "time/scoring"]);
  const bars = stages.map((each, place) => ({ type: "bar", name: each.slice(5), x, y: run.metrics[each], marker: { color: colourOf(place), line: { width: 0 } }, hovertemplate: `${AXES[byId("axis").value]} %{x}: ${plain(each.slice(5))} %{y:.3~g} s<extra></extra>` }));
  draw("#cost .plots", "Time by stage", bars, { barmode: "stack", bargap: 0.1, height: 280, unit: "s", note: several });
  const rates = (prefix) => of(prefix).map((each, place) => ({ x, y: run.metrics[each], type: "scatter", mode: x.length < 3 ? "lines+markers" : "lines", name: each.slice(prefix.length), line: { color: colourOf(place), width: 2 } }));
  const options = { yaxis: { rangemode: "tozero" }, height: 280, showlegend: true };
  draw("#cost .plots", "TFLOP/s of a rank, without recomputation", rates("perf/tflops/"), { ...options, unit: "TFLOP/s", note: several });
  draw("#cost .plots", "MFU: share of the GPU's peak", rates("perf/mfu/"), { ...options, note: several });
  if (run.timeline) drawTimeline("#timeline", run.timeline);
}

function drawSteps(run) {
  const x = xOf(run, run.columns.iteration || []);
  const maps = [["by_step/ratio_mean", "Mean ratio", { colorscale: "RdBu", zmid: 1 }], ["by_step/ratio_max_deviation", "Largest deviation of a ratio from 1, by step", { colorscale: "Cividis" }], ["by_step/kl", "KL, by step", { colorscale: "Cividis" }]];
  for (const [metric, title, scale] of maps) {
    const rows = run.columns[metric] || [];
    const steps = Math.max(0, ...rows.map((row) => row.length));
    if (!steps) continue;
    const z = Array.from({ length: steps }, (_, step) => rows.map((row) => row[step] ?? null));
    const map = { type: "heatmap", x, z, ...scale, hoverongaps: false, colorbar: { thickness: 12, outlinewidth: 0, exponentformat: "power" }, hovertemplate: `${AXES[byId("axis").value]} %{x}, step %{y}: %{z:.4g}<extra></extra>` };
    draw("#steps .plots", title, [map], { height: 280, xaxis: { showgrid: false }, yaxis: { title: { text: "denoising step" }, autorange: "reversed", dtick: steps > 20 ? 5 : 1, showgrid: false } });
  }
  byId("no-steps").hidden = Boolean(document.querySelector("#steps figure"));
}

const HISTOGRAMS = { "quantiles/reward": ["Rewards of the rollouts", "reward"], "quantiles/advantage": ["Advantages of the rollouts", "advantage"] };
const BINS = 40;

/** Histogram of each iteration, from its evenly spaced quantiles. */
function drawHistograms(run) {
  const several = RUNS.length > 1 ? "of the selected run" : "";
  for (const [metric, [title, unit]] of Object.entries(HISTOGRAMS)) {
    const rows = run.columns[metric] ?? [], known = rows.flat().filter(Number.isFinite);
    if (!known.length) continue;
    const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b)), width = (high - low) / BINS || 1;
    const edges = Array.from({ length: BINS + 1 }, (_, bin) => low + bin * width);
    const shares = rows.map((row) => {
      const below = edges.map((edge, bin) => (bin === BINS ? 1 : shareBelow(row, edge)));
      return below.slice(1).map((each, bin) => each - below[bin]);
    });
    const z = Array.from({ length: BINS }, (_, bin) => shares.map((each, place) => (rows[place].length ? 100 * each[bin] : null)));
    const map = { type: "heatmap", x: xOf(run, run.columns.iteration), y: edges.slice(0, -1).map((edge) => edge + width / 2), z, colorscale: "Viridis", colorbar: { thickness: 12, outlinewidth: 0, ticksuffix: " %" }, hovertemplate: `${AXES[byId("axis").value]} %{x}, ${unit} %{y:.3~g}: %{z:.3~g} % of the rollouts<extra></extra>` };
    draw("#histograms .plots", title, [map], { height: 280, note: several, xaxis: { showgrid: false }, yaxis: { title: { text: unit }, showgrid: false } });
  }
  byId("no-histograms").hidden = Boolean(document.querySelector("#histograms figure"));
}

/** Fraction of the values below an edge; between two quantiles the values are spread evenly. */
function shareBelow(quantiles, edge) {
  const next = quantiles.findIndex((value) => value >= edge), last = quantiles.length - 1;
  if (next < 0) return 1;
  if (next === 0) return 0;
  const [low, high] = [quantiles[next - 1], quantiles[next]];
  return (next - 1 + (edge - low) / (high - low)) / last;
}
