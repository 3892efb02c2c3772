"""Videos in the layout of the official tools: their names and seeds, made by two processes."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hyvideo.data.videos import read_video
from scripts import benchmark_videos
from studies.benchmarks import LAYOUTS, list_clips
from tests.distributed.launch import start

COMMON = ["--config", "configs/smoke.yaml", "--validation_steps", "1", "--num_threads", "1"]
COMMON += ["--validation_cfg_scale", "1"]
UP, LEFT = "a red circle moves up", "a green triangle moves left"


def write_list(path, rows):
    """Write a list in the form of the official ones."""
    content = [{"prompt_en": prompt, "dimension": dimensions} for prompt, dimensions in rows]
    path.write_text(json.dumps(content))
    return path


def test_vbench_has_one_folder_and_a_prompt_of_two_dimensions_is_made_once(tmp_path):
    path = write_list(
        tmp_path / "list.json",
        [(UP, ["scene", "temporal_flickering"]), (LEFT, ["color"])],
    )
    clips = list_clips(LAYOUTS["vbench"], path, dimensions=[], num_videos=None)
    assert len(clips) == 25 + 5
    assert clips[3, LEFT] == [f"{LEFT}-3.mp4"]
    assert clips[3, UP] == [f"{UP}-3.mp4"] and clips[24, UP] == [f"{UP}-24.mp4"]
    assert [number for number, _ in clips][:3] == [0, 0, 1]
    chosen = list_clips(LAYOUTS["vbench"], path, dimensions=["color"], num_videos=2)
    assert list(chosen) == [(0, LEFT), (1, LEFT)]


def test_vbench2_has_a_folder_for_each_dimension_and_cuts_long_prompts(tmp_path):
    long = "a " * 100
    path = write_list(tmp_path / "list.json", [(long, ["Diversity", "Material"])])
    clips = list_clips(LAYOUTS["vbench2"], path, dimensions=[], num_videos=None)
    assert len(clips) == 20
    assert clips[2, long] == [f"{name}/{long[:180]}-2.mp4" for name in ("Diversity", "Material")]
    assert clips[3, long] == [f"Diversity/{long[:180]}-3.mp4"]


@pytest.mark.slow
def test_two_ranks_share_the_videos_and_a_repeat_keeps_complete_ones(tmp_path, tiny_config):
    path = write_list(
        tmp_path / "list.json", [(UP, ["Mechanics"]), (LEFT, ["Mechanics"]), (UP, ["Material"])]
    )
    rewritten = tmp_path / "rewritten.csv"
    rewritten.write_text(f"prompt,original_prompt\n{UP} slowly,{UP}\n{LEFT},{LEFT}\n")
    out = tmp_path / "my out"
    words = ["--layout", "vbench2", "--prompts", path, "--output_dir", out, *COMMON]
    words += ["--augmented", rewritten, "--policies", "base", "base@2"]
    ends = start(2, "-m", "scripts.benchmark_videos", *words)
    assert [end.exception() for end in ends] == [None, None]

    names = [f"Mechanics/{prompt}-{number}.mp4" for prompt in (UP, LEFT) for number in range(3)]
    names += [f"Material/{UP}-{number}.mp4" for number in range(3)]
    videos = {}
    for policy in ("base", "base@2"):
        folder = out / policy / "videos"
        files = {str(file.relative_to(folder)) for file in folder.glob("*/*")}
        assert files == set(names)  # nothing but videos
        videos[policy] = [read_video(folder / name)[0] for name in names]
    for base, guided in zip(videos["base"], videos["base@2"]):
        assert not torch.equal(base, guided)
    assert torch.equal(videos["base"][0], videos["base"][6])  # one prompt in two dimensions
    assert len({video.numpy().tobytes() for video in videos["base"]}) == 6
    records = {
        policy: [json.loads(file.read_text()) for file in sorted(out.glob(f"{policy}/made/*.json"))]
        for policy in videos
    }
    seeds = [(record["seed"], record["prompt"]) for record in records["base"]]
    assert seeds == [(record["seed"], record["prompt"]) for record in records["base@2"]]
    assert len({seed for seed, _ in seeds}) == 6
    assert {prompt for _, prompt in seeds} == {f"{UP} slowly", LEFT}

    finished, incomplete = ((out / "base/videos" / name).resolve() for name in names[:2])
    time, content = finished.stat().st_mtime_ns, incomplete.read_bytes()
    incomplete.with_suffix(".json").unlink()  # interrupted before its JSON file
    incomplete.write_bytes(b"half")
    benchmark_videos.main([*map(str, words)])
    assert incomplete.read_bytes() == content and finished.stat().st_mtime_ns == time


# temporal_flickering calls nothing of torchvision, which the package imports at its start and which
# does not load beside a torch of another build.
OFFICIAL_PROGRAM = """
import sys
from unittest.mock import MagicMock
for name in ("torchvision", "torchvision.transforms"):
    sys.modules[name] = MagicMock()
from vbench import VBench
prompts, videos, out = sys.argv[1:]
VBench("cpu", prompts, out).evaluate(videos, "ours", dimension_list=["temporal_flickering"], local=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("vbench", "decord", "cv2"))), reason="needs tests/real_packages.txt"
)
def test_the_program_of_vbench_scores_our_folder_by_its_own_list(tmp_path):
    package = Path(find_spec("vbench").origin).parent
    rows = json.loads((package / "VBench_full_info.json").read_text())
    chosen = [row for row in rows if "temporal_flickering" in row["dimension"]][:4]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(chosen))
    words = ["--layout", "vbench", "--prompts", prompts, "--output_dir", tmp_path, *COMMON]
    words += ["--policies", "base", "--dimensions", "temporal_flickering", "--videos_per_prompt", 2]
    benchmark_videos.main([*map(str, words)])
    videos = tmp_path / "base" / "videos"
    ended = subprocess.run(
        [sys.executable, "-c", OFFICIAL_PROGRAM, prompts, videos, tmp_path / "scores"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads((tmp_path / "scores" / "ours_eval_results.json").read_text())
    mean, each = answer["temporal_flickering"]
    names = {f"{row['prompt_en']}-{number}.mp4" for row in chosen for number in range(2)}
    assert {Path(row["video_path"]).name for row in each} == names
    for row in each:
        frames = read_video(Path(row["video_path"]))[0].float()
        expected = 1 - (frames[1:] - frames[:-1]).abs().mean().item() / 255
        assert row["video_results"] == pytest.approx(expected, abs=1e-6)
    assert mean == pytest.approx(sum(row["video_results"] for row in each) / len(each))
