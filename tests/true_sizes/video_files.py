"""Videos of true size, and checks of the files that generate.py writes for one."""

import json
import sys
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from torch import Tensor

from hyvideo.data.video_files import BT601, LIMITED_RANGE
from hyvideo.data.videos import write_video

PROMPT = "a cat walks past a sign"


def check_file(path: Path, size: tuple[int, int, int], fps: float) -> dict[str, Any]:
    """Check an mp4 file of generate.py, and return the settings in the JSON file beside it.

    The file must have frames of the right size, number, times and colors, and the JSON file must
    say the same.
    """
    frames, height, width = size
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        times = [picture.time for picture in file.decode(stream)]
        codec = stream.codec_context
        assert (codec.height, codec.width) == (height, width)
        assert (codec.colorspace, codec.color_primaries, codec.color_trc) == (BT601, BT601, BT601)
        assert codec.color_range == LIMITED_RANGE
        assert stream.average_rate == fps
        assert float(stream.duration * stream.time_base) == pytest.approx(frames / fps, abs=1e-3)
        assert file.duration / av.time_base == pytest.approx(frames / fps, abs=1e-3)
    assert times == pytest.approx([number / fps for number in range(frames)], abs=1e-3)
    settings = json.loads(path.with_suffix(".json").read_text())
    assert (settings["frames"], settings["fps"]) == (frames, fps)
    return settings


def moving_blocks(frames: int, height: int, width: int) -> Tensor:
    """Return a video of colored blocks that move to the right.

    Shape: uint8 (frames, 3, height, width).
    """
    blocks = torch.randint(
        0, 256, (3, height // 16, width // 16), generator=torch.Generator().manual_seed(0)
    )
    picture = blocks.to(torch.uint8).repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)
    return torch.stack([picture.roll(4 * frame, dims=2) for frame in range(frames)])


def write_grain(path: str) -> None:
    """Write 49 frames of moving blocks with film grain.

    The file must not depend on the memory of this process.
    """
    video = moving_blocks(49, 352, 624)
    grain = torch.randn(video.shape, generator=torch.Generator().manual_seed(1))
    write_video(path, (video / 2 + 64 + 3 * grain).to(torch.uint8), fps=24)


if __name__ == "__main__":
    write_grain(sys.argv[1])
