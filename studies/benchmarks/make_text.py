"""What `scripts.benchmark_videos make` prints: the videos to make, and then the commands of the
official tool.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hyvideo.settings.sections import DataSettings
from studies.benchmarks.suites import Suite
from studies.benchmarks.videos import BenchmarkVideos, Row

# VBench measures this dimension on videos that pass its static filter
FILTERED = "temporal_flickering"


def plan_lines(
    suite: Suite,
    rows: Sequence[Row],
    policies: Sequence[BenchmarkVideos],
    num_pending: Sequence[int],
    data: DataSettings,
    videos_per_prompt: int | None,
) -> list[str]:
    """Return the number of videos, complete and to make (``num_pending``, by policy), and
    warnings.
    """
    seconds = data.sample_n_frames / data.fps
    number = len(policies[0].clips)
    num_different = len({prompt for prompt, _ in rows})
    prompts = f"{len(rows)} prompts"
    if num_different < len(rows):
        prompts += f" ({num_different} different)"
    length = f"{data.sample_n_frames} frames at {data.fps:g} fps = {seconds:.2f} s"
    lines = [f"{suite.title}: {prompts}, {number} videos for each policy, {length}"]
    for policy, left in zip(policies, num_pending):
        lines.append(f"{policy.folder.name}: {number - left} videos complete, {left} to make")
    if _is_long(suite, data):
        lines.append(
            f"WARNING: from {suite.long_seconds:g} s on, {suite.title} asks for VBench-Long, whose "
            "scores are others; shorten the videos with --validation_num_frames"
        )
    if videos_per_prompt:
        warning = (
            f"WARNING: with --videos_per_prompt {videos_per_prompt} the scores cannot be compared "
            "with published ones"
        )
        if suite.has_folders:
            warning += ", and the official tool stops at a missing video"
        lines.append(warning)
    files = [file for clip in policies[0].clips for file in clip.files]
    if len({file.lower() for file in files}) < len(files):
        lines.append(
            "note: some file names differ only in case, which a file system must distinguish"
        )
    return lines


def command_lines(
    suite: Suite,
    rows: Sequence[Row],
    policies: Sequence[BenchmarkVideos],
    data: DataSettings,
    *,
    prompts: Path,
    out: Path,
) -> list[str]:
    """Return commands for a clone of the tool's repository in its own environment
    (docs/benchmarks.md), and `read`.
    """
    repository = "github.com/Vchitect/VBench"
    if suite.has_folders:
        repository += "/VBench-2.0"
    lines = [f"# {suite.title}: in a clone of {repository}, with its own environment"]
    dimensions = list(dict.fromkeys(name for _, names in rows for name in names))
    listed = _shell(prompts.absolute())
    for policy in policies:
        folder = _shell(policy.folder.absolute())
        if suite.has_folders:
            lines += [
                f"for D in {' '.join(dimensions)}; do",
                f"  python evaluate.py --full_json_dir {listed} --videos_path {folder}/videos/$D "
                f"--dimension $D --output_path {folder}/results/$D",
                "done",
            ]
        else:
            lines += _vbench_commands(dimensions, listed, folder, is_long=_is_long(suite, data))
    results = " ".join(
        f"{policy.folder.name}={_shell(policy.folder)}/results" for policy in policies
    )
    lines.append("# then")
    lines.append(
        f"python -m scripts.benchmark_videos read --output_dir {_shell(out)} --results {results}"
    )
    return lines


def _vbench_commands(
    dimensions: list[str], listed: str, folder: str, *, is_long: bool
) -> list[str]:
    """Return the commands of VBench, or of VBench-Long.

    One dimension needs videos that pass the static filter.
    """
    script = "evaluate.py"
    if is_long:
        script = "vbench2_beta_long/eval_long.py --mode long_vbench_standard --dev_flag"
    output = f"--output_path {folder}/results"
    lines = []
    others = [name for name in dimensions if name != FILTERED]
    if others:
        names = " ".join(others)
        lines.append(
            f"python {script} --full_json_dir {listed} --videos_path {folder}/videos --dimension "
            f"{names} {output}"
        )
    if FILTERED not in dimensions:
        return lines
    if is_long:  # its script filters the videos
        lines.append(
            f"python {script} --static_filter_flag --full_json_dir {listed} --videos_path "
            f"{folder}/videos --dimension {FILTERED} {output}"
        )
        return lines
    static = f"{folder}/static"
    lines.append(f"python static_filter.py --videos_path {folder}/videos --result_path {static}")
    lines.append(
        f"python evaluate.py --full_json_dir {listed} --videos_path {static}/filtered_videos "
        f"--dimension {FILTERED} {output}"
    )
    return lines


def _is_long(suite: Suite, data: DataSettings) -> bool:
    """Return whether the videos are so long that the suite has another tool for them."""
    return suite.long_seconds is not None and data.sample_n_frames / data.fps >= suite.long_seconds


def _shell(path: Path) -> str:
    return shlex.quote(str(path))
