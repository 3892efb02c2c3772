"""Validation: the policy's progress, measured on videos of fixed prompts and fixed noise, sampled
with the ODE.

Videos are scored, measured and written in parts (`parts`), so that memory does not grow with their
number.

Evaluation after a run (`policy_scores`) uses `Validation.videos` too: the same policy generates the
same videos.
"""

import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyvideo.data.prompts import Request, are_seen, hash_requests
from hyvideo.data.randomness import normal
from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.files import optional
from hyvideo.files.run_folder import SAMPLES, claim
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.models.fp8 import Fp8Linear
from hyvideo.models.offload import away
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.records.contact_sheet import contact_sheet, read_sheet_frames
from hyvideo.records.run_files import evenly_spaced, score_entry, write_json
from hyvideo.records.saved_videos import write_videos
from hyvideo.rewards.rewards import Reward
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.settings.config import Config
from hyvideo.training.rewards import gather_rewards
from hyvideo.training.rollout_batch import select
from hyvideo.validation import held_out, reward_hacking
from hyvideo.validation.held_out import MEASURES_FILE, Dispersion, ValidationStats
from hyvideo.validation.held_out_metrics import (
    Measured,
    ScorerMetrics,
    measure_videos,
    summarise_videos,
)
from hyvideo.validation.parts import num_per_part
from hyvideo.validation.scores_file import split_reward, summarise_rewards

SCORES_FILE = "scores.json"
NOISE_FILE = "noise.json"  # first number of the noise of each video, for scripts.audit


def conditions_of(config: Config, requests: Sequence[Request]) -> dict[str, Any]:
    """Return what the videos of a validation are sampled with: prompts, noise, size and steps."""
    sampling = config.validation_sampling
    conditions = {
        "prompts": hash_requests(requests),
        "steps": sampling.steps,
        "seed": config.validation.validation_seed,
        "repeats": config.validation.validation_repeats,
        "size": list(sampling.size),
        "shift": sampling.shift,
        "guidance": [sampling.guidance_scale, sampling.negative_prompt],
    }
    if sampling.boundary is not None:
        conditions["experts"] = [sampling.boundary, sampling.low_noise_guidance_scale]
    if sampling.sigmas:
        conditions["sigmas"] = sampling.sigmas
    if sampling.noise:
        conditions["noise"] = sampling.noise
    if sampling.guidance_interval:
        conditions["guidance"].append(sampling.guidance_interval)
    return conditions


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
        # called before batches and while waiting for rewards; may raise
        may_end: Callable[[bool], bool] = bool,
        trained_on: Iterable[Request] = (),  # training prompts
        run_id: str = "",  # marks the folders
    ):
        sampling = config.validation_sampling
        self.run_id = run_id
        self.settings = config.validation
        self.num_shown = config.record.log_num_videos
        self.mesh = mesh
        self.scorer = scorer
        self.encoder = encoder
        self.on_stage = on_stage
        self.may_end = may_end
        self.fps = config.data.fps
        self.decode_batch_size = config.rollout.decode_batch_size
        self.pipeline = pipeline.with_guidance(sampling.guidance)
        self.schedule = sampling.schedule()
        self.requests = [
            request for request in requests for _ in range(self.settings.validation_repeats)
        ]
        self.prompts = [request.prompt for request in self.requests]
        self.seen = are_seen(self.prompts, trained_on)
        self.groups = [row // self.settings.validation_repeats for row in range(len(self.prompts))]
        self.first_noise: dict[int, float] = {}  # first number of the noise, by row of this rank
        self.output = Path(config.record.output_dir) / SAMPLES
        self.size = sampling.size
        self.latent_shape = self.pipeline.latent_shape(*self.size)
        self.made_with = conditions_of(config, requests)
        if any(isinstance(layer, Fp8Linear) for layer in pipeline.transformer.modules()):
            self.made_with["base_weight_dtype"] = "fp8"
        self.warns_of_transfer = config.objective.reward_weight > 0
        self.verdict = held_out.Verdict()  # on the last validation

    def run(self, iteration: int) -> dict[str, float]:
        """Validate the policy after ``iteration``, write samples/<iteration>/ and return
        ``validation/...`` metrics.
        """
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
        of_rewards = summarise_rewards(rewards)
        num_scored = sum(not reward.is_missing for reward in rewards)
        if num_scored:
            spreads["reward"] = Dispersion(of_rewards["reward_std"], num_scored)
        measures = means | of_rewards | split_reward(rewards, self.seen) | of_scorers.of_set()
        stats = ValidationStats(iteration, measures, spreads)
        self.verdict = reward_hacking.after_validation(
            stats,
            self.output,
            self.made_with,
            self.settings,
            self.mesh,
            weights=self.scorer.weights,
            warns_of_transfer=self.warns_of_transfer,
        )
        names = dict(ChainMap(*all_objects(names, self.mesh)))
        noise = dict(ChainMap(*all_objects(self.first_noise, self.mesh)))
        with optional(f"validation {self.folder(iteration)}"):
            if self.mesh.is_main:
                claim(self.folder(iteration), self.run_id)
                self._record(iteration, rewards, names)
                write_json(
                    self.folder(iteration) / NOISE_FILE, [noise[row] for row in sorted(noise)]
                )
                held_out.write_validation(
                    self.folder(iteration), stats, self.verdict, self.made_with
                )
        metrics = {f"validation/{name}": value for name, value in measures.items()}
        return metrics | self.verdict.metrics

    def folder(self, iteration: int) -> Path:
        return self.output / f"{iteration:06d}"

    def measures(self, iteration: int) -> dict[str, float]:
        """Return the recorded metrics of ``iteration``; empty if it was not validated with these
        settings.
        """
        recorded = held_out.read_validation(self.folder(iteration), self.made_with)
        return dict(recorded.means) if recorded else {}

    def picture(self, iteration: int) -> Path | None:
        """Write before_after.png: the recorded videos of the base model beside those of
        ``iteration``.
        """
        folders = {"before": self.folder(0), "after": self.folder(iteration)}
        files = sorted(
            set.intersection(
                *({file.name for file in folder.glob("*.mp4")} for folder in folders.values())
            )
        )
        if not files:
            return None
        records = [json.loads((folder / SCORES_FILE).read_text()) for folder in folders.values()]
        old, new = ({entry["file"]: entry for entry in entries} for entries in records)
        clips = {
            when: [read_sheet_frames(folder / name) for name in files]
            for when, folder in folders.items()
        }
        captions = [
            f"{_score(old[name]['reward'])} -> {_score(new[name]['reward'])}" for name in files
        ]
        path = self.output.parent / "before_after.png"
        contact_sheet(path, [old[name]["prompt"] for name in files], clips, captions)
        return path

    def rows(self) -> list[int]:
        """Return this replica's rows; the last row may be repeated so that all replicas have
        equally many.
        """
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

    def _sample_part(
        self, batches: list[list[int]], part: Iterable[int]
    ) -> dict[int, Tensor | None]:
        """Return the videos of some of the batches that this rank decodes, by row."""
        videos: dict[int, Tensor | None] = {}
        for number in part:
            batch = batches[number]
            title = f"batch {number + 1}/{len(batches)}"
            self.on_stage("validation", f"sampling {title}")
            self.may_end(False)
            conditions = self.encoder([self.requests[row] for row in batch], self.size)
            noise = self._noises(batch)
            self.first_noise |= zip(batch, noise.flatten(1)[:, 0].tolist())
            latents = self.sample(conditions.to(self.pipeline.device), noise, batch)
            share = self.mesh.rank_share(list(range(len(batch))))
            if share:
                self.on_stage("validation", f"decoding {title}")
                decoded = self.pipeline.decode(
                    select(latents, share), batch_size=self.decode_batch_size
                )
                videos |= zip([batch[i] for i in share], decoded)
        return videos

    def _rewards(self, videos: dict[int, Tensor | None]) -> dict[int, Reward]:
        """Return the rewards of this rank's videos of a part, by row. Collective."""
        self.on_stage("validation reward", f"{len(videos)} videos")
        prompts = [self.prompts[row] for row in videos]
        with away(self.pipeline.transformer):  # scorers need the memory
            rewards = self.scorer.measure(
                list(videos.values()), prompts, fps=self.fps, may_end=self.may_end
            )
        return dict(zip(videos, rewards))

    def sample(self, conditions: Conditions, noise: Tensor, rows: list[int]) -> Tensor:
        """Return the final latents of a batch, sampled with the ODE or with the SDE of
        ``validation_eta``.
        """
        if not self.schedule.stochastic_steps:
            return self.pipeline.sample_ode(conditions, noise, self.schedule)
        sampled = self.pipeline.sample(
            conditions,
            noise,
            self.schedule,
            lambda step: self._noises(rows, "validation step noise", step),
            keeps_all=False,
        )
        return sampled.final

    def _noises(self, rows: list[int], kind: str = "validation noise", *step: int) -> Tensor:
        """Return the initial noise of a batch, or the noise of a step.

        Shape: (rows, channels, frames, height, width).
        """
        return to_device(
            torch.stack([self._noise(row, kind, *step) for row in rows]), self.pipeline.device
        )

    def _noise(self, row: int, kind: str = "validation noise", *step: int) -> Tensor:
        prompt, repeat = divmod(row, self.settings.validation_repeats)
        seed = self.requests[row].seed
        if seed is None:
            return normal(
                self.latent_shape, self.settings.validation_seed, kind, prompt, repeat, *step
            )
        return normal(self.latent_shape, seed, kind, repeat, *step)

    def _write_videos(self, iteration: int, videos: dict[int, Tensor | None]) -> dict[int, str]:
        """Write those of this rank's ``videos`` that are kept, and return their file names
        by row.
        """
        rows = evenly_spaced(self.num_shown, len(self.prompts))
        # repeated rows once
        rows = [row for row in rows if row % self.mesh.num_replicas == self.mesh.replica]
        kept = {row: videos[row] for row in rows if videos.get(row) is not None}
        names: dict[int, str] = {}
        with optional(f"videos of {self.folder(iteration)}"):
            names = write_videos(self.folder(iteration), kept, self.fps, run=self.run_id)
        return names

    def _discard_scores(self, iteration: int) -> None:
        """Delete the records of an earlier validation of ``iteration``, whose videos this one
        replaces one by one.
        """
        with optional(f"validation {self.folder(iteration)}"):
            if self.mesh.is_main and self.folder(iteration).is_dir():
                # raises for a folder that this run has not made
                claim(self.folder(iteration), self.run_id)
                for name in (SCORES_FILE, NOISE_FILE, MEASURES_FILE):
                    (self.folder(iteration) / name).unlink(missing_ok=True)

    def _record(self, iteration: int, rewards: list[Reward], names: dict[int, str]) -> None:
        entries = []
        for row, (prompt, group, reward) in enumerate(zip(self.prompts, self.groups, rewards)):
            file = names.get(row)
            seed = self.requests[row].seed_or(self.settings.validation_seed)
            entries.append(
                score_entry(prompt, seed, group, reward, file=file, advantage=math.nan, number=row)
            )
        write_json(self.folder(iteration) / SCORES_FILE, entries)


def _score(value: float | None) -> str:
    return "missing" if value is None else f"{value:.2f}"
