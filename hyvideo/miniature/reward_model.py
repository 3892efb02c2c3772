"""The miniature world's own VideoAlign: a small Qwen2-VL with a reward head, trained on the world's measured truth.

It has the classes and the files of the released VideoReward, so the miniature run scores through the code that the
full-size run scores through. It looks at 8 frames of 56 x 56 pixels and is asked in a few words.
"""

import json
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.data.randomness import generator, normal
from hyvideo.data.videos import to_uint8
from hyvideo.miniature import world
from hyvideo.miniature.architecture import build_tokenizer
from hyvideo.miniature.measures import measure
from hyvideo.miniature.optimizer import MuonAndAdamW, steps
from hyvideo.models.reward_models.videoalign.prompt import REWARD_TOKENS
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline

FOLDER = "VideoReward"
NUM_LABELS = (4, 3, 4)  # colours, shapes, directions
SPREADS = torch.tensor([0.18, 0.14, 0.29])  # of the true scores
SIDE = 56  # pixels that a frame is enlarged to: 4 x 4 patches
NUM_FRAMES = 8
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEXT_CONFIG = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 4, 4]},
    "tie_word_embeddings": True,
}
VISION_CONFIG = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": 96,
    "mlp_ratio": 2,
    "num_heads": 4,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def write_untrained(folder: Path, seed: int) -> None:
    """Writes settings, tokenizer and random weights in the released layout."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [*VISION_TOKENS, *REWARD_TOKENS]})
    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))))
    config = TEXT_CONFIG | {
        "bos_token_id": None,
        "eos_token_id": None,
        "vocab_size": len(tokenizer),
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": VISION_CONFIG,
    }
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "base" / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "model_config.json").write_text(json.dumps(_settings(), indent=1) + "\n")
    checkpoint = folder / "checkpoint-1"
    checkpoint.mkdir(exist_ok=True)
    tokenizer.save_pretrained(checkpoint / "tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = Qwen2VLModel(Qwen2VLConfig.from_dict(config)).state_dict()
    head = 0.02 * normal((1, TEXT_CONFIG["hidden_size"]), seed, "reward head")
    _save(checkpoint, state, head)


def train(root: Path, clips: tuple[Tensor, Tensor], *, num_steps: int, batch_size: int, seed: int) -> None:
    """Fits the reward model in ``root`` to the truth about rendered clips and the base policy's own.

    Args:
        clips: uint8 (clips, frames, 3, height, width) and the labels that they were asked for (clips, 3).
    """
    folder = root / FOLDER
    write_untrained(folder, seed)
    model, encode = load_for_training(folder)
    # Heads for training alone, which say what is seen and what is asked for: without them matching the two is hardly
    # learned. What is seen is read where the prompt has not come yet.
    model.seen, model.asked = (nn.Linear(TEXT_CONFIG["hidden_size"], sum(NUM_LABELS)) for _ in range(2))
    optimizer = MuonAndAdamW(model, num_steps=num_steps, warmup=100, decay_from=0.3, adamw_lr=2e-3)
    rng = generator(seed, "reward model")
    running = None
    for _, bar in steps(num_steps, "reward model"):
        videos, labels, shown = _batch(clips, batch_size, rng)
        truth = true_scores(videos, labels)
        answers = model.answers(**encode(videos, [world.caption(label) for label in labels]))
        error = model.head(answers)[..., 0] - truth
        of_seen = _cross_entropy(model.seen(answers[: len(shown), 1]), shown)
        of_asked = _cross_entropy(model.asked(answers[:, 2]), labels)
        optimizer.step((error / SPREADS).square().mean() + 0.1 * (of_seen + of_asked))
        mean = error.detach().square().mean().item()
        running = mean if running is None else 0.98 * running + 0.02 * mean
        bar.set_postfix(rms=f"{math.sqrt(running):.4f}", refresh=False)
    _save(folder / "checkpoint-1", model.model.state_dict(), model.head.weight)


def true_scores(videos: Tensor, labels: Tensor) -> Tensor:
    """VQ, MQ and TA measured in the pixels. Shape: (clips, 3)."""
    truth = measure(videos, labels)
    return torch.stack([truth.visual_quality, truth.motion_quality, truth.text_alignment], dim=1).float()


def load_for_training(folder: Path):
    """The model with gradients, and the function from clips and prompts to its inputs."""
    from hyvideo.models.reward_models.videoalign import VideoAlignScorer

    scorer = VideoAlignScorer(folder, precision="fp32_math")
    model = scorer.model.requires_grad_(True).train()

    def encode(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return scorer.prepare(list(videos), prompts, [world.FPS] * len(videos))

    return model, encode


def policy_clips(pipeline: HunyuanVideoGRPOPipeline, encoder, *, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Clips that the policy makes, half of them as rollouts are made, with the labels they were asked for."""
    from hyvideo.data.prompts import Request

    labels = world.LABELS.repeat(-(-count // len(world.LABELS)), 1)[:count]
    videos = []
    for number, part in enumerate(labels.split(96)):
        conditions = encoder([Request(world.caption(label)) for label in part])
        shape = (len(part), *pipeline.latent_shape(9, world.SIZE, world.SIZE))
        noise = normal(shape, seed, "reward clips", number)
        if number % 2:
            draws = partial(normal, shape, seed, "reward steps", number)
            latents = pipeline.sample(conditions, noise, draws).final
        else:
            latents = pipeline.sample_ode(conditions, noise)
        videos += pipeline.decode(latents, batch_size=48)
    return torch.stack(videos), labels


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of colour, shape and direction. Shape: (clips, 11) and (clips, 3) to ()."""
    parts = zip(logits.split(NUM_LABELS, dim=1), labels.unbind(1))
    return sum(nn.functional.cross_entropy(part, label) for part, label in parts)


def _batch(clips: tuple[Tensor, Tensor], size: int, rng) -> tuple[Tensor, Tensor, Tensor]:
    """Clips, labels of their captions, and labels of what the rendered ones show.

    The first half are rendered clips with defects, the second the policy's; half of the captions lie.
    """
    half = size // 2
    labels = world.LABELS[torch.from_numpy(rng.integers(len(world.LABELS), size=half))]
    rendered = to_uint8(world.render(labels, rng, world.corruption_strengths(half, rng))).transpose(1, 2)
    rows = torch.from_numpy(rng.integers(len(clips[0]), size=size - half))
    videos, asked = torch.cat([rendered, clips[0][rows]]), torch.cat([labels, clips[1][rows]])
    captions = torch.where(torch.from_numpy(rng.random(size) < 0.5)[:, None], _changed(asked, rng), asked)
    return videos, captions, labels


def _changed(labels: Tensor, rng) -> Tensor:
    """Labels with one to three attributes drawn anew."""
    drawn = world.LABELS[torch.from_numpy(rng.integers(len(world.LABELS), size=len(labels)))]
    return torch.where(torch.from_numpy(rng.random(labels.shape) < 0.5), drawn, labels)


def _settings() -> dict:
    return {
        "data_config": {
            "fps": 8.0,
            "num_frames": NUM_FRAMES,
            "max_frame_pixels": SIDE**2,
            "min_frame_pixels": SIDE**2,
            "eval_dim": ["VQ", "MQ", "TA"],
            "prompt_template_type": "miniature",
            "sample_type": "uniform",
        },
        "model_config": {
            "model_name_or_path": "base",
            "output_dim": 1,
            "use_special_tokens": True,
            "reward_token": "special",
            "torch_dtype": "bfloat16",
        },
        "peft_lora_config": {"lora_enable": False},
        # The truth lies in [0, 1] as it is.
        "inference_config": {
            f"{name}_{what}": value for name in ("VQ", "MQ", "TA") for what, value in (("mean", 0.0), ("std", 1.0))
        },
    }


def _save(checkpoint: Path, state: dict[str, Tensor], head: Tensor) -> None:
    tensors = {f"model.{name}": tensor.detach().bfloat16() for name, tensor in state.items()}
    torch.save(tensors | {"rm_head.weight": head.detach().bfloat16().clone()}, checkpoint / "model.pth")
