// Table of the runs: sorted, filtered by the settings that differ, runs of one recipe together, a sweep as one section.
const VERDICTS = { better: "▲ improved", suspect: "! suspected hacking", unclear: "● unclear", worse: "▼ decreased", none: "– no comparison" };
const sorting = { key: "run", isDown: false };
const openSweeps = new Map();  // whether the user has opened or closed a sweep

const mean = (values) => (values.length ? values.reduce((a, b) => a + b) / values.length : NaN);
const timesEach = (run) => (run.iterations ? (run.seconds * run.processes) / (run.rollouts * run.iterations) : NaN);

/** Columns: a title, the value of a run, and how to write it. */
function columns() {
  const several = new Set(RUNS.map(([, run]) => run.reward)).size > 1;
  return [
    ...(DATA.served ? [{ key: "status", title: "Status", value: (run) => run.status, isText: true }] : []),
    { key: "verdict", title: "Verdict", value: (run) => VERDICTS[run.verdict], isText: true },
    { key: "gain", title: "Gain", value: (run) => run.gain?.mean ?? NaN, write: signed },
    { key: "low", title: "95 % interval", value: (run) => run.gain?.low ?? NaN, of: (run) => (Number.isFinite(run.gain?.low) ? `${signed(run.gain.low)} to ${signed(run.gain.high)}` : "–") },
    ...(several ? [{ key: "reward", title: "Reward", value: (run) => run.reward, isText: true }] : []),
    { key: "before", title: "Before", value: (run) => run.before ?? NaN, write: format },
    { key: "after", title: "After", value: (run) => run.after ?? NaN, write: format },
    ...DATA.settings.map((name) => ({ key: `setting ${name}`, title: name, value: (run) => settingValue(run.settings[name]), of: (run) => run.settings[name], isText: true, isSetting: true })),
    { key: "iterations", title: "Iterations", value: (run) => run.iterations, of: (run) => (run.iterations < run.maxSteps ? `${run.iterations} of ${run.maxSteps}` : String(run.iterations)) },
    { key: "total", title: "Rollouts", value: (run) => run.rollouts * run.iterations, write: (value) => Math.round(value).toLocaleString("en-US") },
    { key: "seconds", title: "Time", value: (run) => run.seconds, write: duration },
    { key: "each", title: "Time per rollout", value: timesEach, write: (value) => (Number.isFinite(value) ? duration(value) : "–") },
    { key: "forwards", title: "Passes per rollout", value: (run) => run.forwards ?? NaN, write: number },
    { key: "memory", title: "Peak GiB", value: (run) => run.memory ?? NaN, write: number },
    { key: "missing", title: "Failed rewards", value: (run) => run.missing, write: number },
    { key: "skipped", title: "Skipped updates", value: (run) => run.skipped, write: number },
    { key: "restarts", title: "Restarts", value: (run) => run.restarts, write: number },
    { key: "checkpoint", title: "Last checkpoint", value: (run) => run.checkpoint ?? -1, write: (value) => (value < 0 ? "none" : String(value)) },
  ];
}

/** A number if the text of a setting is one, so that 10 follows 9. */
const settingValue = (text) => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

/** Rows: one for each run or, if seeds are together, for each recipe; with the runs that a row stands for. */
function tableRows() {
  const found = new Map();
  for (const [name, run] of RUNS.filter(passesFilters)) {
    const key = isGrouped() ? run.group : name;
    if (!found.has(key)) found.set(key, { name: key, sweep: run.sweep, names: [], runs: [] });
    found.get(key).names.push(name);
    found.get(key).runs.push(run);
  }
  return [...found.values()];
}

function passesFilters([name, run]) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [name, run.reward, run.sweep, VERDICTS[run.verdict], ...Object.entries(run.settings).map(([setting, value]) => `${setting}=${value}`)].join("\n").toLowerCase();
  const selects = [...document.querySelectorAll("#filters select")];
  return words.every((word) => text.includes(word)) && selects.every(({ value, dataset }) => !value || `=${run.settings[dataset.setting]}` === value);
}

function cellOf(column, { runs }) {
  if (runs.length === 1) return column.of ? column.of(runs[0]) : column.isText ? column.value(runs[0]) : column.write(column.value(runs[0]));
  if (column.isText) {
    const values = [...new Set(runs.map((run) => (column.of ? column.of(run) : column.value(run))))];
    return values.length < 3 ? values.join(", ") : `${values.length} values`;
  }
  const known = runs.map(column.value).filter(Number.isFinite);
  if (column.key === "low") return "–";
  if (!known.length) return "–";
  const write = column.write ?? number, low = Math.min(...known), high = Math.max(...known);
  return write(low) === write(high) ? write(low) : `${write(mean(known))} (${write(low)} to ${write(high)})`;
}

function sortValue(column, { name, runs }) {
  if (!column) return name;
  const values = runs.map(column.value);
  return values.every((value) => typeof value === "number") ? mean(values.filter(Number.isFinite)) : String(values[0]);
}

function sorted(rows) {
  const column = columns().find(({ key }) => key === sorting.key), sign = sorting.isDown ? -1 : 1;
  const compare = (a, b) => {
    if (Number.isNaN(a) || Number.isNaN(b)) return (Number.isNaN(a) ? 1 : 0) - (Number.isNaN(b) ? 1 : 0);  // unknown last
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  };
  return [...rows].sort((a, b) => compare(sortValue(column, a), sortValue(column, b)));
}

function checkbox(names, label) {
  const box = element("input", undefined, { type: "checkbox" });
  const shown = names.filter((name) => !hiddenRuns.has(name)).length;
  box.checked = shown > 0;
  box.indeterminate = shown > 0 && shown < names.length;
  box.setAttribute("aria-label", label);
  box.addEventListener("change", () => {
    for (const name of names) hiddenRuns[box.checked ? "delete" : "add"](name);
    drawTable();
    drawRuns();
  });
  return box;
}

function rowOf(row, all) {
  const made = element("tr"), name = element("th", undefined, { scope: "row" });
  const swatch = element("i", undefined, { className: "swatch" });
  swatch.dataset.run = row.names[0];
  swatch.style.background = colourOfRun(row.names[0]);
  name.append(checkbox(row.names, `show ${row.name}`), swatch);
  if (DATA.served && row.names.length === 1) name.append(element("a", row.name, { href: `run?name=${encodeURIComponent(row.name)}` }));
  else name.append(row.names.length > 1 ? `${row.name} × ${row.names.length} seeds` : row.name);
  made.append(name, ...all.map((column) => element("td", cellOf(column, row), { className: column.isText ? "text" : "" })));
  made.classList.toggle("left-out", row.names.every((each) => hiddenRuns.has(each)));
  return made;
}

function drawTable() {
  const table = byId("runs-table"), all = columns(), rows = sorted(tableRows());
  const head = element("tr");
  for (const { key, title, isText, isSetting } of [{ key: "run", title: "Run", isText: true }, ...all]) {
    const cell = head.appendChild(element("th", undefined, { scope: "col", className: isText ? "text" : "" })), isSorted = key === sorting.key;
    const button = cell.appendChild(element("button", undefined, { type: "button" }));
    button.append(isSetting ? element("code", title) : title, isSorted ? (sorting.isDown ? " ↓" : " ↑") : "");
    button.dataset.key = key;
    cell.setAttribute("aria-sort", isSorted ? (sorting.isDown ? "descending" : "ascending") : "none");
  }
  const sections = new Map();
  for (const row of rows) sections.set(row.sweep, [...(sections.get(row.sweep) ?? []), row]);
  const bodies = [...sections].sort(([a], [b]) => a.localeCompare(b)).map(([sweep, own]) => sectionOf(sweep, own, all, sections.size === 1));
  table.replaceChildren(element("thead"), ...bodies);
  table.tHead.append(head);
  byId("num-rows").textContent = `${rows.flatMap(({ names }) => names).length} of ${RUNS.length} runs`;
}

/** The rows of a sweep under a row that opens and closes it; runs of no sweep have no such row. */
function sectionOf(sweep, rows, all, isOnly) {
  const body = element("tbody"), names = rows.flatMap((row) => row.names);
  const isOpen = !sweep || (openSweeps.get(sweep) ?? isOnly);
  if (sweep) {
    const head = body.appendChild(element("tr", undefined, { className: "sweep" })), name = head.appendChild(element("th", undefined, { scope: "rowgroup", colSpan: all.length + 1 }));
    const button = element("button", `${isOpen ? "▾" : "▸"} sweep ${sweep}`, { type: "button" });
    button.setAttribute("aria-expanded", isOpen);
    button.addEventListener("click", () => {
      openSweeps.set(sweep, !isOpen);
      drawTable();
    });
    const best = rows.filter(({ runs }) => runs.some((run) => run.gain)).map((row) => [mean(row.runs.filter((run) => run.gain).map((run) => run.gain.mean)), row]).sort((a, b) => b[0] - a[0])[0];
    const groups = new Set(rows.flatMap((row) => row.runs.map((run) => run.group))).size;
    name.append(checkbox(names, `show sweep ${sweep}`), button, element("small", ` ${groups} ${groups === 1 ? "recipe" : "recipes"}, ${names.length} runs${best ? `, largest gain ${signed(best[0])}: ${best[1].name}` : ""}`));
  }
  if (isOpen) body.append(...rows.map((row) => rowOf(row, all)));
  return body;
}

/** Selects for the settings that differ, each with its values. */
function drawFilters() {
  const kept = new Map([...document.querySelectorAll("#filters select")].map(({ dataset, value }) => [dataset.setting, value]));
  byId("filters").replaceChildren(...DATA.settings.map((setting) => {
    const label = element("label", setting + " "), select = label.appendChild(element("select"));
    const values = [...new Set(RUNS.map(([, run]) => run.settings[setting]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    select.dataset.setting = setting;
    select.append(element("option", "all", { value: "" }), ...values.map((value) => element("option", value, { value: `=${value}` })));
    select.value = kept.get(setting) ?? "";
    return label;
  }));
}

/** Hides the runs that the filters leave out, in the table and in the plots. */
function filterRuns() {
  hiddenRuns.clear();
  for (const entry of RUNS) if (!passesFilters(entry)) hiddenRuns.add(entry[0]);
  drawTable();
  drawRuns();
}

function startTable() {
  byId("runs-table").addEventListener("click", ({ target }) => {
    const { key } = target.closest("thead button")?.dataset ?? {};
    if (!key) return;
    sorting.isDown = key === sorting.key ? !sorting.isDown : key !== "run";
    sorting.key = key;
    drawTable();
    byId("runs-table").querySelector(`thead button[data-key="${key.replace(/["\\]/g, "\\$&")}"]`).focus();
  });
  byId("filters").addEventListener("input", filterRuns);
  byId("filter").addEventListener("input", filterRuns);
  byId("grouped").addEventListener("input", drawTable);
  drawFilters();
  drawTable();
}
