"""HPSv3: scores of a video's frames by a model of human preferences among pictures.

    HPSv3       = mean over frames of mu
    HPSv3_top30 = mean over the best 30 % of the frames, at least one, of mu

mu is the first of the model's two outputs for a frame and the prompt; the second, the logarithm of
a standard deviation, is not used. Source: arXiv:2508.03789. ``prompt_template.txt`` is
MizzenAI/HPSv3's (MIT license), byte for byte: the scores depend on every token of it.
"""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from hyvideo.data.videos import check_video
from hyvideo.files.files import read_json
from hyvideo.rewards.clip_metrics import frame_indices
from hyvideo.rewards.qwen2_vl.inputs import load_tokenizer, model_inputs
from hyvideo.rewards.qwen2_vl.model import (
    EMBEDDING,
    RewardModel,
    by_plain_name,
    recomputed,
    without_cudnn_attention,
)
from hyvideo.rewards.qwen2_vl.preprocessing import FACTOR, patches, resize_by_pillow
from hyvideo.rewards.rewards import Scorer, Scores
from hyvideo.weights.weight_files import check_dtypes, read_safetensors

LABEL = "HPSv3"
REWARD_TOKEN = "<|Reward|>"
PIXELS = 256 * FACTOR**2  # of a resized frame, about, whatever its size was
BEST = 0.3  # share of the frames in HPSv3_top30
TEMPLATE = Path(__file__).with_name("prompt_template.txt")


class HPSv3Scorer(Scorer):
    """Scorer that runs the released HPSv3 on frames of each video.

    With precision ``fp32_math``, arithmetic is in float32 with the published (bf16) rotary
    frequencies. Raises ValueError, naming the file, if a file is missing, corrupted or does not
    fit.
    """

    dimensions = ("HPSv3", "HPSv3_top30")

    def __init__(
        self,
        # folder with HPSv3.safetensors, and with config.json and the tokenizer of Qwen2-VL-7B
        root: str | Path,
        *,
        device: str | torch.device = "cpu",
        # as published, or float32 throughout, including rotary frequencies
        dtype: torch.dtype = torch.bfloat16,
        precision: Literal["bf16", "fp32_math"] | None = None,
        num_frames: int = 8,  # evenly spaced, the first and the last included; 0: all
        batch_size: int = 8,  # frames per forward pass
        # folder of Qwen2-VL-7B-Instruct, if its files are not in ``root``
        base: str | Path | None = None,
    ):
        from transformers import Qwen2VLConfig

        if num_frames < 0:
            raise ValueError(f"num_frames of {LABEL} must be 0 for all or more, got {num_frames}")
        self.num_frames = num_frames
        self.batch_size = batch_size
        self.device = self.home = torch.device(device)
        self.template = TEMPLATE.read_bytes().decode()
        folder = Path(base or root)
        config = Qwen2VLConfig.from_dict(read_json(folder / "config.json", LABEL))
        self.tokenizer = load_tokenizer(folder, [REWARD_TOKEN])
        tensors, head = read_weights(Path(root) / "HPSv3.safetensors")
        config.text_config.vocab_size = self._check_vocabulary(tensors, folder)
        rounded = precision == "fp32_math" or dtype == torch.bfloat16
        self.model = RewardModel(
            LABEL,
            config,
            tensors,
            head,
            reward_token_ids=[self.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)],
            dtype=torch.float32 if precision == "fp32_math" else dtype,
            rope_dtype=torch.bfloat16 if rounded else torch.float32,
            device=self.device,
        )

    def _check_vocabulary(self, tensors: dict[str, Tensor], folder: Path) -> int:
        """Return the rows of the embedding. Raises ValueError unless the tokenizer has as many."""
        rows = len(tensors.get(EMBEDDING, ()))
        if rows != len(self.tokenizer):
            raise ValueError(
                f"{LABEL}: the tokenizer in {folder} must have as many tokens as the embedding in "
                f"HPSv3.safetensors has rows ({rows}), got {len(self.tokenizer)}; it must be that "
                "of Qwen2-VL-7B-Instruct"
            )
        return rows

    def move_to(self, device: str | torch.device | None) -> None:
        """Move the model; None moves it back to its own device."""
        self.device = self.home if device is None else torch.device(device)
        self.model.to(self.device)

    @torch.no_grad()
    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[Scores]:
        """Return HPSv3 and HPSv3_top30 of each video, ignoring ``fps``.

        Shape of each video: uint8 (frames, 3, height, width). Raises ValueError for a video of
        another type.
        """
        for video in videos:
            check_video(video)
        rows = [self._scores(video, prompt) for video, prompt in zip(videos, prompts)]
        return [dict(zip(self.dimensions, row.tolist())) for row in rows]

    def score_with_gradient(self, videos: Tensor, prompts: list[str], *, fps: float) -> Tensor:
        """Return the values of `score` in the order of ``dimensions``, with their gradient by the
        videos' levels.

        Only sampled frames have a gradient that is not 0, and in HPSv3_top30 only the best of
        them. Shapes: float (videos, frames, 3, height, width), with levels in [0, 255], to
        (videos, dimensions).
        """
        with recomputed(self.model):
            rows = [self._scores(video, prompt) for video, prompt in zip(videos, prompts)]
        return torch.stack(rows)

    def _scores(self, video: Tensor, prompt: str) -> Tensor:
        """Return the scores of a video in the order of ``dimensions``, on the CPU.

        The frames of a video have one length, so no token is padding, and the scores do not depend
        on other videos.
        """
        frames = video[frame_indices(len(video), self.num_frames or len(video))]
        means = [self.frame_scores(part, prompt) for part in frames.split(self.batch_size)]
        return torch.stack(estimates(torch.cat(means)))

    def frame_scores(self, frames: Tensor, prompt: str) -> Tensor:
        """Return mu of each frame on the CPU. Shape: (frames, 3, height, width) to (frames,)."""
        with without_cudnn_attention():
            return self.model(**self.prepare(frames, prompt))[:, 0].cpu()

    def prepare(self, frames: Tensor, prompt: str) -> dict[str, Tensor]:
        """Return the model's inputs for frames with one prompt."""
        # Pillow resizes on the CPU
        resized = resize_by_pillow(frames.cpu(), max_pixels=PIXELS, min_pixels=PIXELS)
        # a single frame fills the pair that becomes one patch
        values = [patches(frame[None]) for frame in resized.to(self.device)]
        questions = [self.template.replace("{text_prompt}", prompt)] * len(frames)
        return model_inputs(self.tokenizer, "image", values, questions, self.device)


def estimates(means: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over all frames and over the best 30 %. Shape: (frames,) to () and ()."""
    num_best = max(1, int(BEST * len(means)))
    return means.mean(), means.topk(num_best).values.mean()


def read_weights(path: Path) -> tuple[dict[str, Tensor], nn.Sequential]:
    """Return the tensors of a released file by the names of Qwen2VLModel, and the head in float32.

    Raises ValueError if the file is corrupted, or has no such head.
    """
    stored, _ = read_safetensors(path, LABEL)
    check_dtypes(stored, LABEL, path)
    tensors = by_plain_name(stored, path, LABEL)
    # The output layer is not tied to the embedding, and no score reads it.
    tensors.pop("lm_head.weight", None)
    layers = {}
    for name in [name for name in tensors if name.startswith("rm_head.")]:
        layers[name.removeprefix("rm_head.")] = tensors.pop(name).float()
    try:
        with torch.device("meta"):
            head = nn.Sequential(
                nn.Linear(layers["0.weight"].shape[1], 1024),
                nn.ReLU(),
                nn.Identity(),  # dropout, while the original was trained
                nn.Linear(1024, 16),
                nn.ReLU(),
                nn.Linear(16, 2),
            )
        head.load_state_dict(layers, strict=True, assign=True)
    except (KeyError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"{LABEL}: {path} does not have the three layers of HPSv3's head (rm_head): {error}"
        ) from error
    return tensors, head
