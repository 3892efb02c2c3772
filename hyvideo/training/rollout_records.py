"""Recording of rollouts: all scores, some videos, and every video without a reward.

The noise of an entry in scores.json follows from ``seed``, ``iteration``, ``group`` and ``member``
(`RolloutNoise`).
"""

from pathlib import Path

from torch import Tensor

from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.files import optional
from hyvideo.files.run_folder import ROLLOUTS, claim
from hyvideo.records.metrics import MetricsWriter
from hyvideo.records.run_files import evenly_spaced, score_entry, write_json
from hyvideo.records.saved_videos import write_videos
from hyvideo.settings.sections import DataSettings, RecordSettings
from hyvideo.training.rollout_batch import RolloutBatch


class RolloutRecorder:
    """Writes rollouts/<iteration>/ every ``log_video_interval`` iterations and whenever a reward is
    missing.
    """

    def __init__(
        self,
        settings: RecordSettings,
        data: DataSettings,
        mesh: Mesh,
        *,
        group_size: int,
        num_rollouts: int,
        run_id: str = "",  # marks the folders
    ):
        self.mesh = mesh
        self.writer: MetricsWriter | None = None  # of the main rank, which also logs the videos
        self.group_size = group_size
        self.num_rollouts = num_rollouts
        self.run_id = run_id
        self.interval, self.num_videos = settings.log_video_interval, settings.log_num_videos
        self.seed, self.fps = data.seed, data.fps
        self.folder = Path(settings.output_dir) / ROLLOUTS

    def record(
        self,
        rollouts: RolloutBatch,
        videos: dict[int, Tensor | None],
        iteration: int,
        *,
        num_missing: float,  # missing rewards over all ranks
    ) -> None:
        """Write those of this rank's ``videos`` (by row) that are due or unscored, and all scores.

        Collective.
        """
        is_due = self.interval and iteration % self.interval == 0
        if not self.interval or not (is_due or num_missing):
            return
        folder = self.folder / f"{iteration:06d}"
        numbers = {row: rollouts.indices[row].number(self.group_size) for row in videos}
        due = set(evenly_spaced(self.num_videos if is_due else 0, self.num_rollouts))
        recorded = {
            row: video
            for row, video in videos.items()
            if video is not None and (numbers[row] in due or rollouts.rewards[row].is_missing)
        }
        files: dict[int, str] = {}
        with optional(f"videos of {folder}"):
            by_number = {numbers[row]: video for row, video in recorded.items()}
            files = write_videos(folder, by_number, self.fps, run=self.run_id)
        self._write_scores(folder, iteration, rollouts, numbers, files)
        if self.writer is None:
            return
        for row in recorded:
            if file := files.get(numbers[row]):
                self.writer.add_video(f"rollout/{row}", folder / file, iteration)

    def _write_scores(
        self,
        folder: Path,
        iteration: int,
        rollouts: RolloutBatch,
        numbers: dict[int, int],
        files: dict[int, str],
    ) -> None:
        entries = [
            score_entry(
                rollouts.prompts[row],
                self.seed,
                rollouts.indices[row].group,
                rollouts.rewards[row],
                file=files.get(number),
                advantage=rollouts.advantages[row].item(),
                number=number,
            )
            | {"iteration": iteration, "member": rollouts.indices[row].member}
            for row, number in numbers.items()
        ]
        gathered = all_objects(entries, self.mesh)
        if self.mesh.is_main:
            in_order = sorted(
                (entry for part in gathered for entry in part), key=lambda entry: entry["number"]
            )
            with optional(f"scores of {folder}"):
                claim(folder, self.run_id)
                write_json(folder / "scores.json", in_order)
