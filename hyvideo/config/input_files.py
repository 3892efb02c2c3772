"""Files and folders that the settings name: there, of the right kind, and readable or writable, before anything else.

Nothing is made, and no weights are read.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from hyvideo.config.settings import Config
from hyvideo.data.outside import file_problem, folder_problem, shown, unwritable
from hyvideo.evaluation.reward_hacking.rule import MARKER as HACKING_MARKER

_MAX_METRICS_BYTES = 2**32


def path_problems(config: Config) -> Iterator[str]:
    """What keeps a training run from reading or writing what it must."""
    yield from _prompt_problems(config)
    yield from checkpoint_folder_problems(config)
    yield from _earlier_run_problems(config)
    folders = {"output_dir": config.record.output_dir, "conditions_dir": config.model.conditions_dir}
    for name, folder in folders.items():
        if (folder or name == "output_dir") and (problem := unwritable(folder)):
            yield f"{name} must be a folder that can be written to, got {shown(folder)}: {problem}"


def checkpoint_folder_problems(config: Config) -> Iterator[str]:
    root = config.model.pretrained_model_root
    if problem := folder_problem(root):
        reason = "which is not there" if problem == "it is not there" else problem
        yield (
            f"pretrained_model_root must be a folder of checkpoints, got {shown(root)}, {reason}; "
            "checkpoints-download.md says how to get them, and configs/miniature.yaml needs no download"
        )


def _prompt_problems(config: Config) -> Iterator[str]:
    from hyvideo.data.images import check_image
    from hyvideo.data.prompts import read_requests

    if not config.data.prompts_csv:
        yield "prompts_csv must name a CSV file with a column `prompt`, got nothing"
    for path in filter(None, (config.data.prompts_csv, config.data.valid_video_csv)):
        try:
            for image in dict.fromkeys(request.image for request in read_requests(path) if request.image):
                check_image(image)
        except ValueError as error:
            yield str(error)


def _earlier_run_problems(config: Config) -> Iterator[str]:
    """Of the run that output_dir holds already, if it holds one, and of the one that shall go on."""
    wanted = config.record.resume_from_checkpoint
    if wanted not in ("", "latest", "auto") and (problem := file_problem(Path(wanted) / "state.json", 2**30)):
        yield (
            f"resume_from_checkpoint must be `latest`, `auto` or a checkpoint folder, got {shown(wanted)}, of whose "
            f"state.json is to say: {problem}"
        )
    path = Path(config.record.output_dir) / "metrics.jsonl"
    if not os.path.lexists(path):
        return
    if problem := file_problem(path, _MAX_METRICS_BYTES):
        yield f"{path} must be a file of metrics, or not there: {problem}"
        return
    if path.stat().st_size == 0:
        return
    if not wanted:
        yield (
            f"output_dir {shown(config.record.output_dir)} already holds a run; go on with it by "
            "--resume_from_checkpoint latest, or name another output_dir"
        )
        return
    from hyvideo.records.metrics_file import whole_lines

    try:
        whole_lines(path)
    except ValueError as error:
        yield str(error)
    marker = path.with_name(HACKING_MARKER)
    if marker.is_file() and config.record.on_reward_hacking != "warn":
        yield (
            f"the run in output_dir {shown(config.record.output_dir)} ended for reward hacking and would do so again; "
            f"docs/reward_hacking.md says what to change; to go on, delete {marker} or take on_reward_hacking warn"
        )
