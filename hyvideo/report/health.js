// The page "Is it healthy?": the metrics to look at first, the stages of an iteration and the GPUs.
function redrawAll() {
  const [, run] = RUNS[0];
  redraw(() => {
    DATA.checks.forEach(({ title, metric }, place) => {
      if (!metric) return;
      document.querySelector(`#check-${place}`).classList.toggle("attention", Boolean(document.querySelector(`#check-${place} b`)));
      draw(`#check-${place} .plots`, title, traces(metric, metric), { height: 150, margin: { l: 48, r: 12, t: 6, b: 32 }, isKept: true });
    });
    if (run.timeline) drawTimeline("#timeline", run.timeline);
    const { minutes, gpus } = DATA.gpus;
    const of = (key) => gpus.map((gpu, place) => ({ type: "scatter", mode: minutes.length < 3 ? "lines+markers" : "lines", x: minutes, y: gpu[key], name: `GPU ${place}: ${gpu.name}`, line: { color: colourOf(place), width: 2 } })).filter((trace) => trace.y.some(Number.isFinite));
    const over = { x: "minutes before now", isKept: true, showlegend: true };
    draw("#memory", "GPU memory", of("memory_gib"), { ...over, unit: "GiB", note: gpus.length ? `of ${number(Math.max(...gpus.map((gpu) => gpu.total_gib)))} GiB` : "", yaxis: { rangemode: "tozero" } });
    draw("#memory", "GPU utilisation", of("utilisation"), { ...over, unit: "%", yaxis: { range: [0, 100] } });
    draw("#memory", "GPU power", of("watts"), { ...over, unit: "W", yaxis: { rangemode: "tozero" } });
    draw("#memory", "Peak memory of the main process, by iteration", traces("memory/peak_gib", "peak"), { unit: "GiB", yaxis: { rangemode: "tozero" }, isKept: true });
  });
}

readData(byId("data").textContent);
byId("other")?.addEventListener("change", ({ target }) => { location.href = `health?name=${encodeURIComponent(target.value)}`; });
redrawAll();
startRefresh();
