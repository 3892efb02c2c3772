"""What is kept of a round of rollouts: some videos, every video without a reward, and all scores."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from hyvideo.config.settings import Config
from hyvideo.records.run_files import score_entry, told_if_unwritable, write_json, write_videos
from hyvideo.training.rollout_batch import RolloutBatch


def keep_round(
    config: Config,
    folder: Path,
    round_: RolloutBatch,
    videos: dict[int, Tensor | None],
    wanted: set[int],
    gather: Callable[[list[dict]], list[list[dict]]],
) -> dict[int, str]:
    """Writes this rank's part; gives the names of its video files by row.

    Args:
        videos: Those that this rank has, by row.
        wanted: Numbers in the round of the videos to keep, besides those whose reward is missing.
        gather: Gives the main rank the lists of all ranks, the others an empty list.
    """
    group_size = config.rollout.num_generations
    numbers = {row: round_.places[row].group * group_size + round_.places[row].member for row in videos}
    kept = {
        row: video
        for row, video in videos.items()
        if video is not None and (numbers[row] in wanted or round_.rewards[row].is_missing)
    }
    files: dict[int, str] = {}
    with told_if_unwritable(f"VIDEOS OF {folder}"):
        files = write_videos(folder, {numbers[row]: video for row, video in kept.items()}, config.data.fps)
    entries = [
        score_entry(
            round_.prompts[row],
            config.data.seed,
            round_.places[row].group,
            round_.rewards[row],
            file=files.get(number),
            advantage=round_.advantages[row].item(),
            number=number,
        )
        for row, number in numbers.items()
    ]
    everyone = gather(entries)
    if everyone:
        in_order = sorted((entry for part in everyone for entry in part), key=lambda entry: entry["number"])
        with told_if_unwritable(f"SCORES OF {folder}"):
            write_json(folder / "scores.json", in_order)
    return {row: files[numbers[row]] for row in kept if numbers[row] in files}
