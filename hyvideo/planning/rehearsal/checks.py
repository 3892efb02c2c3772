"""Checks of the files that a rehearsed run leaves, against its settings."""

from collections.abc import Iterator
from pathlib import Path

from hyvideo.data.videos import mp4_factor, read_video
from hyvideo.records.metrics_file import read_metrics
from hyvideo.settings.config import Config


def video_problems(file: Path, size: tuple[int, int, int], fps: float) -> Iterator[str]:
    """Yield how an mp4 file differs from a video of ``size`` (frames, height, width) at ``fps``
    frames per second.
    """
    frames, height, width = size
    factor = mp4_factor(height, width)
    expected = (frames, 3, height * factor, width * factor)
    video, rate = read_video(file)
    if tuple(video.shape) != expected:
        yield f"{file} has the shape {tuple(video.shape)}, expected {expected}"
    if abs(rate - fps) > 1e-3:
        yield f"{file} has {rate:g} frames per second, expected {fps:g}"


def run_problems(folder: Path, config: Config, iterations: int) -> list[str]:
    """Return what is missing or wrong in the output folder of a run of ``iterations``
    iterations.
    """
    log = config.record
    records_rollouts = (
        config.objective.scores_rollouts and log.log_num_videos and log.log_video_interval
    )
    expected = {}
    for iteration in range(iterations + 1):
        if config.data.valid_video_csv:
            expected[f"samples/{iteration:06d}"] = config.validation_sampling.size
        if iteration and records_rollouts:
            expected[f"rollouts/{iteration:06d}"] = config.sampling.size
    problems = []
    for name, size in expected.items():
        files = sorted((folder / name).glob("*.mp4"))
        if not files and config.record.log_num_videos:
            problems.append(f"{folder / name} has no mp4 file")
        for file in files:
            problems += video_problems(file, size, config.data.fps)
    lines = read_metrics(folder / "metrics.jsonl")
    if [line["iteration"] for line in lines] != list(range(1, iterations + 1)):
        problems.append(
            f"metrics.jsonl has the iterations {[line['iteration'] for line in lines]}, not "
            f"{iterations}"
        )
    for line in lines:
        problems += _line_problems(line)
    if not (folder / "checkpoints" / f"{iterations:06d}").is_dir():
        problems.append(f"{folder / 'checkpoints'} has no checkpoint {iterations:06d}")
    if config.record.report and not (folder / "report.html").is_file():
        problems.append(f"{folder / 'report.html'} is missing")
    return problems


def _line_problems(line: dict[str, float]) -> Iterator[str]:
    iteration = line["iteration"]
    if line.get("reward/missing", 0) > 0:
        yield f"iteration {iteration}: {line['reward/missing']:.0%} of the rewards are missing"
    if line.get("update/skipped", 0) > 0:
        yield f"iteration {iteration}: an update was skipped, because its gradient was not finite"
