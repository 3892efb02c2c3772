"""Chromium for the tests that open a page: one on PATH, or playwright's own."""

from contextlib import contextmanager

import pytest

from studies.figures.screenshots import chromium_of


@contextmanager
def start_chromium():
    """Context manager that yields a browser of playwright.

    Skips the test without playwright or Chromium.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as running:
        try:
            path = chromium_of(running)
        except ValueError as problem:
            pytest.skip(str(problem))
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
