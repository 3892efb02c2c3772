// Data of the page, and numbers and elements made from it.
const byId = (id) => document.getElementById(id);
const DATA = JSON.parse(byId("data").textContent);
const RUNS = Object.entries(DATA.runs);

const COLOURS = ["#3f7fe0", "#e0862f", "#2fa277", "#c9508b", "#8467d7", "#9a8a3c", "#39a7bd", "#8b95a1"];
const colourOf = (place) => COLOURS[place] ?? `hsl(${(place * 137.5) % 360}, 55%, 55%)`;
const colourOfRun = (name) => colourOf(RUNS.findIndex(([each]) => each === name));
const CSS = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const hiddenRuns = new Set();  // names of the runs that the check boxes of the table leave out
const shownRuns = () => RUNS.filter(([name]) => !hiddenRuns.has(name));

// Numbers as in formats.html.j2: scores with three decimals, other quantities with three significant digits.
const minus = (text) => text.replace(/e-(\d)$/, "e-0$1").replaceAll("-", "−");
const number = (value) => (Number.isFinite(value) ? minus(String(Number(value.toPrecision(3)))) : "–");

function format(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return "–";
  if (size >= 100) return minus(Math.round(value).toLocaleString("en-US"));
  if (size === 0 || size >= 0.1) return minus(value.toFixed(3));
  return minus(size < 1e-4 ? value.toExponential(2) : value.toPrecision(3));
}

function signed(value) {
  if (Math.abs(value) < 0.0005) return "0.000";
  const text = Math.abs(value) < 100 ? value.toFixed(3) : Math.round(value).toLocaleString("en-US");
  return (value > 0 ? "+" : "") + minus(text);
}

function duration(seconds) {
  if (seconds < 100) return `${number(seconds)} s`;
  if (seconds < 6000) return `${number(seconds / 60)} min`;
  return `${number(seconds / 3600)} h`;
}

function element(tag, text, attributes = {}) {
  const made = Object.assign(document.createElement(tag), attributes);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Text for Plotly, which would read <b>, <a> and %{...} in names as markup. */
const plain = (text) => String(text).replace(/[<>&]/g, (letter) => `&#${letter.charCodeAt(0)};`).replaceAll("%{", "%\u200b{");

/** Bytes of a text in base64. A loop: a function for each of two million letters would take longer than all plots. */
function bytesOf(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place += 1) bytes[place] = letters.charCodeAt(place);
  return bytes;
}
