"""What is kept of a round of rollouts: some videos, every video without a reward, and all scores."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from hyvideo.config import Config
from hyvideo.records import evenly_spaced, score_entry, write_json, write_videos
from hyvideo.rollouts import Round


def keep_round(
    config: Config,
    folder: Path,
    round_: Round,
    videos: list[Tensor | None],
    limit: int,
    gather: Callable[[list[dict]], list[list[dict]]],
) -> dict[int, str]:
    """Writes this replica's part; gives the names of its video files by row.

    Args:
        limit: Videos to keep besides those whose reward is missing.
        gather: Gives the main rank the lists of all replicas, the others an empty list.
    """
    group_size = config.rollout.num_generations
    numbers = [place.group * group_size + place.member for place in round_.places]
    missing = [row for row, reward in enumerate(round_.rewards) if reward.is_missing]
    wanted = sorted({*evenly_spaced(limit, len(videos)), *missing})
    kept = {numbers[row]: videos[row] for row in wanted if videos[row] is not None}
    files = write_videos(folder, kept, config.data.fps)
    entries = [
        score_entry(
            prompt, config.data.seed, place.group, reward, file=files.get(number), advantage=advantage, number=number
        )
        for number, prompt, place, reward, advantage in zip(
            numbers, round_.prompts, round_.places, round_.rewards, round_.advantages.tolist()
        )
    ]
    everyone = gather(entries)
    if everyone:
        in_order = sorted((entry for part in everyone for entry in part), key=lambda entry: entry["number"])
        write_json(folder / "scores.json", in_order)
    return {row: files[numbers[row]] for row in wanted if numbers[row] in files}
