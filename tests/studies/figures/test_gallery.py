"""The gallery: a page whose pictures show the videos of each policy, and pictures of two pages."""

import re

import pytest
from PIL import Image

from scripts import make_gallery
from studies.figures.moving_picture import GAP, SIDE
from studies.figures.screenshots import rating_page
from tests.chromium import start_chromium

SETTINGS = ["--config", "configs/smoke.yaml", "--validation_steps", "1", "--cfg_scale", "1"]
PROMPTS = ["a red circle moves up", "a blue square moves left"]


@pytest.mark.system
def test_a_page_shows_the_videos_of_each_policy(exit_code, forked_programs, tmp_path):
    out = tmp_path / "out"
    words = ["--policies", "base", "base@2steps", "--prompt", *PROMPTS, "--output_dir", out]
    assert exit_code(make_gallery.main, *SETTINGS, *words) == 0
    text = (out / "gallery.md").read_text()
    assert all(prompt in text for prompt in PROMPTS)
    files = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert files == ["gallery_base.webp", "gallery_base_2steps.webp"]
    pictures = [Image.open(out / file) for file in files]
    assert {picture.size for picture in pictures} == {(2 * SIDE + GAP, SIDE)}
    assert pictures[0].convert("RGB").tobytes() != pictures[1].convert("RGB").tobytes()
    with (
        start_chromium() as browser,
        rating_page([out / "videos/base", out / "videos/base@2steps"]) as link,
    ):
        page = browser.new_page()
        page.goto(link)
        page.keyboard.press("Enter")
        assert any(prompt in page.inner_text("body") for prompt in PROMPTS)
        assert page.locator("video").count() == 2


def test_a_missing_policy_ends_the_command(exit_code, forked_programs, tmp_path, capfd):
    words = ["--policies", "base", f"x={tmp_path / 'x'}", "--prompt", *PROMPTS]
    code = exit_code(make_gallery.main, *SETTINGS, *words, "--output_dir", tmp_path / "out")
    assert code == 2 and str(tmp_path / "x") in capfd.readouterr().err
    assert not (tmp_path / "out/gallery.md").exists()
