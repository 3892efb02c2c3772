"""VideoAlign: visual quality, motion quality and text alignment of clips, with the original's scores."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hyvideo.data.videos import check_clip, read_video
from hyvideo.models.reward_models.rewards import Scorer, Scores
from hyvideo.models.reward_models.videoalign.checkpoint import EMBEDDING, CheckpointMode, find_checkpoint, read_weights
from hyvideo.models.reward_models.videoalign.model import RewardModel
from hyvideo.models.reward_models.videoalign.preprocessing import MERGE, frame_indices, patches, resize
from hyvideo.models.reward_models.videoalign.prompt import REWARD_TOKENS, VIDEO_TOKEN, check_prompt, question


class VideoAlignScorer(Scorer):
    """Scorer by the frozen reward model in the released layout.

    Precision ``fp32_math`` keeps the published rotary frequencies and computes in float32: the scores that bf16
    scatters about, without its grid of 0.016 to 0.03, so that a group of near-equal clips has no ties. Raises
    ValueError for files that are missing, damaged or do not fit, naming them.
    """

    reserved = (*REWARD_TOKENS, VIDEO_TOKEN)  # texts in whose place the model answers or sees

    def __init__(
        self,
        root: str | Path,  # folder with model_config.json and checkpoint-*
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,  # as published, or float32 throughout, rotary frequencies too
        precision: Literal["bf16", "fp32_math"] | None = None,
        merge_lora: bool = False,  # add the LoRA to the weights; a little faster, scores move by bf16's rounding
        batch_size: int = 4,  # clips in one forward pass
        mode: CheckpointMode = "auto",
        step: int | None = None,
        base: str | Path | None = None,  # folder of Qwen2-VL-2B-Instruct; needed for an adapter checkpoint only
    ):
        from transformers import AutoTokenizer, Qwen2VLConfig

        checkpoint = find_checkpoint(root, step=step, base=base)
        weights = read_weights(checkpoint, mode=mode)
        self.settings = checkpoint.settings
        self.dimensions = checkpoint.settings.dimensions
        self.batch_size = batch_size
        self.device = self.home = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.tokenizer, padding_side="right", local_files_only=True
        )
        self.tokenizer.add_special_tokens({"extra_special_tokens": list(REWARD_TOKENS)})
        config = Qwen2VLConfig.from_dict(checkpoint.config)
        if EMBEDDING in weights.model:
            # The original cuts the embedding to the tokenizer's length.
            weights.model[EMBEDDING] = weights.model[EMBEDDING][: len(self.tokenizer)]
            config.text_config.vocab_size = len(weights.model[EMBEDDING])
        rounded = precision == "fp32_math" or dtype == torch.bfloat16
        self.model = RewardModel(
            config,
            weights,
            checkpoint.settings,
            reward_token_ids=self.tokenizer.convert_tokens_to_ids(list(REWARD_TOKENS)),
            merge_lora=merge_lora,
            dtype=torch.float32 if precision == "fp32_math" else dtype,
            rope_dtype=torch.bfloat16 if rounded else torch.float32,
            device=self.device,
        )

    def move_to(self, device: str | torch.device | None) -> None:
        """Moves the model; None brings it back to the device it was made for."""
        self.device = self.home if device is None else torch.device(device)
        self.model.to(self.device)

    def check_prompts(self, prompts: Iterable[str]) -> None:
        """Raises ValueError for a prompt with one of the tokens in whose place the model answers."""
        for prompt in prompts:
            check_prompt(prompt)

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float, normalize: bool = True) -> list[Scores]:
        """VQ, MQ, TA (or what eval_dim names) and their sum of each clip; normalised by the checkpoint's statistics.

        Shape of each clip: uint8 (frames, 3, height, width). ``fps`` decides which frames are looked at. Raises
        ValueError for a clip that is too short or of another type, and for a reserved prompt.
        """
        return self._score(videos, prompts, [fps] * len(videos), normalize)

    def score_files(self, paths: list[str | Path], prompts: list[str], *, normalize: bool = True) -> list[Scores]:
        """Scores as of `score`, of video files, whose frames per second are in them."""
        clips, rates = zip(*(read_video(path) for path in paths))
        return self._score(list(clips), prompts, list(rates), normalize)

    @torch.no_grad()
    def _score(self, videos: list[Tensor], prompts: list[str], rates: list[float], normalize: bool) -> list[Scores]:
        if len(videos) != len(prompts):
            raise ValueError(f"every clip needs its prompt, got {len(videos)} clips and {len(prompts)} prompts")
        scores: list[Scores] = []
        for start in range(0, len(videos), self.batch_size):
            part = slice(start, start + self.batch_size)
            raw = self.model(**self.prepare(videos[part], prompts[part], rates[part])).float().tolist()
            scores += [self._scaled(row, normalize) for row in raw]
        return scores

    def prepare(self, videos: list[Tensor], prompts: list[str], rates: list[float]) -> dict[str, Tensor]:
        """The model's inputs for a batch, padded on the right."""
        pixels, grids, texts = [], [], []
        for video, prompt, rate in zip(videos, prompts, rates):
            values, grid = patches(self.look(video, rate).to(self.device))
            pixels.append(values)
            grids.append(grid)
            texts.append(question(prompt, grid[0] * grid[1] * grid[2] // MERGE**2, self.settings.template))
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt")
        return {
            "input_ids": tokens.input_ids.to(self.device),
            "attention_mask": tokens.attention_mask.to(self.device),
            "pixel_values_videos": torch.cat(pixels),
            "video_grid_thw": torch.tensor(grids, device=self.device),
        }

    def look(self, video: Tensor, rate: float) -> Tensor:
        """The frames of a clip that are looked at, on the CPU; at ``settings.fps`` these are looked at whole."""
        settings = self.settings
        check_clip(video)
        frames = video[frame_indices(len(video), rate, fps=settings.fps, num_sampled=settings.num_frames)]
        # Resized where the original does it: a GPU rounds some of the pixels to another level.
        return resize(frames.cpu(), max_pixels=settings.max_pixels, min_pixels=settings.min_pixels)

    def doubts(self, num_frames: int, fps: float) -> list[str]:
        """Reasons why the scores of clips of this length may not mean what they should."""
        doubts = []
        # The model looks at 2 frames a second and at no less than 4: below 2 seconds it sees more of them a second.
        looked_at = len(frame_indices(num_frames, fps, fps=self.settings.fps, num_sampled=self.settings.num_frames))
        if self.settings.num_frames is None and looked_at > num_frames / fps * self.settings.fps + 1:
            doubts.append(
                f"looks at {looked_at} of {num_frames} frames, {num_frames / fps:.2f} s: more than its "
                f"{self.settings.fps:g} a second, scores of so short clips are shifted"
            )
        if not self.settings.normalisation:
            doubts.append("no normalisation: scores are raw, and weights between dimensions mean something else")
        return doubts

    def _scaled(self, row: list[float], normalize: bool) -> Scores:
        scores = dict(zip(self.dimensions, row))
        if normalize and (constants := self.settings.normalisation):
            scores = {name: (v - constants[f"{name}_mean"]) / constants[f"{name}_std"] for name, v in scores.items()}
        return scores | {"Overall": sum(scores.values())}
