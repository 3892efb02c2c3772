"""VideoAlign: scores for visual quality, motion quality and text alignment that match the
original's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from hyvideo.data.videos import check_video, read_video
from hyvideo.rewards.qwen2_vl.inputs import load_tokenizer, model_inputs
from hyvideo.rewards.qwen2_vl.model import (
    EMBEDDING,
    RewardModel,
    recomputed,
    without_cudnn_attention,
)
from hyvideo.rewards.qwen2_vl.preprocessing import frame_indices, patches, resize
from hyvideo.rewards.rewards import Scorer, Scores
from hyvideo.rewards.videoalign.checkpoint import LABEL, find_checkpoint, read_weights
from hyvideo.rewards.videoalign.prompt import REWARD_TOKENS, question


class VideoAlignScorer(Scorer):
    """Scorer that runs the frozen reward model of a ``VideoReward`` folder.

    With precision ``fp32_math``, arithmetic is in float32 with the published (bf16) rotary
    frequencies. Scores in bf16 are multiples of 0.016 to 0.03, which can cause ties in a group of
    similar videos. Raises ValueError, naming the file, if a file is missing, corrupted or does not
    fit.
    """

    def __init__(
        self,
        root: str | Path,  # folder with model_config.json and checkpoint-*
        *,
        device: str | torch.device = "cpu",
        # as published, or float32 throughout, including rotary frequencies
        dtype: torch.dtype = torch.bfloat16,
        precision: Literal["bf16", "fp32_math"] | None = None,
        # add the LoRA to the weights: slightly faster, scores differ by bf16 rounding
        merge_lora: bool = False,
        batch_size: int = 4,  # videos per forward pass
        # folder of Qwen2-VL-2B-Instruct, needed only for an adapter checkpoint
        base: str | Path | None = None,
    ):
        from transformers import Qwen2VLConfig

        checkpoint = find_checkpoint(root, base=base)
        weights = read_weights(checkpoint)
        self.settings = checkpoint.settings
        self.dimensions = checkpoint.settings.dimensions
        self.batch_size = batch_size
        self.device = self.home = torch.device(device)
        self.tokenizer = load_tokenizer(checkpoint.tokenizer, REWARD_TOKENS)
        config = Qwen2VLConfig.from_dict(checkpoint.config)
        if EMBEDDING in weights.model:
            # The original truncates the embedding to the tokenizer's length.
            weights.model[EMBEDDING] = weights.model[EMBEDDING][: len(self.tokenizer)]
            config.text_config.vocab_size = len(weights.model[EMBEDDING])
        lora = checkpoint.settings.lora
        if lora:
            lora = replace(lora, is_merged=merge_lora)
        rounded = precision == "fp32_math" or dtype == torch.bfloat16
        dtype = torch.float32 if precision == "fp32_math" else dtype
        head = nn.Linear(*reversed(weights.head.shape), bias=False, device="meta")
        head.weight = nn.Parameter(weights.head.to(dtype))
        self.model = RewardModel(
            LABEL,
            config,
            weights.model,
            head,
            reward_token_ids=self.tokenizer.convert_tokens_to_ids(list(REWARD_TOKENS)),
            dtype=dtype,
            rope_dtype=torch.bfloat16 if rounded else torch.float32,
            device=self.device,
            lora=lora,
        )

    def move_to(self, device: str | torch.device | None) -> None:
        """Move the model; None moves it back to its own device."""
        self.device = self.home if device is None else torch.device(device)
        self.model.to(self.device)

    def score(
        self, videos: list[Tensor], prompts: list[str], *, fps: float, normalize: bool = True
    ) -> list[Scores]:
        """Return VQ, MQ, TA (or the names in eval_dim) and their sum for each video, normalized by
        default.

        Shape of each video: uint8 (frames, 3, height, width). ``fps`` determines which frames are
        sampled. Raises ValueError for a video that is too short or of another type.
        """
        return self._score(videos, prompts, [fps] * len(videos), normalize)

    def score_with_gradient(self, videos: Tensor, prompts: list[str], *, fps: float) -> Tensor:
        """Return the values of `score` in the order of ``dimensions``, with their gradient by the
        videos' levels.

        Only sampled frames have a gradient that is not 0. Shapes: float (videos, frames, 3, height,
        width), with levels in [0, 255], to (videos, dimensions).
        """
        inputs = self.prepare(list(videos), prompts, [fps] * len(videos))
        with without_cudnn_attention(), recomputed(self.model):
            raw = self.model(**inputs).float()
        constants = self.settings.normalisation
        if not constants:
            return raw
        mean = raw.new_tensor([constants[f"{name}_mean"] for name in self.dimensions])
        std = raw.new_tensor([constants[f"{name}_std"] for name in self.dimensions])
        return (raw - mean) / std

    def score_files(
        self, paths: list[str | Path], prompts: list[str], *, normalize: bool = True
    ) -> list[Scores]:
        """Score video files like `score`, with the frames per second that the files specify."""
        clips, rates = zip(*(read_video(path) for path in paths))
        return self._score(list(clips), prompts, list(rates), normalize)

    @torch.no_grad()
    def _score(
        self, videos: list[Tensor], prompts: list[str], rates: list[float], normalize: bool
    ) -> list[Scores]:
        for video in videos:
            check_video(video)
        scores: list[Scores] = []
        for start in range(0, len(videos), self.batch_size):
            part = slice(start, start + self.batch_size)
            raw = (
                self.model(**self.prepare(videos[part], prompts[part], rates[part]))
                .float()
                .tolist()
            )
            scores += [self._scaled(row, normalize) for row in raw]
        return scores

    def prepare(
        self, videos: list[Tensor], prompts: list[str], rates: list[float]
    ) -> dict[str, Tensor]:
        """Return the model's inputs for a batch, padded on the right."""
        values = []
        questions = []
        for video, prompt, rate in zip(videos, prompts, rates):
            values.append(patches(self.sample_frames(video, rate).to(self.device)))
            questions.append(question(prompt, self.settings.template))
        return model_inputs(self.tokenizer, "video", values, questions, self.device)

    def sample_frames(self, video: Tensor, rate: float) -> Tensor:
        """Return a video's sampled, resized frames, on the CPU; passing them again at
        ``settings.fps`` keeps all.

        A video as floats keeps its gradient.
        """
        settings = self.settings
        if not video.is_floating_point():
            check_video(video)
        frames = video[
            frame_indices(len(video), rate, fps=settings.fps, num_sampled=settings.num_frames)
        ]
        # Resized on the CPU like the original, because a GPU rounds some pixels differently.
        return resize(frames.cpu(), max_pixels=settings.max_pixels, min_pixels=settings.min_pixels)

    def _scaled(self, row: list[float], normalize: bool) -> Scores:
        scores = dict(zip(self.dimensions, row))
        constants = self.settings.normalisation
        if normalize and constants:
            scores = {
                name: (v - constants[f"{name}_mean"]) / constants[f"{name}_std"]
                for name, v in scores.items()
            }
        return scores | {"Overall": sum(scores.values())}
