"""Videos in the layout of the official tools: made by two ranks, resumed, and measured without
weights.
"""

import json

import pytest
import torch

from hyvideo.data.videos import read_video
from scripts import benchmark_videos
from tests.distributed.launch import start
from tests.studies.benchmarks.test_suites import write_list

COMMON = [
    "--config",
    "configs/smoke.yaml",
    "--validation_steps",
    "1",
    "--num_threads",
    "1",
    "--any_list",
    "true",
]
COMMON += ["--validation_cfg_scale", "1"]
ROWS = [
    ("a red circle moves up", ["Mechanics"]),
    ("a green triangle moves left", ["Mechanics"]),
    ("a red circle moves up", ["Material"]),
]


def words(folder, *more, rows=ROWS, policies=("base", "base@2")):
    path = write_list(folder / "list.json", rows)
    return [
        "make",
        "--prompts",
        path,
        "--output_dir",
        folder / "my out",
        "--policies",
        *policies,
        *COMMON,
        *more,
    ]


def run(capsys, *arguments):
    """Run the program; return its output, or its error message."""
    try:
        benchmark_videos.main([*map(str, arguments)])
    except SystemExit as end:
        assert end.code == 2
        return capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_share_the_videos_and_a_restart_makes_missing_ones(tmp_path, tiny_config, capsys):
    ends = start(2, "-m", "scripts.benchmark_videos", *words(tmp_path, policies=["base"]))
    assert [end.exception() for end in ends] == [None, None]
    out = tmp_path / "my out"
    names = [f"Mechanics/{prompt}-{number}.mp4" for prompt, _ in ROWS[:2] for number in range(3)]
    names += [f"Material/{ROWS[2][0]}-{number}.mp4" for number in range(3)]
    finished, bad = ((out / "base/videos" / name).resolve() for name in names[:2])
    before, frames = finished.stat().st_mtime_ns, bad.read_bytes()
    bad.with_suffix(".json").unlink()  # interrupted before its JSON file
    bad.write_bytes(b"half")
    (out / "base/made/.x.mp4.1.partial").write_bytes(b"")
    printed = run(capsys, *words(tmp_path, "--dry_run"))
    assert "VBench-2.0: 3 prompts (2 different), 6 videos for each policy" in printed
    assert "base: 5 videos complete, 1 to make" in printed and bad.read_bytes() == b"half"

    printed = run(capsys, *words(tmp_path))
    assert bad.read_bytes() == frames and finished.stat().st_mtime_ns == before
    assert (
        "for D in Mechanics Material; do\n  python evaluate.py --full_json_dir "
        f"{tmp_path}/list.json" in printed
    )
    assert (
        f"--videos_path '{out}/base'/videos/$D --dimension $D --output_path '{out}/base'/results/$D"
        in printed
    )
    for policy in ("base", "base@2"):
        files = {
            str(file.relative_to(out / policy / "videos"))
            for file in out.glob(f"{policy}/videos/*/*")
        }
        assert files == set(names)  # nothing but videos
    videos = {
        name: [read_video(out / p / "videos" / name)[0] for p in ("base", "base@2")]
        for name in names
    }
    assert not any(torch.equal(base, guided) for base, guided in videos.values())
    assert torch.equal(videos[names[0]][0], videos[names[6]][0])  # one prompt in two dimensions
    assert len({base.numpy().tobytes() for base, _ in videos.values()}) == 6
    files = [sorted(out.glob(f"{policy}/made/*.json")) for policy in ("base", "base@2")]
    base, guided = ([json.loads(file.read_text()) for file in each] for each in files)
    assert [(r["seed"], r["prompt"]) for r in base] == [
        (r["seed"], r["prompt"]) for r in guided
    ] and len(base) == 6
    assert {r["guidance_scale"] for r in base} == {1.0} and {
        r["guidance_scale"] for r in guided
    } == {2.0}
    message = run(capsys, *words(tmp_path, "--validation_steps", "2"))
    assert "--output_dir" in message


@pytest.mark.system
def test_a_name_that_another_file_has_is_not_overwritten(tmp_path, tiny_config, capsys):
    rows = [("a red circle moves up", ["scene"])]
    other = tmp_path / "my out/base/videos/a red circle moves up-0.mp4"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"x")
    csv = tmp_path / "rewritten.csv"
    csv.write_text("prompt,original_prompt\na red circle moves up slowly,a red circle moves up\n")
    arguments = words(
        tmp_path, "--videos_per_prompt", "1", "--augmented", csv, rows=rows, policies=["base"]
    )
    assert (
        "another file has this name; delete " in run(capsys, *arguments)
        and other.read_bytes() == b"x"
    )
    other.unlink()
    printed = run(capsys, *arguments)
    assert (
        "WARNING: with --videos_per_prompt 1" in printed
        and "1 videos complete, 0 to make" in printed
    )
    video, fps = read_video(other)
    assert fps == 8 and len(video) == 5
    record = json.loads(other.resolve().with_suffix(".json").read_text())
    assert (record["prompt"], record["original_prompt"]) == (
        "a red circle moves up slowly",
        "a red circle moves up",
    )
    assert "prompt 'a red circle moves up slowly', now 'a red circle moves up'" in run(
        capsys, *words(tmp_path, "--videos_per_prompt", "1", rows=rows, policies=["base"])
    )


@pytest.mark.parametrize(
    "arguments, message",
    [(["--any_list", "false"], "Mechanics 2 instead of 57"), (["--policies", "@3"], "got '@3'")],
)
def test_invalid_flags_are_reported_before_anything_is_written(
    tmp_path, tiny_config, capsys, arguments, message
):
    assert (
        message in run(capsys, *words(tmp_path, *arguments)) and not (tmp_path / "my out").exists()
    )
