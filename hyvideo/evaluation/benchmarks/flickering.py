"""VBench's temporal_flickering, which needs no weights, by its definition."""

from pathlib import Path

from torch import Tensor

from hyvideo.data.videos import read_video
from hyvideo.records.run_files import write_json


def temporal_flickering(video: Tensor) -> float:
    """Return 1 - mean |frame - next frame| / 255 of a uint8 video. Shape: (two or more frames, 3, height, width)."""
    frames = video.float()
    return 1 - (frames[1:] - frames[:-1]).abs().mean((1, 2, 3)).double().mean().item() / 255


def measure_flickering(folder: Path, out: Path) -> float:
    """Return the mean score of the mp4 files in a folder, and write a result file in the official form."""
    scores = {str(path): temporal_flickering(read_video(path)[0]) for path in sorted(folder.glob("*.mp4"))}
    if not scores:
        raise ValueError(f"--videos must be a folder of mp4 files, got none in {folder}")
    mean = sum(scores.values()) / len(scores)
    rows = [{"video_path": path, "video_results": score} for path, score in scores.items()]
    write_json(out / "flickering_eval_results.json", {"temporal_flickering": [mean, rows]})
    return mean
