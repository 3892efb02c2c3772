"""Videos to generate, and whether their files exist. Imports no torch."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hyvideo.data.examples import LATENTS_SUFFIX, VIDEO_KEY
from hyvideo.data.prompts import Request
from hyvideo.files.files import read_text

RECORD_SUFFIX = ".json"  # of the file beside a video that has its settings


@dataclass(frozen=True)
class Video:
    """A video to generate."""

    request: Request
    height: int
    width: int
    number: int  # index in this call; the noise depends on it and on the seed
    path: Path

    @property
    def record(self) -> Path:
        """The JSON file of the settings, which is written last."""
        return self.path.with_suffix(RECORD_SUFFIX)

    @property
    def latents(self) -> Path:
        """The file of the latents, which objective dpo reads."""
        return self.path.with_suffix(LATENTS_SUFFIX)

    @property
    def before_sr(self) -> "Video":
        """The video before super-resolution."""
        return replace(self, path=self.path.with_stem(f"{self.path.stem}_before_sr"))

    @property
    def base_latents(self) -> Path:
        """The hidden file of the latents before super-resolution, until the video is written."""
        return self.path.with_name(f".{self.path.stem}.base{LATENTS_SUFFIX}")


def is_complete(video: Video, settings_hash: str, files: Iterable[Path] = ()) -> bool:
    """Return whether an earlier call has written a video with these settings, and ``files``; not
    one of whose candidates best of n could not choose the best.
    """
    if not all(file.is_file() for file in (video.path, *files)):
        return False
    try:
        record = json.loads(read_text(video.record))
        return record["settings_hash"] == settings_hash and not record["problem"]
    except (OSError, ValueError, LookupError, TypeError):  # it was not finished
        return False


def is_own(file: Path) -> bool:
    """Return whether a file beside a video has settings or latents of a video, and may be replaced;
    also if there is no such file.
    """
    if not file.exists():
        return True
    try:
        if file.suffix == LATENTS_SUFFIX:
            with safe_open(file, framework="numpy") as opened:
                return VIDEO_KEY in (opened.metadata() or {})
        content = json.loads(read_text(file))
        return isinstance(content, dict) and {"prompt", "seed"} <= content.keys()
    except (OSError, ValueError, SafetensorError):
        return False
