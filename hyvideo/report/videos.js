// Playing of the videos of a page: those on screen, those of a card in step.
let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Plays the videos of a card in step: all restart when the longest has ended. */
function inStep(card) {
  const clips = [...card.querySelectorAll("video")];
  const restart = () => {
    if (!clips.every((clip) => clip.ended)) return;
    clips.forEach((clip) => { clip.currentTime = 0; });
    if (playing) clips.forEach((clip) => clip.play().catch(() => {}));
  };
  clips.forEach((clip) => clip.addEventListener("ended", restart));
}

/** Loads a video with an embedded clip only near the screen: a browser plays at most 75 videos of a page. */
function load(clip, isNear) {
  if (!clip.dataset.clip || isNear === clip.hasAttribute("src")) return;
  if (isNear) return void (clip.src = clipUrl(clip.dataset.clip));
  if (clip.videoWidth) clip.style.aspectRatio = `${clip.videoWidth} / ${clip.videoHeight}`;
  clip.removeAttribute("src");
  clip.load();
}

const visible = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  target.querySelectorAll("video").forEach((clip) => {
    load(clip, isIntersecting);
    if (isIntersecting && playing) clip.play().catch(() => {});
    else clip.pause();
  });
}), { rootMargin: "50%" });

function togglePlay() {
  playing = !playing;
  if (byId("play")) byId("play").firstChild.textContent = playing ? "Pause all " : "Play all ";
  document.querySelectorAll(".gallery video").forEach((clip) => {
    if (!playing) return clip.pause();
    if (clip.ended) clip.currentTime = 0;
    clip.play().catch(() => {});
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "k" && !event.ctrlKey && !event.metaKey && !event.altKey && event.target.tagName !== "SELECT") togglePlay();
});
if (!playing && byId("play")) byId("play").firstChild.textContent = "Play all ";
