"""Frames of a video if no flag gives them: those of the run's validation, not those of its
rollouts, which may be shorter to save time.
"""

import json

import generate
from hyvideo.data.video_files import read_header
from tests.forked import ROOT


def test_a_video_has_the_frames_of_the_validation(tmp_path, exit_code):
    base = (ROOT / "configs/miniature.yaml").read_text()
    kept = [line for line in base.splitlines() if not line.startswith("sample_n_frames")]
    kept = [line for line in kept if not line.startswith("output_dir")]
    (tmp_path / "run.yaml").write_text(
        "\n".join([*kept, "sample_n_frames: 9", "validation_num_frames: 5"])
    )
    flags = ["--config", tmp_path / "run.yaml", "--prompt", "a red circle moves up"]
    root = ["--pretrained_model_root", ROOT / "assets/miniature", "--num_threads", 1]
    assert exit_code(generate.main, *flags, *root, "--output_path", tmp_path / "videos") == 0
    assert read_header(tmp_path / "videos/0000.mp4").num_frames == 5
    assert json.loads((tmp_path / "videos/0000.json").read_text())["frames"] == 5
