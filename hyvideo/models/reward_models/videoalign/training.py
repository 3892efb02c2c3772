"""Fine-tuning of VideoAlign on rated pairs, as VideoReward was trained: Bradley-Terry with ties, in every dimension.

    P(first) = s1 / (s1 + theta s2)     P(second) = s2 / (s2 + theta s1)     the rest is a tie; s = exp(score)

Trained are a LoRA on the language model's layers, which is the checkpoint's own where it has one, and the reward head.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.data.pairs import TIE, Pair, Split
from hyvideo.data.randomness import permutation
from hyvideo.data.videos import read_video
from hyvideo.models.reward_models.videoalign.checkpoint import plain_name, save_weights
from hyvideo.models.reward_models.videoalign.scorer import VideoAlignScorer
from hyvideo.models.weight_files import read_json

TARGETS = r"language_model\..*_proj"  # of a new LoRA: those of VideoReward's
CLIPS_KEPT = 2048  # looked-at frames of so many clips stay in memory; 3.5 MB each at full size


@dataclass(frozen=True)
class Recipe:
    """Settings of the training."""

    seed: int = 0
    learning_rate: float = 1e-5
    batch_size: int = 8  # pairs
    max_epochs: int = 10
    patience: int = 2  # epochs without a lower loss after which training ends
    lora_rank: int = 64  # of a new LoRA; its alpha is twice that
    theta: float = 5.0  # the larger, the more ties; VideoReward's

    def __post_init__(self):
        counts = (self.batch_size, self.max_epochs, self.patience, self.lora_rank)
        if min(counts) < 1 or not 0 < self.learning_rate < math.inf or not 1 < self.theta < math.inf:
            raise ValueError(f"training needs counts of at least 1, learning_rate above 0, theta above 1, got {self}")


def outcome_log_probs(differences: Tensor, theta: float) -> Tensor:
    """Log-probabilities of first, second and tie, of score differences. Shape: (pairs,) to (pairs, 3)."""
    offset = math.log(theta)
    first, second = F.logsigmoid(differences - offset), F.logsigmoid(-differences - offset)
    return torch.stack([first, second, math.log(theta**2 - 1) + first + second], dim=1)


class PairScores:
    """Differences of the scores of pairs by a scorer, whose model may be in training; ``names`` of its outputs."""

    def __init__(self, scorer: VideoAlignScorer, names: Sequence[str], batch_size: int):
        self.scorer, self.names, self.batch_size = scorer, list(names), batch_size
        self.frames_of = lru_cache(CLIPS_KEPT)(lambda path: scorer.look(*read_video(path)))

    def raw(self, clips: Iterable[tuple[str, Path]]) -> Tensor:
        """Raw scores of prompts and videos. Shape: (clips, 3)."""
        prompts, paths = zip(*clips)
        with torch.autocast(self.scorer.device.type, torch.bfloat16, enabled=self.scorer.device.type == "cuda"):
            return self.scorer.model(**self.scorer.inputs([*map(self.frames_of, paths)], prompts)).float()

    def differences(self, pairs: Sequence[Pair]) -> Tensor:
        """Score of the first video less that of the second, in the dimension of each pair. Shape: (pairs,)."""
        places = {clip: place for place, clip in enumerate(_clips(pairs))}
        scores = self.raw(places)
        columns = [self.names.index(pair.dimension) for pair in pairs]
        first, second = ([places[pair.prompt, pair.videos[k]] for pair in pairs] for k in (0, 1))
        return scores[first, columns] - scores[second, columns]

    @torch.no_grad()
    def of(self, pairs: Sequence[Pair]) -> tuple[list[Pair], Tensor]:
        """The pairs, those of the same videos together, and their differences on the CPU (pairs,)."""
        batches = _batches(pairs, self.batch_size)
        return sum(batches, []), torch.cat([self.differences(batch).cpu() for batch in batches])


def train_on_pairs(
    root: Path, out: Path, split: Split, names: Sequence[str], recipe: Recipe, device: torch.device
) -> dict:
    """Trains the reward model of ``root``, writes it to ``out`` with report and picture, and gives the report.

    Accuracy and loss "before" are those of ``root``, "after" those of what was written, of pairs in ``split.test``.
    ``names`` are the dimensions at the reward tokens, in order. Raises ValueError as `VideoAlignScorer`, for prompts
    with a reserved text and for files that are no videos.
    """
    load = {"device": device, "precision": "bf16" if device.type == "cuda" else "fp32_math"}
    scorer = VideoAlignScorer(root, **load)
    scorer.check_prompts({pair.prompt for part in split for pair in part})
    scores = PairScores(scorer, names, recipe.batch_size)
    before = scores.of(split.test)
    epochs = _fit(scores, split, recipe)
    with torch.no_grad():
        clips = _clips(split.train)
        parts = [clips[start : start + recipe.batch_size] for start in range(0, len(clips), recipe.batch_size)]
        raw = torch.cat([scores.raw(part).cpu() for part in parts])
    _write(root, out, scorer, names, raw)
    after = PairScores(VideoAlignScorer(out, **load), names, recipe.batch_size).of(split.test)
    report = {
        "dimensions": list(names),
        "recipe": asdict(recipe),
        "pairs": {part: len(pairs) for part, pairs in split._asdict().items()},
        "prompts": {part: len({pair.prompt for pair in pairs}) for part, pairs in split._asdict().items()},
        "epochs": epochs,  # loss on split.stop, of the start and after each epoch
        "before": _quality(*before, recipe.theta),
        "after": _quality(*after, recipe.theta),
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    _draw({"before": before, "after": after}, recipe.theta, out / "calibration.png")
    return report


def _fit(scores: PairScores, split: Split, recipe: Recipe) -> list[float]:
    """Trains until the loss on ``split.stop`` falls no more, goes back to its best weights, and gives the losses."""
    trained = _trainable(scores.scorer, recipe)
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0)
    losses, best = [_loss(*scores.of(split.stop), recipe.theta).item()], [p.detach().clone() for p in trained]
    for epoch in range(recipe.max_epochs):
        for batch in _batches(split.train, recipe.batch_size, recipe.seed, epoch):
            optimizer.zero_grad()
            _loss(batch, scores.differences(batch), recipe.theta).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        losses.append(_loss(*scores.of(split.stop), recipe.theta).item())
        print(f"epoch {epoch + 1}: loss {losses[-1]:.4f} on prompts that are not trained on", flush=True)
        if losses[-1] == min(losses):
            best = [p.detach().clone() for p in trained]
        elif len(losses) - 1 - losses.index(min(losses)) >= recipe.patience:
            break
    with torch.no_grad():
        torch._foreach_copy_(trained, best)
    return losses


def _trainable(scorer: VideoAlignScorer, recipe: Recipe) -> list[Tensor]:
    """The LoRA and the head in float32, with gradients; nothing else has one."""
    from peft import LoraConfig, inject_adapter_in_model

    model = scorer.model
    if not scorer.settings.has_lora:
        lora = LoraConfig(r=recipe.lora_rank, lora_alpha=2 * recipe.lora_rank, target_modules=TARGETS)
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            inject_adapter_in_model(lora, model.model)
    if scorer.device.type == "cuda":
        model.train().model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [p for name, p in model.named_parameters() if ".lora_" in name] + [model.head.weight]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    return trained


@torch.no_grad()
def _write(root: Path, out: Path, scorer: VideoAlignScorer, names: Sequence[str], raw: Tensor) -> None:
    """Writes a folder as released, the LoRA merged; scores are normalised to ``raw`` (clips, 3), of training clips."""
    from peft.tuners.lora import LoraLayer

    for layer in scorer.model.modules():
        if isinstance(layer, LoraLayer):
            layer.merge()
    state = {plain_name(k): v for k, v in scorer.model.model.state_dict().items() if ".lora_" not in k}
    (out / "checkpoint-1").mkdir(parents=True, exist_ok=True)
    save_weights(out / "checkpoint-1", state, scorer.model.head.weight)
    scorer.tokenizer.save_pretrained(out / "checkpoint-1" / "tokenizer")
    config = read_json(root / "model_config.json", "VideoAlign")
    config["data_config"]["eval_dim"] = list(names)
    config["model_config"]["model_name_or_path"] = "base"
    config["peft_lora_config"] = {"lora_enable": False}
    statistics = zip(names, raw.mean(0).tolist(), raw.std(0).tolist())
    config["inference_config"] = {
        f"{n}_{k}": v for n, mean, std in statistics for k, v in (("mean", mean), ("std", std))
    }
    (out / "base").mkdir(exist_ok=True)
    (out / "base" / "config.json").write_text(json.dumps(scorer.checkpoint.config, indent=1) + "\n")
    (out / "model_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _loss(pairs: Sequence[Pair], differences: Tensor, theta: float) -> Tensor:
    """Mean negative log-likelihood of the answers."""
    outcomes = torch.tensor([pair.outcome for pair in pairs], device=differences.device)
    return F.nll_loss(outcome_log_probs(differences, theta), outcomes)


def _quality(pairs: Sequence[Pair], differences: Tensor, theta: float) -> dict[str, dict[str, float]]:
    """Loss, and accuracy on the pairs with a preference, of which equal scores get half, by dimension."""
    quality = {}
    for name in dict.fromkeys(pair.dimension for pair in pairs):
        rows = [row for row, pair in enumerate(pairs) if pair.dimension == name]
        of_name = [pairs[row] for row in rows]
        sides = torch.tensor([{0: 1.0, 1: -1.0, TIE: math.nan}[pair.outcome] for pair in of_name])
        right = ((sides * differences[rows].sign() + 1) / 2)[sides.isfinite()]
        loss = _loss(of_name, differences[rows], theta).item()
        quality[name] = {"accuracy": right.mean().item(), "preferences": len(right), "pairs": len(rows), "loss": loss}
    return quality


def _draw(measured: dict[str, tuple[list[Pair], Tensor]], theta: float, path: Path) -> None:
    """Draws the predicted probability of "first" against how often it was answered, in ten bins."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(5, 5))).subplots()
    axes.plot([0, 1], [0, 1], color="0.8")
    for title, (pairs, differences) in measured.items():
        predicted = outcome_log_probs(differences, theta)[:, 0].exp()
        is_first = torch.tensor([float(pair.outcome == 0) for pair in pairs])
        masks = [mask for k in range(10) if (mask := (predicted * 10).long().clamp(max=9) == k).any()]
        points = [(predicted[mask].mean(), is_first[mask].mean(), mask.sum()) for mask in masks]
        axes.plot(*list(zip(*points))[:2], "o-", label=title)
        for x, y, count in points:
            axes.annotate(f"{count}", (x, y), fontsize=8)
    axes.set(xlabel="predicted probability of first", ylabel="part of the answers that are first; pairs beside it")
    axes.legend()
    figure.savefig(path, dpi=120)


def _clips(pairs: Iterable[Pair]) -> list[tuple[str, Path]]:
    """Prompts and videos, each once."""
    return list(dict.fromkeys((pair.prompt, video) for pair in pairs for video in pair.videos))


def _batches(pairs: Sequence[Pair], size: int, *shuffled_by: int) -> list[list[Pair]]:
    """Batches of ``size`` pairs of videos with all that raters said about each, in a random order where keyed."""
    answers: dict[tuple, list[Pair]] = {}
    for pair in pairs:
        answers.setdefault((pair.prompt, *sorted(pair.videos)), []).append(pair)
    groups = list(answers.values())
    if shuffled_by:
        groups = [groups[place] for place in permutation(len(groups), "pairs", *shuffled_by)]
    return [sum(groups[start : start + size], []) for start in range(0, len(groups), size)]
