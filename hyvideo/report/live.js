// Refresh of a served page: it requests itself, and replaces what has changed, so that scroll and zoom stay.
const REFRESH_SECONDS = 5;
let isPaused = false;

async function refresh() {
  if (isPaused || document.hidden) return;
  try {
    const answer = await fetch(location.href, { headers: { "If-None-Match": `"${DATA.stamp}"` }, cache: "no-store" });
    if (answer.status === 200) replaceContents(new DOMParser().parseFromString(await answer.text(), "text/html"));
    if (answer.status !== 200 && answer.status !== 304) throw new Error(await answer.text());
    showUpdated(`updated ${new Date().toLocaleTimeString("en-GB")}, every ${REFRESH_SECONDS} s`);
  } catch (error) {
    showUpdated(`not updated: ${error.message}`);
  }
}

function showUpdated(text) {
  byId("updated").textContent = text;
}

/** Replaces the marked parts of the page and the data. A page with other parts is loaded again. */
function replaceContents(page) {
  const parts = (of) => new Map([...of.querySelectorAll("[data-live]")].map((each) => [each.dataset.live, each]));
  const now = parts(document), next = parts(page);
  if ([...now.keys()].join() !== [...next.keys()].join()) return location.reload();
  for (const [name, part] of now) {
    if (part.innerHTML === next.get(name).innerHTML) continue;
    const open = [...part.querySelectorAll("details")].map((each) => each.open);
    part.replaceChildren(...next.get(name).childNodes);
    part.querySelectorAll("details").forEach((each, place) => { each.open = open[place] ?? each.open; });
  }
  document.title = page.title;
  document.querySelector("h1").textContent = page.querySelector("h1").textContent;
  readData(page.getElementById("data").textContent);
  redrawAll();
}

function startRefresh() {
  showUpdated(`refreshes every ${REFRESH_SECONDS} s`);
  setInterval(refresh, REFRESH_SECONDS * 1000);
  document.addEventListener("visibilitychange", refresh);
  byId("pause-refresh").addEventListener("click", ({ target }) => {
    isPaused = !isPaused;
    target.textContent = isPaused ? "Resume" : "Pause";
    if (isPaused) showUpdated("paused");
    else refresh();
  });
}
