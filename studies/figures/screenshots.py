"""Screenshots of the report of a run and of the rating page, in Chromium."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import imageio.v3 as imageio

from hyvideo.data.files import ROOT, publish
from studies.steps import run

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1100, "height": 800}
WAIT_MS = 1500  # until videos and curves are drawn
WEBP_QUALITY = 85


def chromium_of(running) -> str:
    """Return the program of Chromium, on PATH or playwright's own; ``running`` is playwright.

    Raises ValueError if there is none.
    """
    path = next(filter(None, map(shutil.which, NAMES)), running.chromium.executable_path)
    if not Path(path).is_file():
        raise ValueError("needs Chromium: apt-get install chromium, or playwright install chromium")
    return path


def screenshots(reports: list[Path], videos: list[Path], out: Path) -> list[Path]:
    """Write a picture of each report, named after its run, and of the page that asks which of two
    videos is better; return their paths.

    ``videos`` are two folders with videos of the same prompts. Raises ValueError without playwright
    or Chromium.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise ValueError("needs playwright: pip install -r requirements-dev.txt") from error
    written = []
    with sync_playwright() as running:
        program = chromium_of(running)
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for report in reports:
            path = out / f"report_{report.parent.name}.webp"
            written.append(_shoot(browser, report.resolve().as_uri(), path))
        with rating_page(videos) as link:
            written.append(_shoot(browser, link, out / "rating_page.webp"))
        browser.close()
    return written


@contextmanager
def rating_page(folders: list[Path]) -> Iterator[str]:
    """Context manager that yields the link of a page with pairs of videos, one of each folder.

    Raises ValueError if the folders do not fit together.
    """
    with tempfile.TemporaryDirectory() as place:
        study = f"{place}/study"
        program = [sys.executable, "-m", "scripts.preference_study"]
        methods = [f"{letter}={folder.resolve()}" for letter, folder in zip("AB", folders)]
        code = run([*program, "make", study, "--raters", 1, "--checks", 0, "--methods", *methods])
        if code:
            raise ValueError(f"the preference study could not be made, exit code {code}")
        command = [*program, "serve", study, "--port", "0"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            try:
                yield server.stdout.readline().split()[1]
            finally:
                server.terminate()


def _shoot(browser, link: str, path: Path) -> Path:
    page = browser.new_page(viewport=SIZE)
    page.goto(link)
    page.keyboard.press("Enter")  # begins to rate
    page.wait_for_timeout(WAIT_MS)
    pixels = imageio.imread(page.screenshot(), extension=".png")
    page.close()
    with publish(path) as aside:
        imageio.imwrite(aside, pixels[..., :3], extension=".webp", quality=WEBP_QUALITY)
    return path
