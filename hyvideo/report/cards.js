// Validation videos before and after training, the same prompt and seed on a card.
const MAX_CARD_RUNS = 4;  // runs whose videos a card shows

const urls = new Map();
function clipUrl(digest) {
  if (!urls.has(digest)) {
    urls.set(digest, URL.createObjectURL(new Blob([bytesOf(DATA.clips[digest])], { type: "video/mp4" })));
  }
  return urls.get(digest);
}

/** Link to the file of a video that is shown as a preview. */
function fileLink(entry) {
  return element("a", `full size, ${DATA.originals[entry.clip]}`, { href: entry.file, target: "_blank", rel: "noopener" });
}

function player(digest, label) {
  const poster = DATA.posters[digest] ? `data:image/webp;base64,${DATA.posters[digest]}` : "";
  const clip = element("video", undefined, { muted: true, playsInline: true, preload: "auto", tabIndex: 0, poster });
  clip.dataset.clip = digest;
  clip.setAttribute("aria-label", label);
  clip.setAttribute("muted", "");
  return clip;
}

const cardRuns = () => shownRuns().slice(0, MAX_CARD_RUNS);
const hasClip = (video) => Boolean(video?.before?.clip || video?.after?.clip);

/** Videos of the same prompt, seed and number in the shown runs. */
function comparedVideos() {
  const found = new Map();
  const runs = cardRuns();
  runs.forEach(([, run], place) => {
    for (const video of run.videos) {
      const { prompt, seed, number, drawn } = video;
      const key = JSON.stringify([prompt, seed, number]);
      if (!found.has(key)) found.set(key, { prompt, seed, number, drawn, of: runs.map(() => null) });
      found.get(key).of[place] = video;
    }
  });
  for (const video of found.values()) {
    const gains = video.of.map((each) => each?.gain).filter(Number.isFinite);
    video.gain = gains.length ? gains.reduce((a, b) => a + b) / gains.length : NaN;
  }
  return [...found.values()];
}

const ORDERS = {
  drawn: (a, b) => a.drawn - b.drawn,
  worst: (a, b) => a.gain - b.gain,
  best: (a, b) => b.gain - a.gain,
  number: (a, b) => a.number - b.number,
};
let numShown = 6;

function gainText(gain) {
  if (!Number.isFinite(gain)) return element("span", "no gain available");
  return element("b", signed(gain), { className: gain < 0 ? "down" : "up" });
}

function card(video) {
  const made = element("article");
  const clips = element("div", undefined, { className: "clips" });
  const runs = cardRuns();
  made.append(element("h3", video.prompt), clips);
  const add = (entry, title) => {
    const figure = clips.appendChild(element("figure"));
    const caption = element("figcaption", `${title}: ${format(entry.reward ?? NaN)}`);
    if (entry.clip in DATA.originals) caption.append(" ", fileLink(entry));
    figure.append(player(entry.clip, `${title}: ${video.prompt}`), caption);
  };
  const bases = new Set();  // the base model of several runs is shown once
  for (const each of video.of) {
    const base = each?.before;
    if (!base?.clip || bases.has(base.clip)) continue;
    bases.add(base.clip);
    add(base, "before");
  }
  video.of.forEach((each, place) => {
    if (!each) return;
    if (each.after?.clip) add(each.after, RUNS.length > 1 ? runs[place][0] : "after");
    made.append(scoreLine(each, runs[place][0]));
  });
  clips.style.setProperty("--clips", Math.min(5, clips.childElementCount));
  made.append(element("small", `seed ${video.seed}, video ${video.number}`));
  inStep(made);
  return made;
}

/** Differences between the scores after and before training. */
function scoreLine({ before, after, gain }, run) {
  const line = element("p", RUNS.length > 1 ? `${run} ` : "", { className: "chips" });
  const chip = (name, value) => line.appendChild(element("span", `${name} `)).append(value);
  chip("reward", gainText(gain ?? NaN));
  for (const [name, value] of Object.entries(after?.scores ?? {})) {
    const base = before?.scores[name];
    if (Number.isFinite(value) && Number.isFinite(base)) chip(name, signed(value - base));
  }
  return line;
}

function drawGallery() {
  const gallery = byId("gallery");
  const videos = comparedVideos().filter(({ of }) => of.some(hasClip)).sort(ORDERS[byId("order").value]);
  gallery.querySelectorAll("article").forEach((each) => visible.unobserve(each));
  gallery.replaceChildren(...videos.slice(0, numShown).map(card));
  gallery.querySelectorAll("article").forEach((each) => visible.observe(each));
  byId("more").hidden = videos.length <= numShown;
  const left = shownRuns().length - cardRuns().length;
  byId("left-out").textContent = left > 0 ? `Videos of the first ${MAX_CARD_RUNS} of ${left + MAX_CARD_RUNS} selected runs are shown; select others in the table.` : "";
  const counts = [...gallery.querySelectorAll("article")].map((each) => each.querySelectorAll("video").length);
  document.body.style.setProperty("--clips", Math.min(5, Math.max(DATA.folders.length, ...counts)));
}

function drawPrompts() {
  const head = element("tr");
  const body = element("tbody");
  head.append(element("th", "Prompt", { scope: "col" }));
  for (const [run] of cardRuns()) {
    for (const what of ["before", "after", "gain"]) head.append(element("th", RUNS.length > 1 ? `${run} ${what}` : what, { scope: "col" }));
  }
  for (const video of comparedVideos().sort(ORDERS.worst).slice(0, 500)) {
    const row = body.insertRow();
    row.append(element("th", video.prompt, { scope: "row" }));
    for (const each of video.of) {
      for (const entry of [each?.before, each?.after]) row.insertCell().textContent = format(entry?.reward ?? NaN);
      row.insertCell().append(gainText(each?.gain ?? NaN));
    }
  }
  byId("prompts").replaceChildren(element("thead"), body);
  byId("prompts").tHead.append(head);
}

/** Videos of folders, the same prompt, image and seed side by side. */
function drawFolders() {
  byId("matched").append(...DATA.rows.map((row) => {
    const first = row.find(Boolean);
    const made = element("article");
    made.append(element("h3", first.prompt));
    const clips = made.appendChild(element("div", undefined, { className: "clips" }));
    clips.style.setProperty("--clips", Math.min(5, row.length));
    row.forEach((video, place) => {
      const figure = clips.appendChild(element("figure"));
      const caption = element("figcaption", DATA.folders[place].replace(/[/_]/g, "$&\u200b"));
      if (video?.clip in DATA.originals) caption.append(" ", fileLink(video));
      if (video?.clip) figure.append(player(video.clip, `${DATA.folders[place]}: ${video.prompt}`));
      else figure.append(element("p", video ? "cannot be read" : "no such video", { className: "quiet" }));
      figure.append(caption);
    });
    made.append(element("small", `seed ${first.seed ?? "–"}${first.image && first.image !== "–" ? `, image ${first.image}` : ""}`));
    inStep(made);
    visible.observe(made);
    return made;
  }));
}
