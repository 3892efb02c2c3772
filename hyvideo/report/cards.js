// Validation videos: the base model beside the validation that the slider selects, the same prompt and seed on a card.
const MAX_CARD_RUNS = 4;  // runs whose videos a card shows

const urls = new Map();
function clipUrl(digest) {
  if (DATA.served) return `clip?id=${digest}`;
  if (!urls.has(digest)) {
    urls.set(digest, URL.createObjectURL(new Blob([bytesOf(DATA.clips[digest])], { type: "video/mp4" })));
  }
  return urls.get(digest);
}

function posterUrl(digest) {
  if (DATA.served) return `poster?id=${digest}`;
  return DATA.posters[digest] ? `data:image/webp;base64,${DATA.posters[digest]}` : "";
}

/** Link to the file of a video that is shown as a preview. */
function fileLink(entry) {
  return element("a", `full size, ${DATA.originals[entry.clip]}`, { href: entry.file, target: "_blank", rel: "noopener" });
}

function player(digest, label) {
  const clip = element("video", undefined, { muted: true, playsInline: true, preload: "auto", tabIndex: 0, poster: posterUrl(digest) });
  clip.dataset.clip = digest;
  clip.setAttribute("aria-label", label);
  clip.setAttribute("muted", "");
  return clip;
}

/** Shows another video in a player, at the same time. */
function changeClip(clip, digest) {
  if (clip.dataset.clip === digest) return;
  const isLoaded = clip.hasAttribute("src"), { currentTime } = clip;
  clip.dataset.clip = digest;
  clip.poster = posterUrl(digest);
  if (!isLoaded) return;
  clip.src = clipUrl(digest);
  clip.currentTime = currentTime;
  if (playing) clip.play().catch(() => {});
}

const cardRuns = () => shownRuns().slice(0, MAX_CARD_RUNS);

/** Videos of the same prompt, seed and number in the shown runs. */
function comparedVideos() {
  const found = new Map(), runs = cardRuns();
  runs.forEach(([, run], place) => {
    for (const video of run.videos) {
      const { prompt, seed, number } = video, key = JSON.stringify([prompt, seed, number]);
      if (!found.has(key)) found.set(key, { prompt, seed, number, drawn: video.drawn, of: runs.map(() => null) });
      found.get(key).of[place] = video;
    }
  });
  for (const video of found.values()) {
    const gains = video.of.filter((each) => each && Number.isFinite(each.gain)).map((each) => each.gain);
    video.gain = gains.length ? gains.reduce((a, b) => a + b) / gains.length : NaN;
    video.hasClips = video.of.some((each) => each && Object.values(each.entries).some((entry) => entry.clip));
  }
  return [...found.values()];
}

const ORDERS = {
  drawn: (a, b) => a.drawn - b.drawn,
  worst: (a, b) => a.gain - b.gain,
  best: (a, b) => b.gain - a.gain,
  number: (a, b) => a.number - b.number,
};
let videos = [], validations = [], numShown = 6;

/** The entry of a video at an iteration or, if the page does not have it, at the nearest one, and its iteration. */
function entryAt(video, iteration) {
  const known = Object.keys(video.entries).map(Number).filter((each) => each > 0 && video.entries[each].clip);
  if (!known.length) return null;
  const nearest = known.reduce((a, b) => (Math.abs(b - iteration) <= Math.abs(a - iteration) ? b : a));
  return { iteration: nearest, entry: video.entries[nearest] };
}

function gainText(gain) {
  return Number.isFinite(gain) ? element("b", signed(gain), { className: gain < 0 ? "down" : "up" }) : element("span", "no gain available");
}

/** A card, and how to show another validation on it. */
function card(video, iteration) {
  const made = element("article"), clips = element("div", undefined, { className: "clips" }), runs = cardRuns(), updates = [];
  made.append(element("h3", video.prompt), clips);
  const add = (entry, title) => {
    const figure = clips.appendChild(element("figure"));
    const shown = player(entry.clip, `${title}: ${video.prompt}`), caption = element("figcaption");
    figure.append(shown, caption);
    return { shown, caption };
  };
  const describe = (caption, title, entry) => {
    caption.textContent = `${title}: ${format(entry.reward ?? NaN)}`;
    if (entry.clip in DATA.originals) caption.append(" ", fileLink(entry));
  };
  const bases = new Set();  // the base model of several runs is shown once
  video.of.forEach((each) => {
    const base = each?.entries[0];
    if (!base?.clip || bases.has(base.clip)) return;
    bases.add(base.clip);
    describe(add(base, "before").caption, "before", base);
  });
  video.of.forEach((each, place) => {
    const first = each && entryAt(each, iteration);
    const line = element("p", "", { className: "chips" });
    if (first) {
      const { shown, caption } = add(first.entry, RUNS.length > 1 ? runs[place][0] : "after");
      updates.push((now) => {
        const { iteration: at, entry } = entryAt(each, now);
        const after = validations.length > 1 ? `iteration ${at}` : "after";
        describe(caption, RUNS.length > 1 ? (validations.length > 1 ? `${runs[place][0]}, ${at}` : runs[place][0]) : after, entry);
        changeClip(shown, entry.clip);
        showScores(line, each, entry, runs[place][0]);
      });
    } else if (each) {
      showScores(line, each, each.entries[Math.max(...Object.keys(each.entries))], runs[place][0]);
    }
    if (each) made.append(line);
  });
  clips.style.setProperty("--clips", Math.min(5, clips.childElementCount));
  made.append(element("small", `seed ${video.seed}, video ${video.number}`));
  inStep(made);
  updates.forEach((update) => update(iteration));
  return { made, update: (now) => updates.forEach((update) => update(now)) };
}

/** Writes the differences between the scores of an entry and the base model. */
function showScores(line, video, entry, run) {
  const base = video.entries[0];
  line.replaceChildren(RUNS.length > 1 ? `${run} ` : "");
  const chip = (name, value) => line.appendChild(element("span", `${name} `)).append(value);
  const gain = Number.isFinite(entry?.reward) && Number.isFinite(base?.reward) ? entry.reward - base.reward : NaN;
  chip("reward", gainText(gain));
  if (!base) return;
  for (const [name, value] of Object.entries(entry?.scores ?? {})) {
    if (Number.isFinite(value) && Number.isFinite(base.scores[name])) chip(name, signed(value - base.scores[name]));
  }
}

let cards = [];
const selectedIteration = () => validations[Number(byId("validation").value)] ?? Infinity;

function drawGallery() {
  videos = comparedVideos();
  const kept = videos.filter((video) => video.hasClips).sort(ORDERS[byId("order").value]);
  byId("gallery").querySelectorAll("article").forEach((each) => visible.unobserve(each));
  cards = kept.slice(0, numShown).map((video) => card(video, selectedIteration()));
  byId("gallery").replaceChildren(...cards.map(({ made }) => made));
  cards.forEach(({ made }) => visible.observe(made));
  byId("more").hidden = kept.length <= numShown;
  const left = shownRuns().length - cardRuns().length;
  byId("left-out").textContent = left > 0 ? `Videos of the first ${MAX_CARD_RUNS} of ${left + MAX_CARD_RUNS} selected runs are shown; select others in the table.` : "";
  document.body.style.setProperty("--clips", Math.min(5, Math.max(DATA.folders.length, ...cards.map(({ made }) => made.querySelectorAll("video").length))));
}

/** A slider over the validations of the runs. It keeps its validation if there are new ones, or follows the last. */
function drawSlider() {
  const slider = byId("validation"), selected = selectedIteration(), wasLast = Number(slider.value) === validations.length - 1;
  const found = new Set(cardRuns().flatMap(([, run]) => run.videos.flatMap(({ entries }) => Object.keys(entries).filter((each) => each > 0 && entries[each].clip).map(Number))));
  validations = [...found].sort((a, b) => a - b);
  byId("over-training").hidden = validations.length < 2;
  slider.max = Math.max(0, validations.length - 1);
  const place = validations.findLastIndex((each) => each <= selected);
  slider.value = wasLast || place < 0 ? validations.length - 1 : place;
  showSelected();
}

function showSelected() {
  const text = `iteration ${selectedIteration()}`;
  byId("validation-text").textContent = text;
  byId("validation").setAttribute("aria-valuetext", text);
}

function selectValidation(step) {
  const slider = byId("validation");
  slider.value = Number(slider.value) + step;
  slider.dispatchEvent(new Event("input"));
}

/** A few randomly selected videos beside the verdict. */
function drawGlance() {
  const kept = comparedVideos().filter((video) => video.hasClips).sort(ORDERS.drawn), runs = cardRuns().length;
  const count = runs > 2 ? 2 : runs > 1 ? 3 : 4;
  const glance = document.querySelector(".glance");
  glance.querySelectorAll("article").forEach((each) => visible.unobserve(each));
  glance.replaceChildren(...kept.slice(0, count).map((video) => card(video, Infinity).made));
  glance.querySelectorAll("article").forEach((each) => visible.observe(each));
}

function drawGains() {
  const data = cardRuns().map(([name, run]) => {
    const known = run.videos.filter((video) => Number.isFinite(video.gain)).sort((a, b) => a.gain - b.gain);
    const colour = RUNS.length > 1 ? colourOfRun(name) : known.map((video) => CSS(video.gain < 0 ? "--worse" : "--better"));
    return { type: "bar", name, y: known.map((video) => video.gain), text: known.map((video) => plain(video.prompt)), textposition: "none", hovertemplate: "reward %{y:+.3f}: %{text}<extra></extra>", marker: { color: colour, line: { width: 0 } } };
  }).filter((each) => each.y.length);
  draw("#gains", "Gain of each validation video, sorted", data, { x: "videos, smallest gain first", unit: "reward", xaxis: { showticklabels: false, showgrid: false, zeroline: false }, bargap: 0.05 });
}

function drawPrompts() {
  const table = byId("prompts"), runs = cardRuns(), head = element("thead").appendChild(element("tr")), body = element("tbody");
  for (const name of ["Prompt", ...runs.flatMap(([run]) => ["before", "after", "gain"].map((what) => (RUNS.length > 1 ? `${run} ${what}` : what)))]) head.append(element("th", name, { scope: "col" }));
  for (const video of videos.sort(ORDERS.worst).slice(0, 500)) {
    const row = body.insertRow();
    row.append(element("th", video.prompt, { scope: "row" }));
    for (const each of video.of) {
      const ends = each ? [each.entries[0], each.entries[Math.max(...Object.keys(each.entries))]] : [];
      for (const end of [0, 1]) row.insertCell().textContent = format(ends[end]?.reward ?? NaN);
      row.insertCell().append(gainText(each?.gain ?? NaN));
    }
  }
  table.replaceChildren(head.parentElement, body);
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
