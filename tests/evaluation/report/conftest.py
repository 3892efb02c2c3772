"""Fixture of the tests that open a page in Chromium."""

import pytest

from tests.chromium import start_chromium


@pytest.fixture(scope="module")  # while it is open, no asyncio loop can run in this thread
def browser():
    with start_chromium() as started:
        yield started
