"""Several videos of one prompt side by side as one video, each under its name."""

from collections.abc import Mapping

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import pad

GAP = 4  # pixels between videos; H.264 needs an even number
WHITE = 255


def side_by_side(clips: Mapping[str, Tensor]) -> Tensor:
    """Place videos side by side, from left to right; shorter ones hold their last frame.

    Shape: uint8 (frames, 3, height, width), of one even size, to (frames, 3, label + height, clips * width + gaps).
    """
    num_frames = max(map(len, clips.values()))
    height, width = next(iter(clips.values())).shape[-2:]
    labels = _labels(list(clips), width, height)
    panels = []
    for label, clip in zip(labels, clips.values(), strict=True):
        clip = torch.cat([clip, clip[-1:].expand(num_frames - len(clip), -1, -1, -1)])
        labelled = torch.cat([label.expand(num_frames, -1, -1, -1), clip], dim=-2)
        panels.append(pad(labelled, (0, GAP), value=WHITE))
    return torch.cat(panels, dim=-1)[..., :-GAP]


def _labels(names: list[str], width: int, height: int) -> list[Tensor]:
    """Return strips with the names, in the largest font size that fits them all. Shape: uint8 (3, label, width)."""
    from matplotlib.font_manager import findfont  # slow to import

    path, size = findfont("DejaVu Sans"), max(14, height // 18)
    while size > 6 and max(ImageFont.truetype(path, size).getlength(name) for name in names) > width - 8:
        size -= 1
    strips = []
    for name in names:
        strip = Image.new("RGB", (width, 2 * size), "white")
        ImageDraw.Draw(strip).text((width / 2, size), name, "black", ImageFont.truetype(path, size), anchor="mm")
        strips.append(torch.from_numpy(np.array(strip)).permute(2, 0, 1))
    return strips
