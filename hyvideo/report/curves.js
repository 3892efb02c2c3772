// Curves of the report: rewards, trust region, health and cost over training.
const NO_CURVE = /^(iteration|update|validation\/|time\/|perf\/)/;  // metrics that have a plot of another kind, or none
const STAGES = ["conditions", "pairs", "rollout", "anchor", "decode", "reward", "record", "update"];  // one after another
const MAX_MARKERS = 40;  // points of a line over validations; more are drawn as a line

/** Lines that a legend may name without taking the room of the plot; a hover names them too. */
const mostInLegend = () => {
  if (innerWidth < 600) return 4;
  return RUNS.length > 1 ? 6 : 12;
};

const drawnMetrics = new Set();  // names of the metrics that have a plot

function drawCurves() {
  redraw(() => {
    drawnMetrics.clear();
    drawRewards();
    drawTrust();
    drawHealth();
    drawShifts();
    drawPareto();
    drawCost();
    drawOthers();
  });
}

const metricNames = () => [...new Set(shownRuns().flatMap(([, run]) => Object.keys(run.metrics)))];
const validationNames = () => [...new Set(shownRuns().flatMap(([, run]) => Object.keys(run.validations.means)))];

/** One line for each run that has finite values of a metric, by iteration or by validation. */
function traces(metric, label, { of = shownRuns(), place = 0, ofValidation = false, dash = "solid", isLog = false } = {}) {
  const found = [];
  const several = RUNS.length > 1;
  for (const [name, run] of of) {
    const values = (ofValidation ? run.validations.means : run.metrics)[metric] ?? [];
    const iterations = ofValidation ? run.validations.iteration : run.metrics.iteration;
    const kept = values.flatMap((value, point) => (Number.isFinite(value) && (!isLog || value > 0) ? [point] : []));
    if (!kept.length) continue;
    found.push({
      x: kept.map((point) => iterations[point]), y: kept.map((point) => values[point]), type: "scatter",
      mode: kept.length < (ofValidation ? MAX_MARKERS : 3) ? "lines+markers" : "lines",
      name: several ? `${name}: ${label}` : label, meta: label,
      line: { color: several ? colourOfRun(name) : colourOf(place), width: 2, dash: several && place && !ofValidation ? "dot" : dash },
      marker: { size: ofValidation && of.length < 9 ? 8 : 5, symbol: dash === "solid" ? "circle" : "diamond" },
    });
  }
  return found;
}

/** Traces of the metrics with these ends of names, whatever objective wrote them, each with its label. */
function ending(labels, options = {}) {
  const names = metricNames();
  return Object.entries(labels).flatMap(([end, label], place) => names.filter((name) => name === end || name.endsWith(`/${end}`)).flatMap((name) => {
    drawnMetrics.add(name);
    return traces(name, label, { place, ...options });
  }));
}

/** Shown runs of each trained reward: values of different rewards cannot be compared, and have an axis each. */
function runsByReward() {
  const found = new Map();
  for (const entry of shownRuns()) found.set(entry[1].reward, [...(found.get(entry[1].reward) ?? []), entry]);
  return found;
}

function drawRewards() {
  const rewards = runsByReward();
  const several = rewards.size > 1;
  byId("rewards-differ").hidden = !several;
  byId("rewards-differ").textContent = `These runs were trained with ${rewards.size} different rewards. Their values cannot be compared, so each reward has its own plots.`;
  const dimensions = metricNames().filter((name) => name.startsWith("reward/")).map((name) => name.slice(7));
  const scored = dimensions.filter((name) => !["mean", "std", "missing", "overall", "Overall"].includes(name));
  for (const name of dimensions) drawnMetrics.add(`reward/${name}`);
  for (const name of ["reward", "unseen/reward", ...scored, ...scored.map((each) => `true/${each}`)]) drawnMetrics.add(`validation/${name}`);
  for (const [reward, of] of rewards) {
    const title = (text) => (several ? `${text}, ${reward}` : text);
    const dashed = { of, place: 1, ofValidation: true, dash: RUNS.length > 1 ? "dash" : "solid" };
    const dotted = { of, place: 2, ofValidation: true, dash: "dot" };
    const pair = (training, validation) => [...traces(training, "rollouts", { of }), ...traces(validation, "validation", dashed)];
    const unseen = traces("unseen/reward", "validation, unseen prompts", dotted);
    draw(".curve", title("Reward"), [...pair("reward/mean", "reward"), ...unseen], { height: 350, unit: "reward" });
    for (const name of scored) {
      draw("#rewards .plots", title(name), [...pair(`reward/${name}`, name), ...traces(`true/${name}`, "true reward", dotted)], { unit: "score" });
    }
    draw("#health .plots", title("Standard deviation of the reward within a group"), traces("reward/std", "standard deviation", { of }), { unit: "reward", yaxis: { rangemode: "tozero" } });
  }
}

function drawTrust() {
  const toZero = { rangemode: "tozero" };
  const log = { type: "log", exponentformat: "power", nticks: 5 };
  const moves = shownRuns().some(([, run]) => run.moves);
  draw("#trust .plots", "KL", ending({ position: "to the anchor", velocity: "to the rollout policy" }, { isLog: true }), { unit: "per element", yaxis: log, note: moves ? "falls to 0 when the anchor moves" : "" });
  draw("#trust .plots", "KL coefficient", ending({ "kl/coef": "coefficient" }));
  draw("#trust .plots", "Clip fraction", ending({ clip_fraction: "clipped" }), { unit: "fraction of terms", yaxis: toZero });
  draw("#trust .plots", "Gradient norm", ending({ "grad/norm": "norm before clipping" }), { yaxis: toZero });
  draw("#trust .plots", "Largest deviation of a ratio from 1", ending({ ratio_max_deviation: "all updates", ratio_first_deviation: "first update" }));
  draw("#trust .plots", "Loss", ending({ "loss/policy": "policy", "loss/total": "total" }), { yaxis: { exponentformat: "power" }, note: "does not measure progress: around 0 with one update per iteration" });
  if (RUNS.length === 1) drawSteps(RUNS[0][1]);
}

function drawSteps(run) {
  const maps = [
    ["by_step/ratio_mean", "Mean ratio", { colorscale: "RdBu", zmid: 1 }],
    ["by_step/ratio_max_deviation", "Largest deviation of a ratio from 1, by step", { colorscale: "Cividis" }],
    ["by_step/kl", "KL, by step", { colorscale: "Cividis" }],
  ];
  for (const [metric, title, scale] of maps) {
    const rows = run.columns[metric] ?? [];
    const steps = Math.max(0, ...rows.map((row) => row.length));
    if (!steps) continue;
    const z = Array.from({ length: steps }, (_, step) => rows.map((row) => row[step] ?? null));
    const map = { type: "heatmap", x: run.columns.iteration, z, ...scale, hoverongaps: false, colorbar: { thickness: 12, outlinewidth: 0, exponentformat: "power" }, hovertemplate: "iteration %{x}, step %{y}: %{z:.4g}<extra></extra>" };
    draw("#steps .plots", title, [map], { height: 280, xaxis: { showgrid: false }, yaxis: { title: { text: "denoising step" }, autorange: "reversed", dtick: steps > 20 ? 5 : 1, showgrid: false } });
  }
  byId("no-steps").hidden = Boolean(document.querySelector("#steps figure"));
}

function drawHealth() {
  const toZero = { rangemode: "tozero" };
  const where = (found) => found.filter((each) => each.y.some((value) => value > 0));
  draw("#health .plots", "Zero groups", ending({ zero_groups: "groups" }), { unit: "groups", yaxis: toZero });
  draw("#health .plots", "Failed rewards", where(ending({ "reward/missing": "rollouts" })), { unit: "rollouts", yaxis: toZero });
  draw("#health .plots", "Skipped updates", where(ending({ "update/skipped": "updates" })), { unit: "updates", yaxis: toZero });
}

function drawCost() {
  const toZero = { rangemode: "tozero" };
  draw("#cost .plots", "Peak memory", ending({ peak_gib: "peak" }), { unit: "GiB", yaxis: toZero });
  draw("#cost .plots", "Forward passes per rollout", ending({ "cost/forwards": "forward passes" }), { yaxis: toZero });
  draw("#cost .plots", "Time per iteration", traces("time/iteration", "seconds"), { unit: "s", yaxis: toZero });
  if (RUNS.length > 1) return;
  const [, run] = RUNS[0];
  const of = (prefix) => Object.keys(run.metrics).filter((name) => name.startsWith(prefix));
  const stages = STAGES.map((stage) => `time/${stage}`).filter((name) => name in run.metrics);
  const bars = stages.map((each, place) => ({ type: "bar", name: each.slice(5), x: run.metrics.iteration, y: run.metrics[each], marker: { color: colourOf(place), line: { width: 0 } }, hovertemplate: `iteration %{x}: ${plain(each.slice(5))} %{y:.3~g} s<extra></extra>` }));
  draw("#cost .plots", "Time by stage", bars, { barmode: "stack", bargap: 0.1, height: 280, unit: "s" });
  const rates = (prefix) => of(prefix).flatMap((name, place) => traces(name, name.slice(prefix.length), { place }));
  draw("#cost .plots", "TFLOP/s of a rank, without recomputation", rates("perf/tflops/"), { height: 280, unit: "TFLOP/s", yaxis: toZero });
  draw("#cost .plots", "MFU: share of the GPU's peak", rates("perf/mfu/"), { height: 280, yaxis: toZero });
  if (run.timeline) drawTimeline("#timeline", run.timeline);
}

/** Metrics without a plot above, so that a new objective or scorer needs no change of this page. */
function drawOthers() {
  for (const name of metricNames()) if (!drawnMetrics.has(name) && !NO_CURVE.test(name)) draw("#others .plots", name, traces(name, name));
  for (const name of validationNames()) {
    if (drawnMetrics.has(`validation/${name}`)) continue;
    draw("#others .plots", `validation/${name}`, traces(name, "validation", { ofValidation: true }));
  }
  byId("others").hidden = !document.querySelector("#others figure");
}

function drawShifts() {
  const data = [];
  const near = [];
  for (const [name, run] of shownRuns()) {
    const { iteration, shifts } = run.validations;
    for (const [measure, values] of Object.entries(shifts)) {
      const kept = values.flatMap((value, place) => (Number.isFinite(value) ? [place] : []));
      const y = kept.map((place) => values[place]);
      const isNear = y.some((value) => Math.abs(value) > 0.5);
      if (isNear && !near.includes(measure)) near.push(measure);
      const place = near.indexOf(measure);
      const line = { color: "#9aa3ad", width: 1, dash: "solid" };
      if (isNear) {
        line.color = RUNS.length > 1 ? colourOfRun(name) : colourOf(place);
        line.width = 2.5;
        if (RUNS.length > 1) line.dash = ["solid", "dash", "dot", "dashdot"][place % 4];
      }
      data.push({
        x: kept.map((each) => iteration[each]), y, type: "scatter", mode: "lines+markers", name: RUNS.length > 1 ? `${name}: ${measure}` : measure,
        showlegend: isNear, opacity: isNear ? 1 : 0.55, line, marker: { size: isNear ? 7 : 4 },
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
  const found = heldOutScores();
  const select = byId("held");
  byId("pareto").hidden = !found.size;
  if (!found.size) return;
  const { value: selected } = select;
  select.replaceChildren(...[...found.keys()].map((each) => element("option", each)));
  if (found.has(selected)) select.value = selected;
  const name = select.value;
  const rewards = runsByReward();
  for (const [trained, runs] of rewards) drawFront(runs, rewards.size > 1 ? trained : "", name === "unseen/reward" ? "seen/reward" : "reward", name, found.get(name));
}

/** Reward and held-out score of runs with the same reward. */
function drawFront(runs, trained, reward, name, value) {
  const data = runs.map(([run, content]) => {
    const { iteration, means } = content.validations;
    const at = (place) => (each) => means[each]?.[place];
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
