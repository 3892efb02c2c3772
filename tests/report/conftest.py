"""Fixtures: Chromium, and a video of the size of real runs."""

import pytest

from tests.chromium import start_chromium
from tests.full_size import write_full_size


@pytest.fixture(scope="module")  # while it is open, no asyncio loop can run in this thread
def browser():
    with start_chromium() as started:
        yield started


@pytest.fixture(scope="package")
def full(tmp_path_factory):
    """A file of 121 frames of 480 x 864, larger than the whole room for videos in a page."""
    return write_full_size(tmp_path_factory.mktemp("full") / "full.mp4")
