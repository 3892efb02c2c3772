"""Videos that a run saves."""

from pathlib import Path

from torch import Tensor

from hyvideo.data.videos import write_video
from hyvideo.files.run_folder import claim


def write_videos(
    folder: Path, videos: dict[int, Tensor], fps: float, *, run: str = ""
) -> dict[int, str]:
    """Write videos as 000.mp4, 001.mp4, ... and return the file names by number.

    ``run`` marks the folder (`data.run_folder.claim`). Raises FileExistsError if something else has
    its name.
    """
    claim(folder, run)
    names = {number: f"{number:03d}.mp4" for number in videos}
    for number, video in videos.items():
        write_video(folder / names[number], video, fps)
    return names
