"""Rehearsal of a run: tiny models are written, and the stages of the run follow one another."""

from collections.abc import Iterable
from pathlib import Path

import yaml
from transformers.utils import logging

from hyvideo.checks.layout import planned_world_size
from hyvideo.checks.rules import check
from hyvideo.data.prompts import Request, write_requests
from hyvideo.files.files import find_path, new_folder_problem
from hyvideo.files.run_folder import Lease
from hyvideo.files.text import quote
from hyvideo.models.sizes import tiny_module
from hyvideo.models.versions import RELEASED
from hyvideo.rehearsal.settings import (
    Change,
    heads_of,
    processes_of,
    reduced,
    validation_requests,
)
from hyvideo.rehearsal.stages import Stage, run_stage, stages_of
from hyvideo.rewards import tiny as tiny_rewards
from hyvideo.settings.config import Config

NOT_COVERED = (
    "released weights: rewards, gradients and videos mean nothing here",
    "speed and GPU memory: post_train.py --print_config predicts them, and post_train.py --pilot measures them",
    "GPU kernels, torch.compile and NCCL: scripts.gpu_check tests them on one GPU",
    "attention over more than 1,024 tokens, and the decoder in training: cheap operations with the "
    "same shapes",
)


def rehearse(config: Config, world_size: int | None, folder: Path | None, words: str) -> int:
    """Run all stages, print a table and return the exit code.

    Raises ValueError for settings that cannot run.
    """
    version = config.model.transformer_version
    if version not in RELEASED:
        raise ValueError(
            "transformer_version must be a released version, whose sizes are known, got "
            f"{version}; the miniatures need no rehearsal, because their weights are in the "
            "repository"
        )
    world_size = world_size or planned_world_size(config, words)
    folder = folder or Path("outputs") / "rehearsal" / Path(config.record.output_dir).name
    check_is_new(folder)
    folder = folder.resolve()
    with Lease(folder):
        check_is_new(folder)  # another rehearsal may have been faster
        return rehearse_in(config, world_size, folder)


def check_is_new(folder: Path) -> None:
    """Raise ValueError if a folder has files."""
    problem = new_folder_problem(folder)
    if problem:
        raise ValueError(
            f"--rehearsal_dir must be a new or empty folder, got {quote(folder)}: {problem}; "
            "remove it or give another"
        )


def check_given_videos(config: Config) -> None:
    """Raise ValueError if the videos of a run that trains on given videos do not exist yet."""
    source = config.objective.videos_from
    for path in getattr(config.objective, source) if source else ():
        if not find_path(path).exists():
            raise ValueError(
                f"{source}: file not found: {path}; make it with scripts.rate or scripts.improve "
                f"first, or rehearse with a file that exists: --{source} FILE.csv"
            )


def rehearse_in(config: Config, world_size: int, folder: Path) -> int:
    """Rehearse in an empty folder. Raises ValueError for settings that cannot run."""
    check_given_videos(config)
    inputs = check(config, world_size, on_this_machine=False)
    chosen = validation_requests(inputs.validated or inputs.requests)
    processes = processes_of(config) if world_size > 1 else 1
    print(
        f"GPUs of the run: {world_size}; processes of the rehearsal: {processes}; folder: {folder}",
        flush=True,
    )
    write_requests(folder / "valid.csv", chosen)
    write_requests(folder / "generate.csv", chosen[:1])
    write_models(config, folder, [*inputs.requests, *inputs.validated])
    changes = reduced(config, processes, folder=folder, validated=bool(inputs.validated))
    rehearsed = config.with_settings(**{change.name: change.value for change in changes})
    rehearsed = rehearsed.with_absolute_paths()  # the stages start in the project's folder
    check(rehearsed, processes)
    known = {name: value for name, value in rehearsed.flat().items() if value is not None}
    text = yaml.safe_dump(known, sort_keys=False, allow_unicode=True)
    (folder / "settings.yaml").write_text(text, encoding="utf-8")

    stages = stages_of(
        folder,
        processes,
        has_validation=bool(inputs.validated),
        improves=config.objective.name == "sft",
    )
    passed = run_stages(stages, folder)
    print_summary(changes)
    return 0 if passed else 1


def run_stages(stages: Iterable[Stage], folder: Path) -> bool:
    """Run the stages until one fails, print a line for each, and return whether all passed."""
    for stage in stages:
        print(f"  {stage.name:<10}", end="", flush=True)
        result = run_stage(stage, folder)
        verdict = "FAILED" if result.problems else "passed"
        print(
            f"{verdict}  {result.seconds:5.0f} s  {result.peak_gib:5.2f} GiB in the largest process",
            flush=True,
        )
        if result.problems:
            print("\n".join(["", *result.problems, f"The log is in {result.log}"]), flush=True)
            return False
    return True


def write_models(config: Config, folder: Path, requests: list[Request]) -> None:
    """Write the tiny checkpoint of the run's version, and tiny reward models, into a folder."""

    logging.disable_progress_bar()
    version = RELEASED[config.model.transformer_version]
    prompts = [request.prompt for request in requests]
    tiny_module(version.family).write(
        folder / "checkpoints", version.name, num_heads=heads_of(config), prompts=prompts
    )
    for scorer in dict.fromkeys(
        [*config.reward.reward_model, *config.reward.held_out_reward_model]
    ):
        tiny_rewards.write(scorer, folder / "rewards" / scorer)


def print_summary(changes: list[Change]) -> None:
    """Print the changed settings by reason, and what a rehearsal does not cover."""
    print("\nDifferent from the run:")
    for reason in dict.fromkeys(change.reason for change in changes):
        names = [f"{change.name} {change.shown}" for change in changes if change.reason == reason]
        print(f"  {', '.join(names)}: {reason}")
    print("\nNot covered:")
    for sentence in NOT_COVERED:
        print(f"  {sentence}")
