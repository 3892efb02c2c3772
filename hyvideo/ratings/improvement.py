"""Rounds of improvement: sample videos, score or rate them, fine-tune the model on the better ones.

Each step is a command of its own, which continues where an interrupted one ended.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from hyvideo.checkpoints.format import folder_of
from hyvideo.checks.rules import check
from hyvideo.data.examples import VIDEOS_FILE
from hyvideo.data.prompts import read_requests
from hyvideo.files.files import ROOT, make_folder
from hyvideo.files.steps import changed, run
from hyvideo.files.text import quote
from hyvideo.models.versions import version_defaults
from hyvideo.ratings.keeping import Keeping
from hyvideo.records.run_files import write_json
from hyvideo.settings.config import Config
from hyvideo.settings.objectives.sft import SFTSettings

SETTINGS = "settings.yaml"
PLAN = "improve.json"


@dataclass(frozen=True)
class ImprovementPlan:
    """What a command asks for; a repeated command must ask for the same."""

    rounds: int
    num_videos: int  # per prompt and round
    guidance_scale: float  # of the first round, whose videos teach the model guidance
    rate: bool  # a person keeps or drops each video, in place of the scores
    settings: dict


def plan_of(
    config: Config,
    rounds: int,
    num_videos: int,
    guidance_scale: float | None,
    *,
    num_gpus: int,
    rate: bool,
) -> ImprovementPlan:
    """Return the plan of a command. Raises ValueError for prompts that cannot be read, and settings
    that cannot run on this number of processes.
    """
    if not isinstance(config.objective, SFTSettings):
        raise ValueError(
            "scripts.improve fine-tunes on videos, so it needs objective sft, got "
            f"{config.objective.name}; use a config such as configs/miniature_sft.yaml"
        )
    if not config.data.prompts_csv:
        raise ValueError("scripts.improve needs --prompts_csv, the prompts to sample, got none")
    read_requests(*config.data.prompts_csv)
    check(config, num_gpus, on_this_machine=False)
    if guidance_scale is None:
        guidance_scale = version_defaults(config.model.transformer_version).guidance_scale
    return ImprovementPlan(
        rounds, num_videos, guidance_scale, rate, config.with_absolute_paths().flat()
    )


def improve(plan: ImprovementPlan, folder: Path, num_gpus: int) -> int:
    """Run all steps that are not finished, and return the exit code of the first that fails."""
    require_same_plan(plan, folder)
    settings = {name: value for name, value in plan.settings.items() if value is not None}
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    (folder / SETTINGS).write_text(text, encoding="utf-8")
    for number in range(1, plan.rounds + 1):
        for step, command in steps_of(plan, folder, number, num_gpus):
            print(f"\nround {number}, {step}: {' '.join(map(str, command))}", flush=True)
            code = run(command)
            if code:
                print(f"the step failed with exit code {code}; the same command continues here")
                return code
            if step == "rate":
                require_answers(folder / f"round{number}" / "rated" / VIDEOS_FILE)
    print(
        f"\nThe report of the last round: {folder / f'round{plan.rounds}' / 'run' / 'report.html'}"
    )
    return 0


def require_answers(path: Path) -> None:
    """Raise ValueError if a person has not answered for all videos of a CSV file."""
    kept = Keeping(path)
    if kept.num_unanswered:
        raise ValueError(
            f"{kept.num_unanswered} of {len(kept.answers)} videos are not answered in {path}; the "
            "same command shows them again"
        )


def require_same_plan(plan: ImprovementPlan, folder: Path) -> None:
    """Record the plan in its folder. Raises ValueError if the folder has videos of another one; only
    the number of rounds may change.
    """
    file = folder / PLAN
    given = asdict(plan)
    given |= given.pop("settings")
    has_videos = any((folder / "round1" / "videos").glob("*.mp4"))
    names = changed(file, given) if file.is_file() and has_videos else []
    if set(names) - {"rounds"}:
        raise ValueError(
            f"--improve_dir {quote(folder)} has a run with other {', '.join(names)}; repeat its "
            "command to continue, or choose another folder"
        )
    make_folder(folder)
    write_json(file, given)


def steps_of(
    plan: ImprovementPlan, folder: Path, number: int, num_gpus: int
) -> Iterator[tuple[str, list[object]]]:
    """Yield the names and commands of the steps of a round, in order.

    A further round goes on from the checkpoint of the round before, and samples without guidance:
    the model has learned it.
    """
    config = ("--config", folder / SETTINGS)
    here = folder / f"round{number}"
    before = folder / f"round{number - 1}" / "run"
    launch = [sys.executable]
    if num_gpus > 1:
        launch += ["-m", "scripts.launch", "--standalone", f"--nproc_per_node={num_gpus}"]
    steps = plan.settings["max_steps"]
    last = folder_of(before, (number - 1) * steps)
    source = () if number == 1 else ("--checkpoint_path", last)
    guidance = plan.guidance_scale if number == 1 else 1.0
    seed = plan.settings["seed"] + number
    size = ("--video_length", plan.settings["sample_n_frames"])
    size += ("--height", plan.settings["height"], "--width", plan.settings["width"])
    yield (
        "sample",
        [*launch, ROOT / "generate.py", *config, *source]
        + ["--valid_video_csv", *plan.settings["prompts_csv"], "--num_videos", plan.num_videos]
        + ["--guidance_scale", guidance, "--seed", seed, "--keep_latents", "true", *size]
        + ["--output_path", here / "videos"],
    )
    chosen = here / ("rated" if plan.rate else "scores") / VIDEOS_FILE
    fraction: tuple = ()
    if plan.rate:
        fraction = ("--keep_fraction", 1)  # those that the person keeps
        yield (
            "rate",
            [sys.executable, "-m", "scripts.rate", chosen.parent, "--keep", "true"]
            + ["--videos", here / "videos", *config],
        )
    elif not chosen.is_file():
        yield (
            "score",
            [sys.executable, "-m", "scripts.evaluate", *config]
            + ["--videos", here / "videos", "--output_dir", chosen.parent],
        )
    start: tuple = ()
    if number > 1:
        start = ("--resume_from_checkpoint", last, "--allow_changed_settings", "videos_csv")
    yield (
        "train",
        [*launch, ROOT / "post_train.py", *config, *start]
        + ["--videos_csv", chosen, *fraction, "--output_dir", here / "run"]
        + ["--max_steps", number * steps],
    )
