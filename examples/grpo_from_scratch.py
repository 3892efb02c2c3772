"""GRPO for a video model from scratch; docs/tutorial.md explains each part and what to expect.

    python -m examples.grpo_from_scratch                     # trains for two minutes on an idle CPU
    python -m examples.grpo_from_scratch --objective nft     # the same loop with DiffusionNFT

Models, weights and reward come from the project. The method is written here with torch alone, and
each part ends with a check that it equals the project's function. x, v and mean have the shape
(batch, channels, frames, height, width).
"""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from examples.miniature import CAPTIONS, LATENTS, Miniature
from hyvideo.loss.advantages import group_advantages
from hyvideo.loss.grpo import LossInputs, grpo_terms
from hyvideo.loss.nft import NFTInputs, nft_terms
from hyvideo.loss.trust_region import KLWeights
from hyvideo.schedulers.schedule import Schedule
from hyvideo.training.anchor import Anchor

OUT = Path("outputs/grpo_from_scratch")
close = torch.testing.assert_close
STEPS = 8  # denoising steps
NOISY = 4  # the first steps, which add noise and are trained
SHIFT = 3
ETA = 0.7
CLIP = 4e-3  # half the width of the clip range
KL_WEIGHT = 0.3
POSITION = 1.0  # weights of the two terms of the KL
VELOCITY = 0.1
UPDATES = 2  # of the optimizer in an iteration
REFRESH = 3  # iterations until the anchor moves
LEARNING_RATE = 6e-4
KL_OPTIONS = {"kl_weights": KLWeights(POSITION, VELOCITY), "kl_coefficient": KL_WEIGHT}

# --- 1. Sampler: every step is a Gaussian transition ----------------------------------------------
SAMPLERS = {  # variance of the noise that a step from sigma s to t adds
    # an exact integral
    "sage_grpo": lambda s, t: ETA**2 * (math.log((1 - t) / (1 - min(s, 0.997))) - (s - t)),
    "dance_grpo": lambda s, t: ETA**2 * (s - t),  # a plain one: the same noise everywhere
}


class Step(NamedTuple):
    """One denoising step to a lower noise level; with std 0 it follows the ODE."""

    sigma: float
    sigma_next: float
    std: float

    def mean(self, x: Tensor, v: Tensor) -> Tensor:
        """Follow the ODE, and the score by as much as balances the noise that the step adds."""
        score = -(x + (1 - self.sigma) * v) / self.sigma
        return x + (self.sigma_next - self.sigma) * v + self.std**2 / 2 * score


def schedule(variance, num_noisy: int = NOISY) -> list[Step]:
    # The shift makes the steps at high noise shorter, where the content of the video is decided.
    sigmas = [SHIFT * u / (1 + (SHIFT - 1) * u) for u in (1 - i / STEPS for i in range(STEPS + 1))]
    steps = []
    for i, (sigma, sigma_next) in enumerate(zip(sigmas, sigmas[1:])):
        std = math.sqrt(variance(sigma, sigma_next)) if i < num_noisy else 0.0
        steps.append(Step(sigma, sigma_next, std))
    return steps


def expected_schedule(name: str) -> Schedule:
    """Return the project's schedule of a sampler, for the checks."""
    return Schedule.build(name, num_steps=STEPS, shift=SHIFT, eta=ETA).with_noise_only_at(
        range(NOISY)
    )


def log_prob(x: Tensor, mean: Tensor, std: float) -> Tensor:
    """Return the log-density of N(mean, std^2) at x, averaged over the elements of a sample.

    Shape: (batch,).
    """
    return (
        (-((x - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi)))
        .flatten(1)
        .mean(1)
    )


@torch.no_grad()
def sample(velocity, x: Tensor, steps: list[Step]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the latents x before the first and after every step, and the means of all steps."""
    latents = [x]
    means = []
    for step in steps:
        means.append(step.mean(x, velocity(x, step.sigma)))
        x = means[-1] + step.std * torch.randn_like(x)
        latents.append(x)
    return latents, means


def check_sampler():
    v = torch.randn(2, *LATENTS)
    for name in "sage_grpo", "dance_grpo":
        steps = schedule(SAMPLERS[name])
        latents, means = sample(lambda x, sigma: v, torch.randn_like(v), steps)
        for i, (x, x_next, mean, step) in enumerate(zip(latents, latents[1:], means, steps)):
            result = expected_schedule(name).replay(v, x, [i, i], x_next)
            close(mean, result.mean)
            expected = log_prob(x_next, mean, step.std) if step.std else torch.zeros(2)
            close(expected, result.log_prob)


# --- 2. Advantages: better or worse than the other rollouts of the prompt -------------------------
def advantages_of(rewards: Tensor, group_size: int) -> Tensor:
    groups = rewards.view(-1, group_size)
    mean, std = groups.mean(1, keepdim=True), groups.std(1, correction=0, keepdim=True)
    return ((groups - mean) / (std + 1e-8)).clamp(-5, 5).flatten()


def check_advantages():
    rewards = torch.randn(12)
    close(advantages_of(rewards, 4), group_advantages(rewards, 4))


# --- 3. Equalizer: all steps get equally large gradients ------------------------------------------
def step_weights(steps: list[Step]) -> Tensor:
    """Return median(N) / N, where N = |d mean / d v| / std is the size of the log-probability's
    gradient in v.
    """
    slopes = [s.sigma_next - s.sigma - s.std**2 / 2 * (1 - s.sigma) / s.sigma for s in steps]
    norms = torch.tensor([abs(slope) / step.std for slope, step in zip(slopes, steps)])
    return norms.median() / norms


def check_equalizer():
    for name in "sage_grpo", "dance_grpo":
        weights = expected_schedule(name).equalizer_weights
        close(step_weights(schedule(SAMPLERS[name])[:NOISY]), weights[:NOISY])


# --- 4. Loss: clipped policy gradient, KL to the moving anchor and to the rollout policy ----------
def kl(mean: Tensor, other: Tensor, std: float) -> Tensor:
    return ((mean - other) ** 2 / (2 * std**2 + 1e-6)).flatten(1).mean(1)


def grpo_loss(
    new: Tensor, old: Tensor, advantages: Tensor, weight, mean, anchor_mean, rollout_mean, std
) -> Tensor:
    """Return the loss of each rollout at one step, from its log-probability under the new and the
    old policy.
    """
    ratio = (new - old).exp()
    policy = weight * torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
    )
    return policy + KL_WEIGHT * (
        POSITION * kl(mean, anchor_mean, std) + VELOCITY * kl(mean, rollout_mean, std)
    )


def check_grpo():
    new, old = 0.01 * torch.randn(2, 5)
    advantages = torch.randn(5)
    weight = torch.tensor(1.5)
    means = torch.randn(3, 5, *LATENTS)
    std = torch.full((5, 1, 1, 1, 1), 0.3)
    inputs = LossInputs(
        new, means[0], std, old, advantages, weight, means[1], rollout_mean=means[2]
    )
    expected = grpo_terms(inputs, clip_range=CLIP, **KL_OPTIONS).loss
    close(grpo_loss(new, old, advantages, weight, *means, 0.3), expected)


# --- 5. DiffusionNFT: a regression towards good videos and away from bad ones, without likelihoods
def nft_loss(
    v: Tensor, v_old: Tensor, v_anchor: Tensor, target: Tensor, advantages: Tensor
) -> Tensor:
    pairs = (v, target), (2 * v_old - v, target), (v, v_anchor), (v, v_old)
    error, mirrored, position, velocity = ((a - b).square().flatten(1).mean(1) for a, b in pairs)
    good = (1 + advantages / 5) / 2
    return (
        good * error
        + (1 - good) * mirrored
        + KL_WEIGHT * (POSITION * position + VELOCITY * velocity)
    )


def check_nft():
    v, v_old, v_anchor, target = torch.randn(4, 5, *LATENTS)
    advantages = torch.randn(5)
    expected = nft_terms(
        NFTInputs(v, v_old, target, advantages, v_anchor), advantage_clip=5, **KL_OPTIONS
    ).loss
    close(nft_loss(v, v_old, v_anchor, target, advantages), expected)


# --- 6. The loop ----------------------------------------------------------------------------------
def grpo_update(
    velocity, policy, rollout_policy, anchor, latents, means, advantages, steps
) -> Tensor:
    """Score the sampled noisy steps again.

    Old log-probabilities follow from the means that were stored.
    """
    losses = []
    for i, weight in enumerate(step_weights(steps[:NOISY])):
        step = steps[i]
        x = latents[i]
        mean = step.mean(x, velocity(policy, x, step.sigma))
        anchor_mean = step.mean(x, velocity(anchor, x, step.sigma))
        new = log_prob(latents[i + 1], mean, step.std)
        old = log_prob(latents[i + 1], means[i], step.std)
        losses.append(
            grpo_loss(new, old, advantages, weight, mean, anchor_mean, means[i], step.std)
        )
    return torch.stack(losses).mean()


def nft_update(
    velocity, policy, rollout_policy, anchor, latents, means, advantages, steps
) -> Tensor:
    """Add new noise to the finished videos, and regress the velocity that leads back to them."""
    video = latents[-1]
    noise = torch.randn_like(video)
    u = torch.rand(len(advantages), 1, 1, 1, 1)
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    x = (1 - sigma) * video + sigma * noise
    velocities = (velocity(model, x, sigma) for model in (policy, rollout_policy, anchor))
    return nft_loss(*velocities, noise - video, advantages).mean()


def validate(models: Miniature, policy, captions: list[str]) -> list[float]:
    """Return the mean learned and true reward of videos sampled with the ODE, always from the same
    noise.
    """
    noise = torch.randn(len(captions), *LATENTS, generator=torch.Generator().manual_seed(1))
    latents, _ = sample(
        partial(models.velocity(captions), policy), noise, schedule(SAMPLERS["dance_grpo"], 0)
    )
    return [rewards.mean().item() for rewards in models.rewards(latents[-1], captions)]


def draw_prompts(captions: list[str], num_prompts: int, group_size: int) -> list[str]:
    """Return random captions, each repeated for the rollouts of its group."""
    drawn = torch.randperm(len(captions))[:num_prompts]
    return [captions[i] for i in drawn for _ in range(group_size)]


def train(
    update,
    variance,
    iterations: int,
    captions: list[str] = CAPTIONS,
    num_prompts: int = 4,
    group_size: int = 8,
):
    """Train the policy.

    Yield iteration, learned and true reward before training and after every fifth iteration.
    """
    models = Miniature()
    policy = models.transformer()
    old = models.transformer().requires_grad_(False)
    anchor = models.transformer().requires_grad_(False)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0
    )
    expected_anchor = Anchor(policy, trained, refresh_every=REFRESH * UPDATES)
    steps = schedule(variance, NOISY if update is grpo_update else 0)
    yield 0, *validate(models, policy, captions)
    for iteration in range(1, iterations + 1):
        prompts = draw_prompts(captions, num_prompts, group_size)
        latents, means = sample(
            partial(models.velocity(prompts), policy), torch.randn(len(prompts), *LATENTS), steps
        )
        advantages = advantages_of(models.rewards(latents[-1], prompts)[0], group_size)
        old.load_state_dict(policy.state_dict())
        # in the second update, the ratio is not 1
        for rows in torch.arange(len(prompts)).chunk(UPDATES):
            velocity = models.velocity([prompts[row] for row in rows])
            optimizer.zero_grad()
            loss = update(
                velocity,
                policy,
                old,
                anchor,
                [x[rows] for x in latents],
                [mean[rows] for mean in means],
                advantages[rows],
                steps,
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            optimizer.step()
            expected_anchor.age += 1
        # moving the anchor lets the policy leave the base model, but not in one leap
        if iteration % REFRESH == 0:
            anchor.load_state_dict(policy.state_dict())
        expected_anchor.after_iteration()
        close(
            {name: p for name, p in anchor.named_parameters() if name in trained},
            expected_anchor.tensors(),
        )
        if iteration % 5 == 0 or iteration == iterations:
            yield iteration, *validate(models, policy, captions)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    updates = {"grpo": grpo_update, "nft": nft_update}
    parser.add_argument("--objective", default="grpo", choices=updates, help="loss (default: grpo)")
    parser.add_argument(
        "--sampler",
        default="sage_grpo",
        choices=SAMPLERS,
        help="noise of grpo (default: sage_grpo)",
    )
    parser.add_argument(
        "--iterations", type=int, default=30, help="iterations of 32 rollouts (default: 30)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.num_threads)
    for check in (check_sampler, check_advantages, check_equalizer, check_grpo, check_nft):
        check()
    torch.manual_seed(options.seed)
    curve = []
    for row in train(updates[options.objective], SAMPLERS[options.sampler], options.iterations):
        print("iteration {:2}: reward {:.3f}, true reward {:.3f}".format(*row), flush=True)
        curve.append(row)
    plt.plot(*zip(*[(row[0], row[1:]) for row in curve]), label=("reward model", "true reward"))
    plt.legend(), plt.xlabel("iteration"), plt.ylabel("reward of 48 videos")
    OUT.mkdir(parents=True, exist_ok=True)
    plt.savefig(OUT / f"{options.objective}_{options.sampler}_{options.seed}.png")


if __name__ == "__main__":
    main()
