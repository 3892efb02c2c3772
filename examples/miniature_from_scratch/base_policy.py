"""Training of the base policy by flow matching on web data, and the statistics of clean videos to
which its videos are compared.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.std import EMA

from examples.miniature_from_scratch.optimizer import MuonAndAdamW, steps
from examples.miniature_from_scratch.web_data import corruption_strengths, web_labels
from hyvideo.data.randomness import generator
from hyvideo.data.videos import to_uint8
from hyvideo.miniature import world
from hyvideo.miniature.measures import features, measure, moments
from hyvideo.miniature.reward import REFERENCE_STATISTICS
from hyvideo.models.conditions import Condition, ImageCondition
from hyvideo.models.family import family_of
from hyvideo.models.loading import load_vae
from hyvideo.rewards.rewards import DIMENSIONS

BATCH = 48


@dataclass(frozen=True)
class WebVideos:
    """Videos with captions that may be wrong."""

    latents: Tensor  # (videos, channels, frames, height, width), scaled for the transformer
    captions: Tensor  # (videos,), indices of `world.CAPTIONS`


@torch.no_grad()
def web_videos(vae: nn.Module, seed: int, *, number: int, from_middle: bool = False) -> WebVideos:
    """Return ``number`` web videos, a multiple of 48; ``from_middle`` as in `world.render`."""
    rng = generator(seed, "web")
    labels = world.LABELS.repeat(number // len(world.LABELS), 1)
    web = web_labels(labels, rng)
    strength = corruption_strengths(len(labels), rng)
    latents = []
    for part, corruption in tqdm(
        list(zip(labels.split(48), strength.split(48))), desc="web videos", disable=None
    ):
        videos = world.render(part, rng, corruption, from_middle=from_middle)
        latents.append(
            family_of(vae).latents(vae.config).scaled(vae.encode(videos).latent_dist.mode())
        )
    return WebVideos(torch.cat(latents), (web[:, 0] * 3 + web[:, 1]) * 4 + web[:, 2])


def caption_texts(root: Path, vae: nn.Module) -> list[Tensor]:
    """Return the encoded captions, followed by the empty prompt, by the text encoder in ``root``."""
    encode = next(part for part in family_of(vae).parts if part.kind == "text").load(
        root, transformer={}, vae=vae
    )
    return [encoded["states"] for encoded in encode([*world.CAPTIONS, ""], (0, 0, 0))]


def train_policy(
    transformer: nn.Module,
    data: WebVideos,
    texts: list[Tensor],
    *,
    num_steps: int,
    seed: int,
    with_first_frame: float = 0.0,
    below: float = 1.0,
) -> None:
    """Train the transformer by flow matching at noise levels ``below`` one, and set its weights to
    their EMA.

    One video in ten gets the empty prompt, and the fraction ``with_first_frame`` of the videos its
    own first frame.
    """
    optimizer = MuonAndAdamW(
        transformer, num_steps=num_steps, warmup=50, decay_from=0.3, adamw_lr=2e-3
    )
    average = [p.detach().clone() for p in optimizer.parameters]
    rng = generator(seed, "base")
    mean_loss = EMA(0.02)
    bar = steps(num_steps, "base policy")
    for step in bar:
        rows = torch.from_numpy(rng.integers(len(data.latents), size=BATCH))
        prompts = data.captions[rows].clone()
        prompts[torch.from_numpy(rng.random(BATCH) < 0.1)] = len(world.CAPTIONS)  # the empty prompt
        # attention batches by length
        by_length = torch.tensor([len(texts[i]) for i in prompts.tolist()]).argsort()
        latents = data.latents[rows[by_length]]
        conditions = [Condition(texts[i]) for i in prompts[by_length].tolist()]
        if with_first_frame:
            for row, video in enumerate(latents):
                if rng.random() < with_first_frame:
                    image = ImageCondition(None, video[:, 0])
                    conditions[row] = replace(conditions[row], image=image)
        loss = _flow_matching_loss(transformer, latents, conditions, rng, below)
        optimizer.step(loss)
        decay = min(0.998, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in optimizer.parameters], 1 - decay)
        bar.set_postfix(loss=f"{mean_loss(loss.item()):.4f}", refresh=False)
    with torch.no_grad():
        torch._foreach_copy_(optimizer.parameters, average)


def _flow_matching_loss(
    transformer: nn.Module,
    clean: Tensor,
    conditions: list[Condition],
    rng: np.random.Generator,
    below: float,
) -> Tensor:
    """Return the mean squared error of the velocity at stratified sigmas (shift 3) up to ``below``
    for clean latents.
    """
    batch = len(clean)
    uniform = torch.from_numpy((rng.permutation(batch) + rng.random(batch)) / batch).float()
    uniform = uniform * below / (below + 3 * (1 - below))
    sigma = 3 * uniform / (1 + 2 * uniform)
    noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype="float32"))
    level = sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * clean + level * noise
    velocity = transformer(noisy, timestep=1000 * sigma, conditions=conditions)
    return ((velocity - (noise - clean)) ** 2).mean()


@torch.no_grad()
def build_reference_statistics(
    out: Path, seed: int, *, clips_per_caption: int, from_middle: bool = False
) -> None:
    """Write the feature statistics of clean, VAE-reconstructed videos for the held-out Fréchet
    distance; ``from_middle`` as in `world.render`.
    """
    vae = load_vae(out, dtype=torch.float32, device="cpu")
    labels = world.LABELS.repeat(clips_per_caption, 1)
    videos = world.render(labels, generator(seed, "reference"), from_middle=from_middle)
    decoded = torch.cat(
        [vae.decode(vae.encode(part).latent_dist.mode()).sample for part in videos.split(48)]
    )
    clips = to_uint8(decoded).transpose(1, 2)
    mean, covariance = moments(features(clips))
    save_file({"mean": mean, "covariance": covariance}, out / REFERENCE_STATISTICS)
    measured = measure(clips, labels)
    scores = " ".join(
        f"{name} {score:.3f}" for name, score in zip(DIMENSIONS, measured.scores.mean(0))
    )
    print(f"VAE reconstructions: {scores}, all correct {measured.all_correct.mean():.1%}")
