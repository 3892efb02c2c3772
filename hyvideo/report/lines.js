// Lines of the curves: one for each run, or the mean and the band of runs that differ in their seed only.
const hiddenRuns = new Set();  // names of the runs that the curves leave out
const MAX_MARKERS = 40;  // points of a line over validations; more are drawn as a line
const isGrouped = () => byId("grouped")?.checked ?? false;
const shownRuns = () => RUNS.filter(([name]) => !hiddenRuns.has(name));

/** Lines in the order of the runs; their colours stay if runs are hidden. */
function lines() {
  const found = new Map();
  for (const [name, run] of RUNS) {
    const key = isGrouped() ? run.group : name;
    if (!found.has(key)) found.set(key, { name: key, place: found.size, runs: [] });
    if (!hiddenRuns.has(name)) found.get(key).runs.push(run);
  }
  return [...found.values()].filter(({ runs }) => runs.length);
}

function colourOfRun(name) {
  const keys = [...new Set(RUNS.map(([each, run]) => (isGrouped() ? run.group : each)))];
  return colourOf(keys.indexOf(isGrouped() ? DATA.runs[name].group : name));
}

/** Lines of each trained reward: values of different rewards cannot be compared, and have an axis each. */
function linesByReward() {
  const found = new Map();
  for (const line of lines()) {
    const { reward } = line.runs[0];
    found.set(reward, [...(found.get(reward) ?? []), line]);
  }
  return found;
}

function xOf(run, iterations) {
  const axis = byId("axis")?.value ?? "iterations";
  if (axis === "iterations") return iterations;
  if (axis === "rollouts") return iterations.map((iteration) => iteration * run.rollouts);
  const known = run.metrics.iteration || [];
  return iterations.map((iteration) => {
    const place = known.findLastIndex((each) => each <= iteration);
    return place < 0 ? 0 : run.hours[place];
  });
}

/** Finite values of a metric, or null without any. */
function valuesOf(run, metric, ofValidation) {
  const all = (ofValidation ? run.validations.means : run.metrics)[metric];
  if (!all?.some(Number.isFinite)) return null;
  const iterations = ofValidation ? run.validations.iteration : run.metrics.iteration;
  const kept = all.flatMap((value, place) => (Number.isFinite(value) ? [place] : []));
  return { x: xOf(run, kept.map((place) => iterations[place])), y: kept.map((place) => all[place]) };
}

/** Exponential moving average, without a bias towards its start. */
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Mean, lowest and highest value of several curves, interpolated at the places of all of them. */
function bandOf(curves) {
  const x = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const rows = curves.map((curve) => {
    let next = 0;
    return x.map((each) => {
      while (next < curve.x.length && curve.x[next] < each) next += 1;
      if (next === curve.x.length || (next === 0 && curve.x[0] > each)) return NaN;
      if (curve.x[next] === each) return curve.y[next];
      const share = (each - curve.x[next - 1]) / (curve.x[next] - curve.x[next - 1]);
      return curve.y[next - 1] + share * (curve.y[next] - curve.y[next - 1]);
    });
  });
  const columns = x.map((_, place) => rows.map((row) => row[place]).filter(Number.isFinite));
  return { x, y: columns.map((each) => each.reduce((a, b) => a + b) / each.length), low: columns.map((each) => Math.min(...each)), high: columns.map((each) => Math.max(...each)) };
}

/** Traces of one metric by iteration, or by validation, for every line whose runs have it. */
function traces(metric, label, { of = lines(), place = 0, ofValidation = false, dash = "solid", log = false } = {}) {
  const found = [], several = RUNS.length > 1, weight = ofValidation ? 0 : Number(byId("smoothing")?.value ?? 0);
  for (const line of of) {
    const curves = line.runs.map((run) => valuesOf(run, metric, ofValidation)).filter(Boolean).map(({ x, y }) => {
      const kept = x.map((_, point) => point).filter((point) => !log || y[point] > 0), values = kept.map((point) => y[point]);
      return { x: kept.map((point) => x[point]), y: weight ? smoothed(values, weight) : values, raw: values };
    }).filter(({ x }) => x.length);
    if (!curves.length) continue;
    const colour = colourOf(several ? line.place : place), { x, y, low, high } = curves.length > 1 ? bandOf(curves) : curves[0];
    if (low) found.push({ type: "scatter", mode: "lines", x: [...x, ...x.toReversed()], y: [...high, ...low.toReversed()], fill: "toself", fillcolor: colour, opacity: 0.18, line: { width: 0 }, hoverinfo: "skip", showlegend: false, name: `${line.name}: band` });
    else if (weight && of.length < 5) found.push({ type: "scatter", mode: "lines", x, y: curves[0].raw, line: { color: colour, width: 1 }, opacity: 0.3, hoverinfo: "skip", showlegend: false, name: `${line.name}: raw` });
    const name = curves.length > 1 ? `${line.name} (mean of ${curves.length})` : line.name;
    found.push({
      x, y, type: "scatter", mode: y.length < (ofValidation ? MAX_MARKERS : 3) ? "lines+markers" : "lines", name: several ? `${name}: ${label}` : label, meta: label,
      line: { color: colour, width: 2, dash: several && place && !ofValidation ? "dot" : dash },
      marker: { size: ofValidation && of.length < 9 ? 8 : 5, symbol: dash === "solid" ? "circle" : "diamond" },
    });
  }
  return found;
}
