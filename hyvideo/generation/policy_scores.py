"""Evaluation of a policy on the validation prompts: every score of every video, and metrics of the
whole set.
"""

import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch
from torch import Tensor, nn

from hyvideo.data.prompts import Request
from hyvideo.data.video_files import read_header
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.digests import digest_of
from hyvideo.files.text import counted
from hyvideo.generation.generation import Source, make_and_read_requests
from hyvideo.generation.offloading import automatic_offloading
from hyvideo.generation.stored_latents import Sampled, stored
from hyvideo.loading.model_setup import (
    check_checkpoint,
    choose_device,
    load_encoder,
    place_transformers,
)
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.models.placement import Placements
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.records.progress_bar import print_stage
from hyvideo.records.run_files import or_none, score_entry
from hyvideo.rewards.rewards import Reward
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.settings.config import Config
from hyvideo.settings.run_inputs import trained_prompts
from hyvideo.training.rewards import make_async_scorer
from hyvideo.validation.contents import joint_identity, policy_identity
from hyvideo.validation.held_out_metrics import ScorerMetrics
from hyvideo.validation.pixels import diversity, thumbnail
from hyvideo.validation.scores_file import Evaluation, mark_seen, read_evaluation, write_evaluation
from hyvideo.validation.validation import Validation
from hyvideo.validation.video_folder import find_clips, read_clips


@dataclass(frozen=True)
class LatentStore:
    """Final latents of an evaluation, so that a repeated command samples only those that are
    missing.
    """

    folder: Path
    key: str  # digest of all that the latents depend on

    def remove(self) -> None:
        """Remove the latents, once the scores are written."""
        shutil.rmtree(self.folder, ignore_errors=True)


class StoredValidation(Validation):
    """A validation whose final latents are in a `LatentStore`."""

    store: LatentStore

    def sample(self, conditions: Conditions, noise: Tensor, rows: list[int]) -> Tensor:
        self.store.folder.mkdir(parents=True, exist_ok=True)
        file = self.store.folder / f"{rows[0]:06d}.safetensors"
        key = digest_of(self.store.key, rows)
        sample = super().sample
        sampled = stored(file, key, lambda: Sampled(sample(conditions, noise, rows)))
        return to_device(sampled.latents, self.pipeline.device)


class Evaluator:
    """Scores policies and videos in one process and loads each model once, where generate.py would
    have it on this GPU.

    Raises ValueError for invalid prompts.
    """

    def __init__(self, config: Config):
        if config.model.num_threads:
            torch.set_num_threads(config.model.num_threads)
        self.config = config
        self.device = choose_device(config.model.device)
        way = automatic_offloading(
            self.device, config, config.validation_sampling, has_scorers=True
        )
        self.placements = Placements.of_sampling(way)
        self.requests: list[Request] = make_and_read_requests([], config.data.valid_video_csv)
        self.size = config.validation_sampling.size

    @cached_property
    def scorer(self) -> AsyncScorer:
        print_stage("loading the reward model")
        scorer = make_async_scorer(self.config, self.device, placement=self.placements.scorers)
        if self.requests:  # none for videos that have their own prompts
            scorer.check_prompts([], validated=[request.prompt for request in self.requests])
        return scorer

    @cached_property
    def _encoder_and_vae(self) -> tuple[ConditionEncoder, nn.Module]:
        config = self.config
        if not (config.model.conditions_dir or config.model.precompute_conditions):
            config = config.with_settings(conditions_dir=self._conditions.name)
        return load_encoder(config, self.device, self.placements)

    @cached_property
    def _conditions(self) -> TemporaryDirectory:
        """Folder of the encoded prompts, so that the encoders need not stay."""
        return TemporaryDirectory(prefix="conditions-")

    def check(self, source: Source) -> frozenset[str]:
        """Return the encoders that the prompts need.

        Raises ValueError for invalid prompts, checkpoints or sizes.
        """
        config = self.config
        if not self.requests:
            raise ValueError(
                "valid_video_csv must name a CSV with the prompts to evaluate on; it is empty"
            )
        needs = check_checkpoint(config, {"valid_video_csv": self.requests}, [self.size])
        source.with_initial_lora(config.optimizer.pretrained_lora_path).check(config.model)
        return needs

    def policy(self, source: Source, store: "LatentStore") -> Evaluation:
        """Evaluate a policy; ``store`` has the videos that an interrupted evaluation has sampled.

        Raises ValueError like `check` and for invalid scorers, before reading its weights.
        """
        config = self.config
        needs = self.check(source)
        scorer = self.scorer
        source = source.with_initial_lora(config.optimizer.pretrained_lora_path)
        print_stage("loading the text encoders and the VAE")
        encoder, vae = self._encoder_and_vae
        for request in self.requests:
            encoder([request], self.size)
        encoder(config.negative_requests)
        encoder.release()
        print_stage("loading the transformer")
        pipeline = source.load(
            config,
            self.device,
            encoder,
            vae,
            needs,
            placements=self.placements,
        )
        place_transformers(pipeline, self.placements, self.device)
        validation = StoredValidation(
            config,
            Mesh.single(),
            pipeline,
            encoder,
            scorer,
            self.requests,
            on_stage=lambda _, part: print_stage(part),
        )
        validation.store = store
        parts = validation.videos(validation.rows())
        seeds = [request.seed for request in validation.requests]
        rates = [config.data.fps] * len(seeds)
        return self.score(parts, validation.prompts, validation.groups, seeds, rates=rates)

    def policies(
        self, checkpoints: Mapping[str, Path | None], folder: Path
    ) -> dict[str, Evaluation]:
        """Return evaluations by name; those that ``folder`` does not have yet are computed.

        None is the base model.
        """
        world = joint_identity(self.config, self.config.reward)
        evaluations = {}
        for name, checkpoint in checkpoints.items():
            file = folder / f"{name}.json"
            identity = policy_identity(checkpoint=checkpoint) | world
            evaluation = read_evaluation(file, identity)
            if evaluation is None:
                store = LatentStore(folder / f".{name}.latents", digest_of(identity))
                evaluation = self.policy(Source(checkpoint), store)
                write_evaluation(file, evaluation, identity)
                store.remove()
                print(f"evaluated {name}: {file}", flush=True)
            evaluations[name] = mark_seen(evaluation, trained_prompts(self.config))
        return evaluations

    def folder(self, folder: Path) -> Evaluation:
        """Evaluate the videos in a folder, each at its own size and frame rate; `find_clips` assigns
        their prompts.
        """
        clips = find_clips(folder, self.requests)
        rates = [read_header(clip.path).fps for clip in clips]
        prompts = [clip.prompt for clip in clips]
        self.scorer.check_prompts([], validated=prompts)
        files = [clip.path.name for clip in clips]
        parts = read_clips(clips, rates, *self.size[1:])
        groups = [clip.group for clip in clips]
        seeds = [clip.seed for clip in clips]
        return self.score(parts, prompts, groups, seeds, rates=rates, files=files)

    def score(
        self,
        parts: Iterable[dict[int, Tensor | None]],
        prompts: list[str],
        groups: list[int],
        seeds: list[int | None],
        *,
        rates: list[float],  # frames per second, equal in each part
        files: list[str] | None = None,
    ) -> Evaluation:
        """Evaluate videos, given in parts by number.

        One that could not be decoded is None and gets a missing reward.

        ``seeds`` are recorded with the scores; None stands for ``validation_seed``.
        Only one part is kept in memory, if ``parts`` computes them one by one.
        """
        rewards: dict[int, Reward] = {}
        thumbnails: dict[int, Tensor] = {}
        of_scorers = ScorerMetrics(self.scorer, Mesh.single(), _fail)
        for videos in parts:
            decoded = {number: video for number, video in videos.items() if video is not None}
            texts = [prompts[number] for number in videos]
            fps = rates[min(videos)]
            print_stage(f"scoring {counted(len(videos), 'video')} of {len(prompts):,}")
            rewards |= zip(videos, self.scorer.measure(list(videos.values()), texts, fps=fps))
            thumbnails |= {number: thumbnail(video) for number, video in decoded.items()}
            of_scorers.add(decoded, prompts)
            del videos, decoded  # before the next part is computed
        of_videos = of_scorers.of_videos()
        entries = []
        for number, (prompt, group, seed) in enumerate(zip(prompts, groups, seeds)):
            file = files[number] if files else None
            if seed is None:
                seed = self.config.validation.validation_seed
            entry = score_entry(
                prompt, seed, group, rewards[number], file=file, advantage=math.nan, number=number
            )
            del entry["advantage"]
            entries.append(
                entry | {name: or_none(value) for name, value in of_videos.get(number, {}).items()}
            )
        measures = of_scorers.of_set()
        apart = diversity(list(thumbnails.values()), [groups[number] for number in thumbnails])
        if len(apart):
            measures["held_out/diversity"] = apart.mean().item()
        return Evaluation(entries, measures)

    def close(self) -> None:
        if "scorer" in vars(self):
            self.scorer.close()
        if "_conditions" in vars(self):
            self._conditions.cleanup()


def _fail(message: str) -> NoReturn:
    """Raise ValueError: a stored evaluation must have all metrics."""
    raise ValueError(message)
