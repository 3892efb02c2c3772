"""Prepare the run that ``bash run_post_train.sh`` starts if no flag names a model: the miniature.

    python -m scripts.first_run [flags of post_train.py]

Prints flags for post_train.py on stdout, one word per line: the miniature's config, a new output
folder and, if torch can use a GPU, the settings for it. Prints on stderr what is trained, why, and
the commands that train a larger model.
"""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from hyvideo.planning.hardware import gpu_rates
from hyvideo.planning.memory import GIB
from hyvideo.training.gpu_driver import driver_problem

CONFIG = "configs/miniature.yaml"
# Rollout and update use one batch of all 32 rollouts, so that both compute the same numbers. The
# blocks of the miniature run for milliseconds, and compiling them would take minutes.
ON_GPU = {
    "device": "cuda",
    "batched_forward": "true",
    "mini_batch_size_per_update": "32",
    "enable_compile": "false",
}
MODELS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Gpus:
    """GPUs of this machine that torch can use, and why it cannot use them."""

    number: int = 0
    name: str = ""
    gib: float = 0.0
    problem: str = ""


def find_gpus() -> Gpus:
    """Return the GPUs of this machine, after a computation on the first one."""
    if problem := driver_problem():
        return Gpus(problem=problem)
    if not torch.cuda.is_available() or not (number := torch.cuda.device_count()):
        return Gpus()
    try:
        torch.ones(8, device="cuda").sum().item()
    # such as a GPU that is too old for this torch, or that has no free memory
    except RuntimeError as error:
        return Gpus(problem=f"a computation on GPU 0 failed: {str(error).splitlines()[0]}")
    properties = torch.cuda.get_device_properties(0)
    return Gpus(number=number, name=properties.name, gib=properties.total_memory / GIB)


def has_flag(words: list[str], name: str) -> bool:
    return any(word.partition("=")[0] == f"--{name}" for word in words)


def first_free_folder(folder: str) -> str:
    """Return the first of outputs/miniature, outputs/miniature-2, ... that does not exist."""
    candidate, number = folder, 1
    while os.path.lexists(candidate):
        number += 1
        candidate = f"{folder}-{number}"
    return candidate


def flags_of_run(words: list[str], gpus: Gpus) -> list[str]:
    """Return the flags that go before the user's flags ``words``."""
    flags = ["--config", CONFIG]
    if gpus.number and not has_flag(words, "device"):
        for name, value in ON_GPU.items():
            flags += [f"--{name}", value]
    if not any(has_flag(words, name) for name in ("output_dir", "out", "resume_from_checkpoint")):
        flags += ["--output_dir", first_free_folder("outputs/miniature")]
    return flags


def larger_model(gpus: Gpus) -> dict:
    """Return the row of first_run.yaml for the weights in ./ckpts or, without weights, for the
    GPUs.
    """
    for model in MODELS:
        if Path(model["folder"]).is_dir():
            return model
    return next(model for model in MODELS if model["gpus"] <= gpus.number)


def recipe(model: dict, gpus: Gpus) -> dict:
    """Return the first recipe of a model that the GPUs allow; without GPUs, for one GPU of
    80 GB.
    """
    number, gib = (gpus.number, gpus.gib) if gpus.number else (1, 80.0)
    return next(row for row in model["recipes"] if row["gpus"] <= number and row["gib"] <= gib)


def next_commands(gpus: Gpus) -> list[str]:
    """Return the commands that train a larger model on this machine, in order."""
    model = larger_model(gpus)
    chosen = recipe(model, gpus)
    commands, version = [], chosen["version"]
    if not Path(model["weights"].format(version=version)).is_dir():
        commands = [command.format(version=version) for command in model["download"]]
    hardware = ""
    if gpus.number:
        known = f" --gpu {shlex.quote(gpus.name)}" if gpu_rates(gpus.name)[1] else ""
        hardware = f"{known} --gpu_memory {gpus.gib:.1f}"
    config, world_size = chosen["config"], chosen["gpus"]
    commands.append(
        f".venv/bin/python -m scripts.plan --config {config} --world_size {world_size}{hardware}"
    )
    launch = (
        "bash run_post_train.sh"
        if gpus.number <= world_size
        else f"NPROC={world_size} bash run_post_train.sh"
    )
    commands.append(
        f"{launch} --config {config} --pilot   # two iterations, compared with the plan"
    )
    commands.append(f"{launch} --config {config}")
    return commands


def message(words: list[str], gpus: Gpus) -> str:
    """Return what is trained, why, and the commands for a larger model."""
    reason = "no flag names a model (--config, --pretrained_model_root, --transformer_version)"
    if has_flag(words, "device"):
        device = ""
    elif gpus.number:
        device = f" on the GPU ({gpus.name}); --device cpu trains it on the CPU"
    else:
        device = f" on the CPU{': ' + gpus.problem if gpus.problem else ''}"
    return "\n".join(
        [
            f"run_post_train.sh: training the miniature{device}",
            f"run_post_train.sh: the reason: {reason}",
            f"run_post_train.sh: to train {larger_model(gpus)['model']} instead, run:",
            *(f"    {command}" for command in next_commands(gpus)),
        ]
    )


def main() -> None:
    words, gpus = sys.argv[1:], find_gpus()
    if not has_flag(words, "help"):
        print(message(words, gpus), file=sys.stderr)
    print("\n".join(flags_of_run(words, gpus)))


if __name__ == "__main__":
    main()
