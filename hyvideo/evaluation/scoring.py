"""Scores of a policy on held-out prompts: the videos of validation, every score of every video, and set measures.

policy -> validation's videos (no noise added, fixed seeds) -> scorers -> one entry a video
                                                           -> held-out measures of each video and of the whole set
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyvideo import saved_policy
from hyvideo.components import Needs, check_checkpoint, choose_device, load_encoder, load_pipeline
from hyvideo.config import Config
from hyvideo.data import read_requests
from hyvideo.distributed.mesh import Mesh
from hyvideo.generation import Source
from hyvideo.models import loading
from hyvideo.models.lora import add_lora, check_lora, read_lora
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import DTYPES
from hyvideo.records import score_entry, write_json
from hyvideo.rewarding import make_judge
from hyvideo.validation import Validation


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one policy."""

    videos: list[dict]  # number, prompt, group (place of the prompt), reward, scores, held-out measures of the video
    measures: dict[str, float | None]  # of the whole set: held-out, such as frechet_distance


class Evaluator:
    """Scores policies in one process; scorers and encoders are loaded once.

    Args:
        config: The world, ``valid_video_csv`` and ``validation_...``, and the scorers.

    Raises: ValueError for checkpoints, prompts or scorers that cannot be used.
    """

    def __init__(self, config: Config):
        if not config.data.valid_video_csv:
            raise ValueError("valid_video_csv must name the prompts to evaluate on, got nothing")
        self.config = config
        self.device = choose_device(config.model.device)
        self.requests = read_requests(config.data.valid_video_csv)
        self.needs = Needs.of(self.requests)
        size = (
            config.record.validation_height or config.data.height,
            config.record.validation_width or config.data.width,
        )
        check_checkpoint(config, self.needs, [size])
        self.judge = make_judge(config, self.device)
        self.judge.check_prompts([request.prompt for request in self.requests])
        self.encoder, self.vae = load_encoder(config, self.device)

    def policy(self, source: Source) -> Evaluation:
        """Of the base model, a checkpoint of a run, a LoRA, or a LoRA on a checkpoint."""
        config = self.config
        dtype = DTYPES[config.model.dtype]
        self._check(source)
        pipeline = load_pipeline(
            config, self.device, encoder=self.encoder, vae=self.vae, trained=self.needs, weights_dtype=dtype
        )
        if source.checkpoint:
            saved_policy.put_into(pipeline.transformer, source.checkpoint)
        if source.lora:
            add_lora(pipeline.transformer, read_lora(source.lora), scale=source.lora_scale)
        validation = Validation(config, Mesh(0, 1, 1), pipeline, self.encoder, self.judge)
        videos = validation.videos(validation.rows())
        repeats = config.record.validation_repeats
        groups = [row // repeats for row in videos]
        return self.score(list(videos.values()), [validation.prompts[row] for row in videos], groups)

    def score(
        self, videos: list[Tensor | None], prompts: list[str], groups: list[int], files: list[str] | None = None
    ) -> Evaluation:
        """Of given videos; None stands for one that could not be decoded, and is missing.

        Args:
            groups: Place of each video's prompt among the prompts.
        """
        rewards = self.judge.score(videos, prompts, fps=self.config.data.fps)
        seed = self.config.record.validation_seed
        entries = []
        for number, (video, prompt, group, reward) in enumerate(zip(videos, prompts, groups, rewards)):
            file = files[number] if files else None
            entry = score_entry(prompt, seed, group, reward, file=file, advantage=math.nan, number=number)
            del entry["advantage"]
            # A set of one: all its measures but those that need a set, which the scorers leave out.
            own = {} if video is None else self.judge.held_out([video], [prompt])
            entries.append(entry | {name: _or_none(value) for name, value in own.items()})
        seen = [(video, prompt) for video, prompt in zip(videos, prompts) if video is not None]
        measures = self.judge.held_out(*map(list, zip(*seen))) if seen else {}
        return Evaluation(entries, {name: _or_none(value) for name, value in measures.items()})

    def close(self) -> None:
        self.judge.close()

    def _check(self, source: Source) -> None:
        root, version = self.config.model.pretrained_model_root, self.config.model.transformer_version
        if source.checkpoint:
            saved_policy.check_policy(root, version, source.checkpoint)
        if source.lora:
            check_lora(loading.transformer_without_memory(root, version), read_lora(source.lora))


def what_is_measured(config: Config) -> dict:
    """The settings that decide an evaluation, beside the policy: evaluations are comparable where they are equal."""
    flat = config.flat()
    names = (
        "pretrained_model_root transformer_version dtype vae_dtype random_weights valid_video_csv height width "
        "sample_n_frames fps shift cfg_scale reward_model reward_config reward_precision reward_video "
        "validation_steps validation_seed validation_repeats validation_height validation_width"
    ).split()
    return {name: flat[name] for name in names}


def write_evaluation(path: Path, evaluation: Evaluation, identity: dict) -> None:
    """One JSON file; ``identity`` says of what, and under which settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"of": identity, "measures": evaluation.measures, "videos": evaluation.videos})


def read_evaluation(path: Path, identity: dict) -> Evaluation | None:
    """An evaluation of the same thing under the same settings, or None where the file has none."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["of"] != json.loads(json.dumps(identity)):
        return None
    return Evaluation(content["videos"], content["measures"])


def use_threads(config: Config) -> None:
    """As many CPU threads as the settings say."""
    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
