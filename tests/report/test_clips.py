"""Videos embedded in a page: which, in what form, and how the page's room is shared."""

import base64
import io
import random

import numpy as np
import pytest
import torch
from PIL import Image

from hyvideo.data.video_files import read_header
from hyvideo.data.videos import read_video, write_video
from hyvideo.report import clips
from hyvideo.report.clips import embed, fair_share
from tests.full_size import NUM_FRAMES, write_full_size

ROOM = 300_000  # bytes


@pytest.fixture(autouse=True)
def _empty_cache():
    clips._preview.cache_clear()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A short clip of 480 x 864, larger than ``ROOM``."""
    return write_full_size(tmp_path_factory.mktemp("large") / "large.mp4", num_frames=5)


@pytest.fixture
def small(tmp_path):
    """Three different clips of the miniature's size."""
    files = [tmp_path / f"small{number}.mp4" for number in range(3)]
    for number, file in enumerate(files):
        write_video(file, torch.full((5, 3, 32, 32), 80 * number, dtype=torch.uint8), 8)
    return files


@pytest.fixture
def encoded(monkeypatch):
    """The files of which previews are made."""
    files, encode = [], clips.encode_preview
    monkeypatch.setattr(
        clips, "encode_preview", lambda file, **limit: files.append(file) or encode(file, **limit)
    )
    return files


def content(found, file):
    return base64.b64decode(found.contents[found.digests[file]])


def test_large_files_share_the_room_that_small_ones_leave():
    assert fair_share([10, 100, 20, 100], 130) == 50
    assert fair_share([10, 20], 130) == 20  # all fit
    assert fair_share([], 130) == 0
    draw = random.Random(0)
    for _ in range(100):
        sizes = [draw.randint(1, 100) for _ in range(draw.randint(1, 9))]
        room = draw.randint(1, 400)
        share = fair_share(sizes, room)
        assert sum(min(size, share) for size in sizes) <= room
        assert share == max(sizes) or sum(min(size, share + 1) for size in sizes) > room


def test_small_files_are_embedded_as_they_are(small, encoded):
    found = embed([small[:1], small[1:]])
    assert [content(found, file) for file in small] == [file.read_bytes() for file in small]
    assert not encoded and not found.originals


def test_a_poster_is_the_first_frame(small, large):
    """It shows what the video shows before it plays, also in a print."""
    found = embed([small, [large]])
    for file in (*small, large):
        picture = Image.open(io.BytesIO(base64.b64decode(found.posters[found.digests[file]])))
        frame = read_video(file)[0][0]
        assert picture.size[::-1] == tuple(
            256 * side // min(frame.shape[1:]) for side in frame.shape[1:]
        )
        color = np.asarray(picture.convert("RGB")).mean((0, 1))
        assert np.abs(color - frame.float().mean((1, 2)).numpy()).max() < 4
        assert len(found.posters[found.digests[file]]) <= clips.MAX_POSTER_BYTES * 4 / 3 + 4


@pytest.mark.slow
def test_a_large_video_becomes_a_preview_and_hides_no_other(full, small, encoded):
    """It is the first: the worst video is often noise, and its file the largest."""
    found = embed([[full, full], *([file] for file in small)])
    assert found.digests.keys() == {full, *small} and encoded == [full]
    assert found.originals == {found.digests[full]: f"{full.stat().st_size / 1e6:.3g} MB"}
    preview = full.with_name("preview.mp4")
    preview.write_bytes(content(found, full))
    assert preview.stat().st_size <= clips.MAX_PREVIEW_BYTES
    assert read_header(preview) == (NUM_FRAMES, 256, 460, 24.0)
    colors = [read_video(file)[0][::40].float().mean((0, 2, 3)) for file in (preview, full)]
    assert (colors[0] - colors[1]).abs().max() < 2


def test_a_row_that_does_not_fit_is_left_out_as_a_whole(small):
    sizes = [file.stat().st_size + clips.MAX_POSTER_BYTES for file in small]
    assert embed([small[:2], small[2:]], sizes[0] + sizes[1]).digests.keys() == {*small[:2]}
    assert embed([small[:2], small[2:]], sizes[2]).digests.keys() == {small[2]}


def test_a_file_that_cannot_be_read_is_left_out(small, tmp_path, encoded):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video" * 100_000)
    found = embed([[broken], *([file] for file in small)], ROOM)
    assert not encoded and found.digests.keys() == {*small}
