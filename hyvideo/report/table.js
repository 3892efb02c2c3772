// Table of the runs: sorted by a column, filtered by a text; the check boxes select what the plots show.
const VERDICTS = { better: "▲ improved", suspect: "! suspected hacking", unclear: "● unclear", worse: "▼ decreased", none: "– no comparison" };
const MAX_SETTINGS = 6;  // that have a column; the fold below the table has the others
const sorting = { key: "run", isDown: false };

/** Time of all processes for a video. */
const timeEach = (run) => (run.iterations ? (run.seconds * run.processes) / (run.rollouts * run.iterations) : NaN);

/** A number if the text of a setting is one, so that 10 follows 9. */
const settingValue = (text) => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

const textOf = (value) => (typeof value === "string" ? value : number(value));

/** Columns: a title, the value of a run by which rows are sorted, and its text in the cell. */
function columns() {
  const several = new Set(RUNS.map(([, run]) => run.reward)).size > 1;
  const interval = (run) => (Number.isFinite(run.gain?.low) ? `${signed(run.gain.low)} to ${signed(run.gain.high)}` : "–");
  return [
    { key: "run", title: "Run", value: (run, name) => name },
    { key: "verdict", title: "Verdict", value: (run) => VERDICTS[run.verdict] },
    { key: "gain", title: "Gain", value: (run) => run.gain?.mean ?? NaN, text: (run) => (run.gain ? signed(run.gain.mean) : "–") },
    { key: "low", title: "95 % interval", value: (run) => run.gain?.low ?? NaN, text: interval },
    ...(several ? [{ key: "reward", title: "Reward", value: (run) => run.reward }] : []),
    { key: "before", title: "Before", value: (run) => run.before ?? NaN, text: (run) => format(run.before ?? NaN) },
    { key: "after", title: "After", value: (run) => run.after ?? NaN, text: (run) => format(run.after ?? NaN) },
    ...DATA.settings.slice(0, MAX_SETTINGS).map((name) => ({ key: `setting ${name}`, title: name, value: (run) => settingValue(run.settings[name]), text: (run) => run.settings[name] })),
    { key: "iterations", title: "Iterations", value: (run) => run.iterations, text: (run) => (run.iterations < run.maxSteps ? `${run.iterations} of ${run.maxSteps}` : String(run.iterations)) },
    { key: "total", title: "Videos", value: (run) => run.rollouts * run.iterations, text: (run) => (run.rollouts * run.iterations).toLocaleString("en-US") },
    { key: "seconds", title: "Time", value: (run) => run.seconds, text: (run) => duration(run.seconds) },
    { key: "each", title: "Time per video", value: timeEach, text: (run) => (Number.isFinite(timeEach(run)) ? duration(timeEach(run)) : "–") },
    { key: "forwards", title: "Passes per video", value: (run) => run.forwards ?? NaN },
    { key: "memory", title: "Peak GiB", value: (run) => run.memory ?? NaN },
    { key: "missing", title: "Failed rewards", value: (run) => run.missing },
    { key: "skipped", title: "Skipped updates", value: (run) => run.skipped },
    { key: "restarts", title: "Restarts", value: (run) => run.restarts },
    { key: "checkpoint", title: "Last checkpoint", value: (run) => run.checkpoint ?? NaN, text: (run) => String(run.checkpoint ?? "none") },
  ];
}

/** The settings without a column, one row each. */
function drawOtherSettings() {
  const others = DATA.settings.slice(MAX_SETTINGS);
  const fold = byId("other-settings");
  fold.hidden = !others.length;
  if (!others.length) return;
  fold.querySelector("summary").textContent = `${others.length} more settings in which the runs differ`;
  const list = fold.appendChild(element("dl", undefined, { className: "facts" }));
  for (const name of others) {
    const row = list.appendChild(element("div"));
    const values = [...new Set(RUNS.map(([, run]) => run.settings[name]))];
    row.append(element("dt", name), element("dd", values.length > 6 ? `${values.length} values` : values.map((value) => value || "–").join(", ")));
  }
}

function passesFilter([name, run]) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const settings = Object.entries(run.settings).map(([setting, value]) => `${setting}=${value}`);
  const text = [name, run.reward, VERDICTS[run.verdict], ...settings].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

function sortedRuns() {
  const { value } = columns().find(({ key }) => key === sorting.key);
  const sign = sorting.isDown ? -1 : 1;
  const compare = (a, b) => {
    if (Number.isNaN(a) || Number.isNaN(b)) return (Number.isNaN(a) ? 1 : 0) - (Number.isNaN(b) ? 1 : 0);  // unknown last
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  };
  return RUNS.filter(passesFilter).sort(([a, first], [b, second]) => compare(value(first, a), value(second, b)));
}

function rowOf([name, run], [, ...others]) {
  const made = element("tr", undefined, { className: hiddenRuns.has(name) ? "left-out" : "" });
  const box = element("input", undefined, { type: "checkbox", checked: !hiddenRuns.has(name) });
  box.setAttribute("aria-label", `show ${name}`);
  box.addEventListener("change", () => {
    if (box.checked) hiddenRuns.delete(name);
    else hiddenRuns.add(name);
    drawTable();
    drawRuns();
  });
  const swatch = element("i", undefined, { className: "swatch" });
  swatch.style.background = colourOfRun(name);
  const head = made.appendChild(element("th", undefined, { scope: "row" }));
  head.append(box, swatch, name);
  for (const { value, text = (each) => textOf(value(each)) } of others) {
    made.append(element("td", text(run), { className: typeof value(run) === "string" ? "text" : "" }));
  }
  return made;
}

function drawTable() {
  const table = byId("runs-table");
  const all = columns();
  const head = element("tr");
  for (const { key, title } of all) {
    const cell = head.appendChild(element("th", undefined, { scope: "col" }));
    const isSorted = key === sorting.key;
    const arrow = sorting.isDown ? " ↓" : " ↑";
    const button = cell.appendChild(element("button", title + (isSorted ? arrow : ""), { type: "button" }));
    const direction = sorting.isDown ? "descending" : "ascending";
    cell.setAttribute("aria-sort", isSorted ? direction : "none");
    button.addEventListener("click", () => {
      sorting.isDown = isSorted ? !sorting.isDown : key !== "run";
      sorting.key = key;
      drawTable();
      table.querySelector("th:not([aria-sort=none]) button").focus();
    });
  }
  const runs = sortedRuns();
  table.replaceChildren(element("thead"), element("tbody"));
  table.tHead.append(head);
  table.tBodies[0].append(...runs.map((entry) => rowOf(entry, all)));
  byId("num-rows").textContent = `${runs.length} of ${RUNS.length} runs`;
}

/** Hides the runs that the filter leaves out, in the table and in the plots. */
function filterRuns() {
  hiddenRuns.clear();
  for (const entry of RUNS) if (!passesFilter(entry)) hiddenRuns.add(entry[0]);
  drawTable();
  drawRuns();
}
