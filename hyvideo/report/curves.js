// Curves of the report: those of the table of metrics (hyvideo/records/metric_table.py), rewards, and validations.
const MAX_MARKERS = 40;  // points of a line over validations; more are drawn as a line

/** Lines that a legend may name without taking the room of the plot; a hover names them too. */
const mostInLegend = () => {
  if (innerWidth < 600) return 4;
  return RUNS.length > 1 ? 6 : 12;
};

const drawnValidations = new Set();  // names of the metrics of validations that have a plot

function drawCurves() {
  redraw(() => {
    drawnValidations.clear();
    drawRewards();
    for (const plot of DATA.plots) if (RUNS.length === 1 || !plot.onlyOneRun) drawMetrics(plot);
    drawShifts();
    drawPareto();
    drawOtherValidations();
    if (RUNS.length === 1 && RUNS[0][1].timeline) drawTimeline("#timeline", RUNS[0][1].timeline);
    byId("others").hidden = !document.querySelector("#others figure");
  });
  hideEmptySections();
  if (window.Plotly) whenIdle(renderNext);
}

/** Hides sections of curves without one, such as steps of an objective without steps, and their links. */
function hideEmptySections() {
  for (const name of ["rewards", "trust", "steps", "held-out", "health"]) {
    const section = byId(name);
    if (!section) continue;
    section.hidden = !section.querySelector("figure, table");
    document.querySelector(`nav a[href="#${name}"]`).hidden = section.hidden;
  }
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

/** Draws the metrics of a plot of the table. */
function drawMetrics({ section, title, note, unit, lines, kind, ...options }) {
  const box = `#${section} .plots`;
  if (kind === "map") {
    if (RUNS.length === 1) drawMap(box, title, lines[0][0], options.center, note);
    return;
  }
  if (kind === "bars") {
    drawBars(box, title, lines, unit);
    return;
  }
  const yaxis = { exponentformat: "power" };
  if (options.fromZero) yaxis.rangemode = "tozero";
  if (options.isLog) Object.assign(yaxis, { type: "log", nticks: 5 });
  let data = lines.flatMap(([name, label], place) => traces(name, label, { place, isLog: options.isLog }));
  if (options.onlyPositive) data = data.filter((each) => each.y.some((value) => value > 0));
  draw(box, title, data, { unit, note, yaxis });
}

/** Lists with one value per denoising step, as colours. */
function drawMap(box, title, name, center, note) {
  const [, run] = RUNS[0];
  const rows = run.columns[name] ?? [];
  const steps = Math.max(0, ...rows.map((row) => row.length));
  if (!steps) return;
  const z = Array.from({ length: steps }, (_, step) => rows.map((row) => row[step] ?? null));
  const scale = center === null || center === undefined ? { colorscale: "Cividis" } : { colorscale: "RdBu", zmid: center };
  const map = { type: "heatmap", x: run.columns.iteration, z, ...scale, hoverongaps: false, colorbar: { thickness: 12, outlinewidth: 0, exponentformat: "power" }, hovertemplate: "iteration %{x}, step %{y}: %{z:.4g}<extra></extra>" };
  draw(box, title, [map], { note, height: 280, xaxis: { showgrid: false }, yaxis: { title: { text: "denoising step" }, autorange: "reversed", dtick: steps > 20 ? 5 : 1, showgrid: false } });
}

/** Parts of a whole, above one another. */
function drawBars(box, title, lines, unit) {
  const [, run] = RUNS[0];
  const bars = lines.filter(([name]) => name in run.metrics).map(([name, label], place) => ({ type: "bar", name: label, x: run.metrics.iteration, y: run.metrics[name], marker: { color: colourOf(place), line: { width: 0 } }, hovertemplate: `iteration %{x}: ${plain(label)} %{y:.3~g} ${unit}<extra></extra>` }));
  draw(box, title, bars, { barmode: "stack", bargap: 0.1, height: 280, unit });
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
  byId("rewards-differ").textContent = `These runs were measured with ${rewards.size} different rewards. Their values cannot be compared, so each reward has its own plots.`;
  const dimensions = metricNames().filter((name) => name.startsWith("reward/")).map((name) => name.slice(7));
  const weighted = shownRuns().flatMap(([, run]) => Object.keys(run.weights));  // of videos that only a validation scores
  const scored = [...new Set([...dimensions, ...weighted])].filter((name) => !["mean", "std", "missing", "overall", "Overall"].includes(name));
  for (const name of ["reward", "unseen/reward", ...scored, ...scored.map((each) => `true/${each}`)]) drawnValidations.add(name);
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

/** Metrics of validations without a plot above, such as those of a new scorer. */
function drawOtherValidations() {
  for (const name of validationNames()) {
    if (!drawnValidations.has(name)) draw("#others .plots", `validation/${name}`, traces(name, "validation", { ofValidation: true }));
  }
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
