"""Validation: the policy's progress, measured on videos of fixed prompts and fixed noise, sampled with the ODE.

Videos are scored, measured and written in parts (`parts`), so that memory does not grow with their number.

Evaluation after a run (`policy_scores`) uses `Validation.videos` too: the same policy generates the same videos.
"""

import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.config.settings import Config
from hyvideo.data.prompts import Request, are_seen, hash_requests
from hyvideo.data.randomness import normal
from hyvideo.data.run_folder import SAMPLES, claim
from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.conditions import to_device
from hyvideo.models.fp8 import Fp8Linear
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.records.contact_sheet import contact_sheet, read_sheet_frames
from hyvideo.records.run_files import evenly_spaced, score_entry, warn_if_unwritable, write_json, write_videos
from hyvideo.rewards.async_scorer import AsyncScorer
from hyvideo.rewards.rewards import Reward
from hyvideo.schedulers.schedule import Schedule
from hyvideo.training.rollout_batch import select
from hyvideo.validation.parts import num_per_part
from hyvideo.validation.reward_hacking.held_out_metrics import Measured, ScorerMetrics, measure_videos, summarise_videos
from hyvideo.validation.reward_hacking.monitor import MEASURES_FILE, HackingMonitor, read_validation, write_validation
from hyvideo.validation.reward_hacking.rule import ValidationStats
from hyvideo.validation.scores_file import gather_rewards, split_reward, summarise_rewards

SCORES_FILE = "scores.json"


class Validation:
    """Samples, scores and records the validation set, divided among the replicas."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        pipeline: GRPOPipeline,
        encoder: ConditionEncoder,
        scorer: AsyncScorer,
        requests: list[Request],  # of valid_video_csv
        on_stage: Callable[..., None] = lambda *stage: None,  # called for each batch
        may_end: Callable[[bool], bool] = bool,  # called before batches and while waiting for rewards; may raise
        trained_on: Iterable[Request] = (),  # training prompts
        run_id: str = "",  # marks the folders
    ):
        self.run_id = run_id
        self.settings = config.record
        self.mesh = mesh
        self.scorer = scorer
        self.encoder = encoder
        self.on_stage, self.may_end = on_stage, may_end
        self.fps, self.decode_batch_size = config.data.fps, config.rollout.decode_batch_size
        self.pipeline = pipeline.with_guidance(config.validation_cfg_scale)
        self.schedule = Schedule.ode(self.settings.validation_steps, config.validation_shift)
        self.requests = [request for request in requests for _ in range(self.settings.validation_repeats)]
        self.prompts = [request.prompt for request in self.requests]
        self.seen = are_seen(self.prompts, trained_on)
        self.groups = [row // self.settings.validation_repeats for row in range(len(self.prompts))]
        self.output = Path(self.settings.output_dir) / SAMPLES
        self.size = config.validation_size
        self.latent_shape = self.pipeline.latent_shape(*self.size)
        self.made_with = {
            "prompts": hash_requests(requests),
            "steps": self.settings.validation_steps,
            "seed": self.settings.validation_seed,
            "repeats": self.settings.validation_repeats,
            "size": list(self.size),
            "shift": config.validation_shift,
            "guidance": [config.validation_cfg_scale, config.data.negative_prompt],
        }
        if config.rollout.guidance_interval:
            self.made_with["guidance"].append(config.rollout.guidance_interval)
        if any(isinstance(layer, Fp8Linear) for layer in pipeline.transformer.modules()):
            self.made_with["base_weight_dtype"] = "fp8"
        action, threshold = self.settings.on_reward_hacking, self.settings.hacking_threshold
        self.monitor = HackingMonitor(action, threshold, mesh, self.output, self.made_with)

    def run(self, iteration: int) -> dict[str, float]:
        """Validate the policy after ``iteration``, write samples/<iteration>/ and return ``validation/...`` metrics."""
        self._discard_scores(iteration)
        local: dict[int, Reward] = {}
        measured: dict[int, Measured] = {}
        of_scorers = ScorerMetrics(self.scorer, self.mesh)
        names: dict[int, str] = {}  # of the written videos
        for videos in self.videos(self.rows()):
            scored = self._rewards(videos)
            local |= scored
            measured |= measure_videos(videos, scored, self.scorer.weights)
            of_scorers.add(videos, self.prompts)
            names |= self._write_videos(iteration, videos)
            del videos  # before the next part is sampled
        rewards = gather_rewards(local, len(self.prompts), self.mesh)
        means, spreads = summarise_videos(measured, of_scorers.of_videos(), self.groups, self.mesh)
        set_means, set_spreads = of_scorers.of_set(len(self.prompts))
        reward_means, reward_spread = summarise_rewards(rewards)
        measures = means | reward_means | split_reward(rewards, self.seen) | set_means
        stats = ValidationStats(iteration, measures, spreads | set_spreads | reward_spread)
        hacking = self.monitor.check(stats)
        names = dict(ChainMap(*all_objects(names, self.mesh)))
        with warn_if_unwritable(f"VALIDATION {self.folder(iteration)}"):
            if self.mesh.is_main:
                claim(self.folder(iteration), self.run_id)
                self._record(iteration, rewards, names)
                write_validation(self.folder(iteration), stats, self.monitor.shifts, self.made_with)
        return {f"validation/{name}": value for name, value in measures.items()} | {"validation/hacking": hacking}

    def folder(self, iteration: int) -> Path:
        return self.output / f"{iteration:06d}"

    def measures(self, iteration: int) -> dict[str, float]:
        """Return the recorded metrics of ``iteration``; empty if it was not validated with these settings."""
        recorded = read_validation(self.folder(iteration), self.made_with)
        return dict(recorded.means) if recorded else {}

    def picture(self, iteration: int) -> Path | None:
        """Write before_after.png: the recorded videos of the base model beside those of ``iteration``."""
        folders = {"before": self.folder(0), "after": self.folder(iteration)}
        files = sorted(set.intersection(*({file.name for file in folder.glob("*.mp4")} for folder in folders.values())))
        if not files:
            return None
        records = [json.loads((folder / SCORES_FILE).read_text()) for folder in folders.values()]
        old, new = ({entry["file"]: entry for entry in entries} for entries in records)
        clips = {when: [read_sheet_frames(folder / name) for name in files] for when, folder in folders.items()}
        captions = [f"{_score(old[name]['reward'])} -> {_score(new[name]['reward'])}" for name in files]
        path = self.output.parent / "before_after.png"
        contact_sheet(path, [old[name]["prompt"] for name in files], clips, captions)
        return path

    def rows(self) -> list[int]:
        """Return this replica's rows; the last row may be repeated so that all replicas have equally many."""
        count = -(-len(self.prompts) // self.mesh.num_replicas)
        last = len(self.prompts) - 1
        return [min(self.mesh.replica + i * self.mesh.num_replicas, last) for i in range(count)]

    def videos(self, rows: list[int]) -> Iterator[dict[int, Tensor | None]]:
        """Sample videos and yield those that this rank decodes, by row, in parts of whole batches.

        The ranks of a replica divide the videos of a batch. All ranks have equally many parts.
        """
        batch_size = self.settings.validation_batch_size
        batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        largest_share = -(-batch_size // self.mesh.sp_size)
        step = num_per_part(largest_share * 3 * math.prod(self.size))
        for start in range(0, len(batches), step):
            yield self._sample_part(batches, range(start, min(start + step, len(batches))))

    def _sample_part(self, batches: list[list[int]], part: Iterable[int]) -> dict[int, Tensor | None]:
        """Return the videos of some of the batches that this rank decodes, by row."""
        videos: dict[int, Tensor | None] = {}
        _, height, width = self.size
        for number in part:
            batch, title = batches[number], f"batch {number + 1}/{len(batches)}"
            self.on_stage("validation", f"sampling {title}")
            self.may_end(False)
            conditions = self.encoder([self.requests[row] for row in batch], height=height, width=width)
            noise = to_device(torch.stack([self._noise(row) for row in batch]), self.pipeline.device)
            latents = self.pipeline.sample_ode(conditions.to(self.pipeline.device), noise, self.schedule)
            share = self.mesh.rank_share(list(range(len(batch))))
            if share:
                self.on_stage("validation", f"decoding {title}")
                decoded = self.pipeline.decode(select(latents, share), batch_size=self.decode_batch_size)
                videos |= zip([batch[i] for i in share], decoded)
        return videos

    def _rewards(self, videos: dict[int, Tensor | None]) -> dict[int, Reward]:
        """Return the rewards of this rank's videos of a part, by row. Collective."""
        self.on_stage("validation reward", f"{len(videos)} videos")
        prompts = [self.prompts[row] for row in videos]
        rewards = self.scorer.measure(list(videos.values()), prompts, fps=self.fps, may_end=self.may_end)
        return dict(zip(videos, rewards))

    def _noise(self, row: int) -> Tensor:
        prompt, repeat = divmod(row, self.settings.validation_repeats)
        key = self.settings.validation_seed, "validation noise", prompt, repeat
        seed = self.requests[row].seed
        return normal(self.latent_shape, *(key if seed is None else (seed, "validation noise", repeat)))

    def _write_videos(self, iteration: int, videos: dict[int, Tensor | None]) -> dict[int, str]:
        """Write those of this rank's ``videos`` that are kept, and return their file names by row."""
        rows = evenly_spaced(self.settings.log_num_videos, len(self.prompts))
        rows = [row for row in rows if row % self.mesh.num_replicas == self.mesh.replica]  # repeated rows once
        kept = {row: videos[row] for row in rows if videos.get(row) is not None}
        names: dict[int, str] = {}
        with warn_if_unwritable(f"VIDEOS OF {self.folder(iteration)}"):
            names = write_videos(self.folder(iteration), kept, self.fps, run=self.run_id)
        return names

    def _discard_scores(self, iteration: int) -> None:
        """Delete the records of an earlier validation of ``iteration``, whose videos this one replaces one by one."""
        with warn_if_unwritable(f"VALIDATION {self.folder(iteration)}"):
            if self.mesh.is_main and self.folder(iteration).is_dir():
                claim(self.folder(iteration), self.run_id)  # raises for a folder that this run has not made
                for name in (SCORES_FILE, MEASURES_FILE):
                    (self.folder(iteration) / name).unlink(missing_ok=True)

    def _record(self, iteration: int, rewards: list[Reward], names: dict[int, str]) -> None:
        entries = []
        for row, (prompt, group, reward) in enumerate(zip(self.prompts, self.groups, rewards)):
            file, seed = names.get(row), self.requests[row].seed_or(self.settings.validation_seed)
            entries.append(score_entry(prompt, seed, group, reward, file=file, advantage=math.nan, number=row))
        write_json(self.folder(iteration) / SCORES_FILE, entries)


def _score(value: float | None) -> str:
    return "missing" if value is None else f"{value:.2f}"
