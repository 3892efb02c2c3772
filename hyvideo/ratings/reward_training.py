"""Fine-tuning of VideoAlign on compared pairs of videos with VideoReward's loss, the Bradley-Terry
model with ties.

    P(first) = s1 / (s1 + theta s2)     P(second) = s2 / (s2 + theta s1)     the rest is a tie; s = exp(score)

The head and a LoRA on the language model are trained: the checkpoint's LoRA, or a new one. On a
GPU, in bf16 autocast.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.data.pairs import HELD_OUT, TIE, read_ratings
from hyvideo.data.randomness import permutation
from hyvideo.data.video_files import read_header
from hyvideo.data.videos import read_video
from hyvideo.files.files import free_disk, publish, read_json, remove_partial
from hyvideo.files.run_folder import Lease
from hyvideo.files.tables import PICTURES
from hyvideo.files.text import quote
from hyvideo.records.run_files import write_text
from hyvideo.rewards.qwen2_vl.model import plain_name, without_cudnn_attention
from hyvideo.rewards.rewards import DIMENSIONS, OVERALL
from hyvideo.rewards.videoalign.checkpoint import (
    check_dimensions,
    find_checkpoint,
    save_weights,
)
from hyvideo.rewards.videoalign.scorer import VideoAlignScorer

CHECKPOINT = "checkpoint-1"  # folder of the weights
THETA = 5.0  # as in VideoReward
SMALL_FILES = 2**24  # bytes of the tokenizer, the settings and the pictures
TARGETS = r"language_model\..*_proj"  # modules of a new LoRA, as in VideoReward
PATIENCE = 4  # epochs without a lower loss before training stops
CACHED_VIDEOS = 2048  # sampled and resized videos in memory, 3.5 MB each at full size
PARTS = ("test", "stop", "train")


class RatedPair(NamedTuple):
    """Two videos of a prompt, and the raters' answers as (dimension, index of the preferred video
    or TIE).
    """

    prompt: str
    videos: tuple[Path, Path]
    answers: list[tuple[str, int]]


def train(
    pairs_csv: Path,
    start: Path,
    out: Path,
    *,
    dimensions: Sequence[str] | None,
    batch_size: int,
    seed: int,
    **fit: float,
) -> dict:
    """Train the reward model in ``start`` on the pairs, write it to ``out``, and return its quality
    on the held-out prompts before and after.

    ``dimensions`` are names in place of those of the model; ``fit`` has the other arguments of
    `PairTraining.fit`. Raises ValueError for input that cannot be used, before anything is trained.
    """
    reject_model(out)
    known = find_checkpoint(start).settings.dimensions
    names = check_dimensions(dimensions or known, "--dimensions")
    pairs = read_pairs(pairs_csv, names)
    # Names that are new at their token.
    moved = [
        name for token, name in enumerate(names) if token >= len(known) or known[token] != name
    ]
    needed = moved if pairs else names
    split = split_by_prompt(pairs, needed, seed)
    with Lease(out):
        reject_model(out)  # of a process that has ended since
        remove_partial(out)
        check_videos(pairs)  # before hours of training
        training = PairTraining(start, split, names, batch_size)
        check_room(out, training.scorer.model)
        report: dict = {"pairs": {part: len(members) for part, members in split.items()}}
        report["before"] = training.quality(out / "calibration_before.png")
        report["losses"] = training.fit(seed=seed, **fit)
        training.write(out)
        report["after"] = training.quality(out / "calibration.png")
        write_text(out / "training.json", json.dumps(report, indent=1) + "\n")
    return report


def reject_model(folder: Path) -> None:
    """Raise ValueError if a folder has a reward model, or its weights."""
    if (folder / "model_config.json").exists() or (folder / CHECKPOINT).exists():
        raise ValueError(
            f"--output_dir must not contain a model, but {folder} does; choose another folder"
        )


def read_pairs(path: Path, names: Sequence[str]) -> list[RatedPair]:
    """Read the pairs of a table, except those of other dimensions or of identical videos.

    Answers without a dimension, or only about the whole video, are those of the only name that
    VideoReward does not have. Raises ValueError if there is not one such name.
    """
    ratings = read_ratings(path)
    if {rating.dimension for rating in ratings} in ({""}, {OVERALL}):
        new = [name for name in names if name not in DIMENSIONS]
        if len(new) != 1:
            raise ValueError(
                f"the answers in {path} are about the whole video, not about one of "
                f"{', '.join(names)}; give them a name in --dimensions, such as "
                "`--dimensions VQ MQ BETTER`, which trains the third output on them"
            )
        ratings = [replace(rating, dimension=new[0]) for rating in ratings]
    answers: dict[tuple, list] = {}
    for rating in ratings:
        first, second = rating.videos
        if rating.dimension in names and first != second:
            pair = (rating.request.prompt, rating.videos)
            answers.setdefault(pair, []).append((rating.dimension, rating.outcome))
    return [RatedPair(*pair, given) for pair, given in answers.items()]


def check_room(folder: Path, model: torch.nn.Module) -> None:
    """Raise ValueError if a folder lacks room for the weights of a model in bfloat16."""
    needed = 2 * sum(parameter.numel() for parameter in model.parameters()) + SMALL_FILES
    free = free_disk(folder)
    if free < needed:
        raise ValueError(
            f"--output_dir must have room for the model, {needed / 2**30:.2f} GiB, got "
            f"{quote(folder)} with {free / 2**30:.2f} GiB free; free some space, or choose another "
            "folder"
        )


def check_videos(pairs: Iterable[RatedPair]) -> None:
    """Raise ValueError, naming the file, if the header of a video cannot be read, and for a picture."""
    for video in dict.fromkeys(video for pair in pairs for video in pair.videos):
        if read_header(video).num_frames == 1 or video.suffix.casefold() in PICTURES:
            raise ValueError(
                f"VideoAlign scores videos of at least 2 frames, got a picture: {quote(video)}; leave "
                "out the pairs of pictures"
            )


def split_by_prompt(
    pairs: Sequence[RatedPair], needed: Iterable[str], seed: int
) -> dict[str, list[RatedPair]]:
    """Split pairs by prompt into ``train``, ``stop`` (early stopping) and ``test`` (evaluation
    only).

    Raises ValueError if a part has no preference in a dimension that is rated or ``needed``.
    """
    prompts = sorted({pair.prompt for pair in pairs})
    places = dict(zip(prompts, permutation(len(prompts), seed, "pairs")))
    size = max(1, round(HELD_OUT * len(prompts)))
    split = {
        part: [p for p in pairs if PARTS[min(2, places[p.prompt] // size)] == part]
        for part in PARTS
    }
    rated = {
        part: {name for p in group for name, k in p.answers if k != TIE}
        for part, group in split.items()
    }
    for name in sorted({*needed, *(name for pair in pairs for name, _ in pair.answers)}):
        missing = [part for part in PARTS if name not in rated[part]]
        if missing:
            raise ValueError(
                f"a dimension needs preferences in each part of the {len(prompts)} prompts (at "
                f"least three prompts), {name} has none in {', '.join(missing)}; rate more "
                "prompts, or set --dimensions to those rated"
            )
    return split


class PairTraining:
    """Training of a scorer on ``split``; ``names`` are its dimensions, in the order of the reward
    tokens.
    """

    def __init__(
        self, root: Path, split: dict[str, list[RatedPair]], names: Sequence[str], batch_size: int
    ):
        self.root = root
        self.split = split
        self.names = list(names)
        self.batch_size = batch_size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.load = partial(VideoAlignScorer, device=self.device, precision="fp32_math")
        self.scorer = self.load(root)
        self.frames = lru_cache(CACHED_VIDEOS)(
            lambda path: self.scorer.sample_frames(*read_video(path))
        )

    def scores(self, pairs: Sequence[RatedPair]) -> Tensor:
        """Return the raw scores of both videos of each pair, on the CPU. Shape: (pairs, 2, 3)."""
        parts = []
        for start in range(0, len(pairs), self.batch_size):
            batch = pairs[start : start + self.batch_size]
            videos, prompts = zip(
                *[(self.frames(video), pair.prompt) for pair in batch for video in pair.videos]
            )
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device == "cuda"):
                inputs = self.scorer.prepare(
                    videos, prompts, [self.scorer.settings.fps] * len(videos)
                )
                parts.append(self.scorer.model(**inputs).float().cpu())
        return torch.cat(parts).unflatten(0, (len(pairs), 2))

    def answers(self, pairs: Sequence[RatedPair], names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of first, second and tie (answers, 3), and the raters'
        answers (answers,).
        """
        answers = []
        for row, pair in enumerate(pairs):
            for name, outcome in pair.answers:
                if name in names:
                    answers.append((row, self.names.index(name), outcome))
        rows, columns, outcomes = torch.tensor(answers).T
        difference = self.scores(pairs).diff(dim=1)[rows, 0, columns]  # second minus first
        first = F.logsigmoid(-difference - math.log(THETA))
        second = F.logsigmoid(difference - math.log(THETA))
        tie = first + second + math.log(THETA**2 - 1)
        return torch.stack([first, second, tie], dim=1), outcomes

    @without_cudnn_attention()
    def fit(
        self,
        *,
        learning_rate: float,
        weight_decay: float,
        lora_rank: int,
        seed: int,
        max_epochs: int,
    ) -> list[float]:
        """Train with a linearly decreasing learning rate, keep the best epoch, and return the
        losses on ``stop``.

        Raises FloatingPointError if the norm of a gradient is NaN or inf.
        """
        trained = self._trainable(lora_rank, seed)
        pairs = self.split["train"]
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay)
        num_updates = max_epochs * math.ceil(len(pairs) / self.batch_size)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_updates)
        losses = []
        best = []
        for epoch in range(max_epochs + 1):
            with torch.no_grad():
                losses.append(F.nll_loss(*self.answers(self.split["stop"], self.names)).item())
            print(f"epoch {epoch}: loss {losses[-1]:.4f} on held-out prompts", flush=True)
            if losses[-1] == min(losses):
                best = [parameter.detach().clone() for parameter in trained]
            if epoch == max_epochs or min(losses) not in losses[-PATIENCE:]:
                break
            order = permutation(len(pairs), seed, "pairs", epoch)
            for start in range(0, len(pairs), self.batch_size):
                batch = [pairs[k] for k in order[start : start + self.batch_size]]
                optimizer.zero_grad()
                F.nll_loss(*self.answers(batch, self.names)).backward()
                norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
                if not math.isfinite(norm):
                    update = start // self.batch_size + 1
                    raise FloatingPointError(
                        _bad_gradient(norm, epoch + 1, update, batch, learning_rate)
                    )
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(trained, best)
        return losses

    def _trainable(self, lora_rank: int, seed: int) -> list[Tensor]:
        """Freeze all weights except the LoRA and the head, and return these."""
        from peft import LoraConfig, inject_adapter_in_model

        model = self.scorer.model
        if self.scorer.settings.lora is None:
            lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=TARGETS)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                inject_adapter_in_model(lora, model.model)
        if self.device == "cuda":
            model.train().model.gradient_checkpointing_enable({"use_reentrant": False})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name or name == "head.weight")
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def write(self, out: Path) -> None:
        """Write a VideoReward folder, with the LoRA merged and normalization from the training
        videos, and load it.
        """
        from peft.tuners.lora import LoraLayer

        raw = self.scores(self.split["train"]).flatten(0, 1)
        model = self.scorer.model.model
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.merge()
        state = {
            plain_name(name): tensor
            for name, tensor in model.state_dict().items()
            if ".lora_" not in name
        }
        (out / "base").mkdir(exist_ok=True)
        with publish(out / "base" / "config.json") as path:
            model.config.to_json_file(path)
        with publish(out / CHECKPOINT, is_folder=True) as checkpoint:
            self.scorer.tokenizer.save_pretrained(checkpoint / "tokenizer")
            save_weights(checkpoint, state, self.scorer.model.head.weight)
        config = read_json(self.root / "model_config.json", "VideoAlign")
        config["data_config"]["eval_dim"] = self.names
        config["model_config"]["model_name_or_path"] = "base"
        statistics = {"mean": raw.mean(0).tolist(), "std": raw.std(0).tolist()}
        constants = {
            f"{name}_{kind}": x
            for kind, row in statistics.items()
            for name, x in zip(self.names, row)
        }
        config["peft_lora_config"] = {"lora_enable": False}
        config["inference_config"] = constants
        # the last file, without which the folder is no model
        with publish(out / "model_config.json") as path:
            path.write_text(json.dumps(config, indent=1) + "\n")
        self.scorer = self.load(out)

    @torch.no_grad()
    def quality(self, picture: Path) -> dict[str, dict[str, float]]:
        """Return the accuracy on preferences and the loss on all answers of ``test``; plot the
        calibration.
        """
        from matplotlib.figure import Figure

        figure = Figure(dpi=120)
        axes = figure.subplots()
        quality = {}
        axes.set(
            xlabel="predicted probability of first", ylabel="fraction of answers that are first"
        )
        axes.plot([0, 1], [0, 1], color="0.8")
        for name in sorted({name for pair in self.split["test"] for name, _ in pair.answers}):
            log_probs, outcomes = self.answers(self.split["test"], [name])
            signs = (log_probs[:, 0] - log_probs[:, 1]).sign() * (1 - 2 * outcomes)
            correct = (signs[outcomes != TIE] + 1) / 2  # 0.5 if both scores are equal
            quality[name] = {"accuracy": correct.mean().item(), "preferences": len(correct)}
            quality[name]["loss"] = F.nll_loss(log_probs, outcomes).item()
            probability = log_probs[:, 0].exp()
            bins = (10 * probability).long().clamp(max=9)
            count, x, y = (
                torch.bincount(bins, weights, 10)
                for weights in (bins >= 0, probability, outcomes == 0)
            )
            axes.plot(x / count, y / count, "o", label=f"{name}, {len(bins)} answers")
        axes.legend()
        figure.savefig(picture)
        return quality


def _bad_gradient(
    norm: float, epoch: int, update: int, pairs: Sequence[RatedPair], learning_rate: float
) -> str:
    """Return the message for a gradient norm of NaN or inf, with the videos of the pairs."""
    videos = ", ".join(str(video) for pair in pairs for video in pair.videos)
    return (
        f"the gradient norm of epoch {epoch}, update {update} is {norm}, so no weights can be "
        f"trained. Either the learning rate of {learning_rate:g} is too high, or the model returns "
        f"NaN or inf for one of these videos: {videos}. Lower --learning_rate, or leave these "
        "pairs out"
    )
