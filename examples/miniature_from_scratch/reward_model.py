"""The miniature's VideoAlign: a small Qwen2-VL with a reward head, with the classes and files of
the released one.
"""

import json
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.std import EMA

from examples.miniature_from_scratch.architecture import CONFIGS, build_tokenizer
from examples.miniature_from_scratch.optimizer import MuonAndAdamW, steps
from examples.miniature_from_scratch.web_data import corruption_strengths, random_labels
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import generator, normal
from hyvideo.data.videos import to_uint8
from hyvideo.miniature import world
from hyvideo.miniature.measures import measure
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.rewards.videoalign import VideoAlignScorer
from hyvideo.rewards.videoalign.checkpoint import save_weights
from hyvideo.rewards.videoalign.prompt import REWARD_TOKENS
from hyvideo.schedulers.schedule import Schedule

FOLDER = "VideoReward"
NUM_LABELS = (4, 3, 4)  # colors, shapes, directions
SPREADS = torch.tensor([0.18, 0.14, 0.29])  # standard deviations of the true scores
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def write_untrained(folder: Path, seed: int) -> None:
    """Write settings, tokenizer and random weights in the released layout."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [*VISION_TOKENS, *REWARD_TOKENS]})
    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))))
    config = CONFIGS["reward_base"] | {
        "vocab_size": len(tokenizer),
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "base" / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "model_config.json").write_text(
        json.dumps(CONFIGS["reward_settings"], indent=1) + "\n"
    )
    checkpoint = folder / "checkpoint-1"
    checkpoint.mkdir(exist_ok=True)
    tokenizer.save_pretrained(checkpoint / "tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = Qwen2VLModel(Qwen2VLConfig.from_dict(config)).state_dict()
    head = 0.02 * normal((1, config["hidden_size"]), seed, "reward head")
    save_weights(checkpoint, state, head)


def train(
    root: Path, clips: tuple[Tensor, Tensor], *, num_steps: int, batch_size: int, seed: int
) -> None:
    """Train the reward model in ``root`` on the true scores of rendered videos and of the base
    policy's ``clips``.

    Shapes: uint8 (videos, frames, 3, height, width) and the labels of their prompts (videos, 3).
    """
    folder = root / FOLDER
    write_untrained(folder, seed)
    scorer = VideoAlignScorer(folder, precision="fp32_math")
    model = scorer.model.requires_grad_(True).train()
    # Two auxiliary heads, used only in training, predict the labels of the video and of the
    # caption. Without them, the model hardly learns to compare the two. The video head reads a
    # token that precedes the prompt.
    model.video_head, model.caption_head = (
        nn.Linear(model.head.in_features, sum(NUM_LABELS)) for _ in range(2)
    )
    optimizer = MuonAndAdamW(model, num_steps=num_steps, warmup=100, decay_from=0.3, adamw_lr=2e-3)
    rng = generator(seed, "reward model")
    mean_error = EMA(0.02)
    bar = steps(num_steps, "reward model")
    for _ in bar:
        videos, labels, rendered_labels = _batch(clips, batch_size, rng)
        prompts = [world.caption(label) for label in labels]
        states = model.reward_states(
            **scorer.prepare(list(videos), prompts, [world.FPS] * len(videos))
        )
        error = model.head(states)[..., 0] - measure(videos, labels).scores
        video_loss = _cross_entropy(
            model.video_head(states[: len(rendered_labels), 1]), rendered_labels
        )
        caption_loss = _cross_entropy(model.caption_head(states[:, 2]), labels)
        optimizer.step((error / SPREADS).square().mean() + 0.1 * (video_loss + caption_loss))
        bar.set_postfix(
            rms=f"{math.sqrt(mean_error(error.detach().square().mean().item())):.4f}", refresh=False
        )
    save_weights(folder / "checkpoint-1", model.model.state_dict(), model.head.weight)


def policy_clips(
    pipeline: GRPOPipeline, schedule: Schedule, encoder, *, count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Sample videos from the policy and return them with labels, as for `train`; every other batch
    uses the SDE.
    """
    labels = world.LABELS.repeat(-(-count // len(world.LABELS)), 1)[:count]
    videos = []
    for number, part in enumerate(labels.split(96)):
        conditions = encoder([Request(world.caption(label)) for label in part])
        shape = (len(part), *pipeline.latent_shape(9, world.SIZE, world.SIZE))
        noise = normal(shape, seed, "reward clips", number)
        if number % 2:
            draws = partial(normal, shape, seed, "reward steps", number)
            latents = pipeline.sample(conditions, noise, schedule, draws).final
        else:
            latents = pipeline.sample_ode(conditions, noise, schedule)
        videos += pipeline.decode(latents, batch_size=48)
    return torch.stack(videos), labels


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropies of color, shape and direction.

    Shape: (videos, 11), (videos, 3) to ().
    """
    parts = zip(logits.split(NUM_LABELS, dim=1), labels.unbind(1))
    return sum(nn.functional.cross_entropy(part, label) for part, label in parts)


def _batch(clips: tuple[Tensor, Tensor], size: int, rng) -> tuple[Tensor, Tensor, Tensor]:
    """Return videos, the labels of their captions, and the true labels of the rendered videos.

    The first half is rendered, with defects; the policy generated the second half. Half of the captions
    are wrong.
    """
    half = size // 2
    rendered_labels = random_labels(half, rng)
    rendered = to_uint8(
        world.render(rendered_labels, rng, corruption_strengths(half, rng))
    ).transpose(1, 2)
    rows = torch.from_numpy(rng.integers(len(clips[0]), size=size - half))
    videos = torch.cat([rendered, clips[0][rows]])
    labels = torch.cat([rendered_labels, clips[1][rows]])
    is_wrong = rng.random((size, 1)) < 0.5
    others = random_labels(size, rng)
    replaced = torch.from_numpy(is_wrong & (rng.random((size, 3)) < 0.5))
    return videos, torch.where(replaced, others, labels), rendered_labels
