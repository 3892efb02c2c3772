"""CLIPScore and PickScore: similarity of a video's frames to its prompt, as metrics or rewards.

    cosine_f = <image_f, text> / (|image_f| |text|)      f: 8 frames, evenly spaced
    CLIPScore    = mean_f 2.5 max(cosine_f, 0)            Hessel et al. 2021, openai/clip-vit-large-patch14
    CLIPScore_30 = mean_f 100 cosine_f / 30               flow_grpo's later clip_scorer
    PickScore    = mean_f exp(logit_scale) cosine_f / 26  flow_grpo, yuvalkirstain/PickScore_v1

Publications do not state which scaling they use, so the mean cosine is also returned. All
arithmetic is in float32. Only the central square of a frame is scored, as in CLIP's preprocessing.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from hyvideo.data.videos import check_video, round_through
from hyvideo.files.files import is_repository, read_json
from hyvideo.models import encoders
from hyvideo.rewards.rewards import Scorer, Scores
from hyvideo.weights.weight_files import Folder

NUM_FRAMES = 8
NUM_TOKENS = 77  # per text, including start and end token; longer texts are truncated, as published
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


# of a model in transformers' layout
_FILES = ("*.json", "*.txt", "*.safetensors")


class FrameTextScorer(Scorer):
    """Cosine similarity of frames and prompt in a CLIP model; subclasses define the scaling."""

    label: str
    dimensions: tuple[str, ...]

    def __init__(
        self,
        # a local folder, or a name on the hub ("owner/model"), which is downloaded
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        batch_size: int = 4,  # videos per forward pass, 8 frames each
        # folder or hub name of the tokenizer; by default as for the weights
        processor: str | Path | None = None,
    ):
        from transformers import CLIPImageProcessorPil

        self.batch_size = batch_size
        self.device = self.home = torch.device(device)
        self.model = load_model(path, self.label).to(self.device)
        size = self.model.config.vision_config.image_size
        self.image_processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=size)
        self.tokenizer = load_tokenizer(processor or self.default_processor(path), self.label)
        vocabulary = self.model.config.text_config.vocab_size
        if len(self.tokenizer) != vocabulary:
            raise ValueError(
                f"{self.label}: the tokenizer has {len(self.tokenizer)} tokens, the model in "
                f"{path} has {vocabulary}; they belong to different models. Download both again"
            )
        self._texts: dict[str, Tensor] = {}  # unit embedding of each prompt scored so far

    @staticmethod
    def default_processor(path: str | Path) -> str | Path:
        """Return the folder or hub name of the tokenizer."""
        return path

    def scaled(self, cosines: Tensor) -> Tensor:
        """Return a video's scores from the cosines of its frames.

        Shapes: (frames,) to (dimensions,).
        """
        raise NotImplementedError

    def move_to(self, device: str | torch.device | None) -> None:
        """Move the model; None moves it back to its own device."""
        self.device = self.home if device is None else torch.device(device)
        self.model.to(self.device)

    @torch.no_grad()
    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[Scores]:
        """Return the mean cosine of each video and its scalings, ignoring ``fps``.

        ValueError for invalid input.
        """
        for video in videos:
            check_video(video)
        scores: list[Scores] = []
        for start in range(0, len(videos), self.batch_size):
            part = slice(start, start + self.batch_size)
            for cosines in self.cosines(videos[part], prompts[part]):
                scores.append(dict(zip(self.dimensions, self.scaled(cosines).tolist())))
        return scores

    def score_with_gradient(self, videos: Tensor, prompts: list[str], *, fps: float) -> Tensor:
        """Return the values of `score` in the order of ``dimensions``, with their gradient by the
        videos' levels.

        Shapes: float (videos, frames, 3, height, width), with levels in [0, 255], to (videos,
        dimensions).
        """
        return torch.stack(
            [self.scaled(cosines) for cosines in self.cosines(list(videos), prompts)]
        )

    def cosines(self, videos: list[Tensor], prompts: list[str]) -> list[Tensor]:
        """Return the cosine of each sampled frame with the video's prompt, on the CPU.

        Shape of each: (frames,).
        """
        texts = torch.stack([self._text(prompt) for prompt in prompts])
        clips = [video[frame_indices(len(video))].cpu() for video in videos]
        # videos of one batch may differ in size
        frames = [frame for clip in clips for frame in clip]
        levels = [frame.detach().to(torch.uint8) for frame in frames]
        pixels = self.image_processor(
            levels, input_data_format="channels_first", return_tensors="pt"
        ).pixel_values
        if any(frame.requires_grad for frame in frames):
            resized = torch.stack([self._resized(frame) for frame in frames])
            pixels = pixels + (resized - resized.detach())  # the image processor has no gradient
        pooled = self.model.vision_model(pixel_values=pixels.to(self.device)).pooler_output
        # (frames of all videos, dim)
        images = F.normalize(self.model.visual_projection(pooled), dim=-1).cpu()
        return [
            image @ text for image, text in zip(images.split([len(clip) for clip in clips]), texts)
        ]

    def _resized(self, frame: Tensor) -> Tensor:
        """Return the pixels of the image processor as a function with a gradient, about one level
        from its values.

        Shape: float (3, height, width) to (3, size, size).
        """
        processor = self.image_processor
        size = processor.size["shortest_edge"]
        height, width = frame.shape[-2:]
        shorter = min(height, width)
        shape = int(size * height / shorter), int(size * width / shorter)
        resized = F.interpolate(
            frame[None], shape, mode="bicubic", align_corners=False, antialias=True
        )[0]
        top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
        levels = round_through(resized.clamp(0, 255))[:, top : top + size, left : left + size]
        mean = levels.new_tensor(processor.image_mean).view(3, 1, 1)
        std = levels.new_tensor(processor.image_std).view(3, 1, 1)
        return (levels * processor.rescale_factor - mean) / std

    @torch.no_grad()
    def _text(self, prompt: str) -> Tensor:
        """Return the unit embedding of a prompt, computed once and not in a batch.

        Shape: (dim,).
        """
        if prompt not in self._texts:
            ids = torch.tensor([self._tokens(prompt)], device=self.device)
            pooled = self.model.text_model(input_ids=ids).pooler_output
            self._texts[prompt] = F.normalize(self.model.text_projection(pooled)[0], dim=-1).cpu()
        return self._texts[prompt]

    def _tokens(self, prompt: str) -> list[int]:
        return self.tokenizer(prompt, truncation=True, max_length=NUM_TOKENS).input_ids


class ClipScorer(FrameTextScorer):
    """CLIPScore of openai/clip-vit-large-patch14, in both common scalings."""

    label = "CLIPScore"
    dimensions = ("CLIP_cosine", "CLIPScore", "CLIPScore_30")

    def scaled(self, cosines: Tensor) -> Tensor:
        return torch.stack(
            [cosines.mean(), (2.5 * cosines.clamp(min=0)).mean(), (100 * cosines / 30).mean()]
        )


class PickScorer(FrameTextScorer):
    """PickScore of yuvalkirstain/PickScore_v1. It uses the tokenizer of laion's CLIP-ViT-H-14."""

    label = "PickScore"
    dimensions = ("Pick_cosine", "PickScore")

    @staticmethod
    def default_processor(path: str | Path) -> str | Path:
        """Return the weights' folder or, without a tokenizer, laion's beside it; laion's hub name
        for hub weights.
        """
        if is_repository(path):
            return PICKSCORE_PROCESSOR
        beside = Path(path).parent / PICKSCORE_PROCESSOR.partition("/")[2]
        if not has_tokenizer(Path(path)) and beside.is_dir():
            return beside
        return path

    def scaled(self, cosines: Tensor) -> Tensor:
        scale = self.model.logit_scale.exp().item() / 26
        return torch.stack([cosines.mean(), (scale * cosines).mean()])


def frame_indices(num_frames: int, most: int = NUM_FRAMES) -> list[int]:
    """Return the indices of evenly spaced frames, including the first and last; all frames of a
    shorter video.
    """
    return np.linspace(0, num_frames - 1, min(most, num_frames)).round().astype(int).tolist()


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or all(
        (folder / f).is_file() for f in ("vocab.json", "merges.txt")
    )


def load_model(path: str | Path, label: str) -> torch.nn.Module:
    """Load a frozen CLIPModel in float32. Raises ValueError unless ``path`` has every tensor."""
    from hyvideo.weights.hub import local_folder

    try:
        folder = Folder(Path(local_folder(path, files=_FILES)), label)
        kind = read_json(folder.path / "config.json", label).get("model_type")
        if kind != "clip":
            raise ValueError(f"its model_type is {kind!r}, not 'clip'")
        return encoders.load_model("CLIPModel", folder, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{label}: no CLIP model could be read from {path}, a folder or a name on the hub "
            '("owner/model"); '
            f"download it again. {error}"
        ) from error


def load_tokenizer(path: str | Path, label: str):
    """Load the CLIP tokenizer from a local folder or the hub."""
    from transformers import CLIPTokenizer

    is_local = not is_repository(path)
    try:
        if is_local and not has_tokenizer(Path(path)):
            raise ValueError("It has neither tokenizer.json nor vocab.json with merges.txt.")
        return CLIPTokenizer.from_pretrained(path, local_files_only=is_local)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{label}: no tokenizer could be read from {path}; download it there, or set "
            f"`processor` to its folder. {error}"
        ) from error
