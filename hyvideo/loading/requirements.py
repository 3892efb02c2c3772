"""What this machine lacks for a run: packages, files, disk space and GPUs (used by --print_config).

Imports torch, which takes seconds, only where it is needed, and after what needs less.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from hyvideo.checks.machine_rules import machine_problems
from hyvideo.files.files import find_path, folder_problem
from hyvideo.files.text import note
from hyvideo.rewards.rewards import SCORERS
from hyvideo.settings import processes
from hyvideo.settings.config import Config
from hyvideo.settings.reward_settings import reward_options
from hyvideo.settings.run_inputs import RunInputs


def missing_requirements(inputs: RunInputs) -> Iterator[str]:
    """Yield a message for each package, file, disk space and GPU that a run lacks."""
    config = inputs.config
    reported = list(machine_problems(inputs))
    yield from reported
    root = config.model.pretrained_model_root
    if not folder_problem(root):
        yield from missing_scorers(config)
    if problem := gpu_problem(config.model.device, inputs.world_size):
        yield problem
    if config.model.device != "cpu" and processes.may_have_gpu():
        from hyvideo.loading.gpu_driver import cudnn_problem

        if problem := cudnn_problem():
            yield problem
    if not folder_problem(root):
        note(f"checking the files in {root}, which takes seconds")
        for line in checkpoint_problems(inputs):
            if line not in reported:
                yield line


def missing_scorers(config: Config) -> Iterator[str]:
    """Yield a message for each reward model whose folder is missing."""
    options = reward_options(config.reward)
    for name in config.reward.scorers:
        if name not in SCORERS:
            continue  # a class of the user's, which knows its files
        root = Path(config.model.pretrained_model_root)
        folder = options[name].get("path", root / SCORERS[name].folder)
        problem = folder_problem(folder)
        if problem:
            yield f"the files of reward_model {name} in {folder}: {problem}"


def checkpoint_problems(inputs: RunInputs) -> list[str]:
    """Return why the files of the models cannot be used: missing, cut, or of another model.

    The models are built without memory, to compare their tensors with the headers of the files.
    """
    from hyvideo.loading.model_setup import check_checkpoint

    config = inputs.config
    named = {"prompts_csv": config.data.prompts_csv, "valid_video_csv": config.data.valid_video_csv}
    existing = {
        name: [path for path in paths if os.path.isfile(find_path(path))]
        for name, paths in named.items()
    }
    try:
        requests = {name: inputs.files.read(paths) for name, paths in existing.items()}
        if config.objective.videos_from:
            requests[config.objective.videos_from] = inputs.prompts
        check_checkpoint(config, requests, list(config.video_sizes.values()))
    except ValueError as error:
        return str(error).splitlines()
    return []


def gpu_problem(device: str, world_size: int) -> str | None:
    """Return a message if this machine has fewer usable GPUs than processes that need one, else
    None.
    """
    if device == "cpu":
        return None
    gpus = 0
    if processes.may_have_gpu():
        import torch

        from hyvideo.loading.gpu_driver import driver_problem

        if problem := driver_problem():
            return problem
        gpus = torch.cuda.device_count()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if gpus >= num_local:
        return None
    fallback = "; device auto would use the CPU" if device == "auto" and gpus == 0 else ""
    return f"each process needs a GPU: needed {num_local}, found {gpus}{fallback}"
