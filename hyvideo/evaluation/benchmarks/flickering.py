"""VBench's temporal_flickering, which needs no weights: 1 - mean |frame - next frame| / 255.

The official dimension is that of static videos (VBench's static filter); otherwise it also rewards still videos.
"""

from pathlib import Path

from torch import Tensor

from hyvideo.data.videos import read_video
from hyvideo.records.run_files import write_json


def temporal_flickering(video: Tensor) -> float:
    """Return the score of a uint8 video with at least two frames. Shape: (frames, 3, height, width)."""
    frames = video.float()
    return 1 - (frames[1:] - frames[:-1]).abs().mean((1, 2, 3)).double().mean().item() / 255


def measure_flickering(folder: Path, out: Path) -> float:
    """Return the mean score of the mp4 files in a folder, and write a result file in the official form."""
    rows = [
        {"video_path": str(p), "video_results": temporal_flickering(read_video(p)[0])} for p in folder.glob("*.mp4")
    ]
    if not rows:
        raise ValueError(f"--videos must be a folder of mp4 files, got none in {folder}")
    score = sum(row["video_results"] for row in rows) / len(rows)
    write_json(out / "flickering_eval_results.json", {"temporal_flickering": [score, rows]})
    return score
