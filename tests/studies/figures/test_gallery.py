"""The gallery: a page whose pictures show the videos of each policy."""

import re

import pytest
from PIL import Image

from scripts import figures
from studies.figures import gallery
from studies.figures.moving_picture import GAP, SIDE

SETTINGS = ["--config", "configs/smoke.yaml", "--validation_steps", "1", "--cfg_scale", "1"]
PROMPTS = ["a red circle moves up", "a blue square moves left"]


@pytest.mark.system
def test_runs_are_trained_and_their_videos_shown(exit_code, forked_programs, tmp_path, monkeypatch):
    prompts = "assets/miniature/prompts/smoke.csv"
    small = ["--max_steps", "1", "--batch_size", "16", "--mini_batch_size_per_update", "16"]
    small += ["--valid_video_csv", prompts, "--validation_steps", "1", "--validation_repeats", "1"]
    monkeypatch.setattr(
        gallery, "MINIATURES", {"one": ["--config", "configs/miniature.yaml", *small]}
    )
    monkeypatch.setattr(gallery, "SUFFIXES", {"one": "@2steps"})
    monkeypatch.setattr(gallery, "PROMPTS", PROMPTS)
    out, pictures = tmp_path / "out", tmp_path / "pictures"
    words = ["--validation_steps", "1", "--num_threads", "1"]
    code = exit_code(figures.main, "gallery", *words, "--output_dir", out, "--pictures", pictures)
    assert code == 0 and (out / "runs/one/checkpoints/000001").is_dir()
    text = (out / "gallery.md").read_text()
    assert all(prompt in text for prompt in PROMPTS)
    files = [out / file for file in re.findall(r"!\[.*?\]\((.*?)\)", text)]
    names = ["gallery_base.webp", "gallery_base_3.webp", "gallery_one_2steps.webp"]
    assert [file.name for file in files] == names
    moving = [Image.open(file) for file in files]
    assert {picture.size for picture in moving} == {(2 * SIDE + GAP, SIDE)}
    assert len({picture.convert("RGB").tobytes() for picture in moving}) == 3


def test_a_missing_policy_ends_the_command(exit_code, forked_programs, tmp_path, capfd):
    words = ["--policies", "base", f"x={tmp_path / 'x'}", "--prompt", *PROMPTS]
    code = exit_code(figures.main, "gallery", *SETTINGS, *words, "--output_dir", tmp_path / "out")
    assert code == 2 and str(tmp_path / "x") in capfd.readouterr().err
    assert not (tmp_path / "out/gallery.md").exists()
