"""Layout, text and atomic writing of the contact sheet."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from hyvideo.data.videos import read_video, write_video
from hyvideo.records.contact_sheet import contact_sheet, even_indices, read_sheet_frames


def plain_clip(
    color: tuple[int, int, int], num_frames: int = 9, height: int = 32, width: int = 32
) -> torch.Tensor:
    return torch.tensor(color, dtype=torch.uint8)[None, :, None, None].repeat(
        num_frames, 1, height, width
    )


def pixels(path) -> np.ndarray:
    """Shape: (height, width, channels)."""
    return np.array(Image.open(path).convert("RGB"))


def where(picture: np.ndarray, color: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.nonzero((picture == np.array(color, dtype=np.uint8)).all(axis=-1))


def before_after(path, prompts, before, after, captions):
    contact_sheet(path, prompts, {"before": before, "after": after}, captions)


RED, GREEN, BLUE, YELLOW = (230, 10, 10), (10, 200, 10), (10, 10, 230), (230, 230, 10)


def test_columns_and_rows_are_in_order(tmp_path):
    path = tmp_path / "sheet.png"
    before_after(
        path,
        ["first", "second"],
        [plain_clip(RED), plain_clip(GREEN)],
        [plain_clip(BLUE), plain_clip(YELLOW)],
        ["", ""],
    )
    picture = pixels(path)
    spots = {color: where(picture, color) for color in (RED, GREEN, BLUE, YELLOW)}
    assert len({len(rows) for rows, _ in spots.values()}) == 1 and len(spots[RED][0]) > 5 * 80 * 80
    assert spots[RED][1].max() + 20 < spots[BLUE][1].min()
    assert spots[GREEN][1].max() + 20 < spots[YELLOW][1].min()
    assert spots[RED][0].max() < spots[GREEN][0].min()
    assert set(spots[RED][0]) == set(spots[BLUE][0])
    assert set(spots[RED][1]) == set(spots[GREEN][1])
    assert [file.name for file in tmp_path.iterdir()] == ["sheet.png"]


def test_large_frames_are_averaged_and_small_ones_are_kept(tmp_path):
    stripes = (
        (torch.arange(480) % 3 * 100).to(torch.uint8)[None, None, :, None].expand(5, 3, 480, 864)
    )
    write_video(tmp_path / "large.mp4", stripes, 8)
    frames = read_sheet_frames(tmp_path / "large.mp4")
    assert frames.shape == (5, 3, 160, 288) and (frames.float() - 100).abs().max() < 10
    write_video(tmp_path / "small.mp4", plain_clip(RED), 8)
    whole, _ = read_video(tmp_path / "small.mp4")
    assert torch.equal(read_sheet_frames(tmp_path / "small.mp4"), whole[even_indices(9)])


def test_a_crash_leaves_no_partial_picture(tmp_path, monkeypatch):
    def crash(self, file, **kwargs):
        with open(file, "wb") as half:
            half.write(b"half")
        raise RuntimeError("disk full")

    monkeypatch.setattr(Figure, "savefig", crash)
    with pytest.raises(RuntimeError, match="disk full"):
        before_after(tmp_path / "sheet.png", ["p"], [plain_clip(RED)], [plain_clip(RED)], [""])
    assert not list(tmp_path.iterdir())
