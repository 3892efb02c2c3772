import torch

from hyvideo.records.contact_sheet import VIDEO_GAP as GAP
from hyvideo.records.contact_sheet import side_by_side


def plain(value: int, num_frames: int = 3, height: int = 64, width: int = 80) -> torch.Tensor:
    return torch.full((num_frames, 3, height, width), value, dtype=torch.uint8)


def test_videos_are_in_order_below_their_names():
    together = side_by_side({"left": plain(10), "right": plain(20)})
    label = together.shape[2] - 64
    assert together.shape == (3, 3, 64 + label, 2 * 80 + GAP) and together.dtype == torch.uint8
    assert label % 2 == 0 and together.shape[3] % 2 == 0
    assert (together[:, :, label:, :80] == 10).all() and (together[:, :, label:, 80 + GAP :] == 20).all()
    assert (together[:, :, :, 80 : 80 + GAP] == 255).all()
    left, right = together[:, :, :label, :80], together[:, :, :label, 80 + GAP :]
    assert left.min() < 100 and right.min() < 100 and not torch.equal(left, right)
    assert (together[0] == together[2]).all()


def test_a_long_name_is_written_in_a_smaller_font():
    clip = plain(0, width=256)
    together = side_by_side({"a-name-of-forty-letters-is-the-longest-x": clip, "b": clip})
    strip = together[0, 0, : together.shape[2] - 64, :256]
    assert strip.min() < 128 and (strip[:, :2] == 255).all() and (strip[:, -2:] == 255).all()
    assert len(strip) < side_by_side({"a": clip, "b": clip}).shape[2] - 64


def test_a_shorter_video_holds_its_last_frame():
    short = torch.cat([plain(10, 1), plain(20, 1)])
    together = side_by_side({"short": short, "long": plain(30, 4)})
    assert [int(frame[0, -1, 0]) for frame in together] == [10, 20, 20, 20]
