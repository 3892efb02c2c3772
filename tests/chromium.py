"""Chromium for the tests that open a page: one on PATH, or playwright's own."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def start_chromium():
    """Context manager that yields a browser of playwright.

    Skips the test without playwright or Chromium.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as running:
        on_path = (path for path in map(shutil.which, NAMES) if path)
        path = next(on_path, running.chromium.executable_path)
        if not Path(path).is_file():
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
