"""Build a miniature checkpoint in about an hour: ``python -m examples.miniature_from_scratch``.

A random frozen text encoder, a VAE trained on rendered videos, the reference statistics for the
held-out Fréchet distance, a base policy trained on videos with wrong captions and defects, and a
reward model (not for Wan). The same machine with the same number of threads builds the same files
from ``--seed``.
"""

from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.std import EMA

from examples.miniature_from_scratch import architecture, wan
from examples.miniature_from_scratch.optimizer import MuonAndAdamW, steps
from examples.miniature_from_scratch.reward_model import policy_clips
from examples.miniature_from_scratch.reward_model import train as train_reward_model
from examples.miniature_from_scratch.web_data import corruption_strengths, random_labels, web_labels
from hyvideo.config.command_line import load_config
from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.data.files import make_folder
from hyvideo.data.randomness import generator
from hyvideo.data.videos import to_uint8
from hyvideo.miniature import world
from hyvideo.miniature.measures import features, measure, moments
from hyvideo.miniature.reward import REFERENCE_STATISTICS
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import family_of, prepare
from hyvideo.models.loading import load_vae
from hyvideo.models.weight_files import draw_tensor
from hyvideo.rewards.rewards import DIMENSIONS
from hyvideo.training.model_setup import load_encoder, load_pipeline, rollout_schedule

# Weight of the VAE's KL term: latents are smooth enough for the transformer, and reconstructions
# are still sharp.
KL_WEIGHT = 5e-2
REFERENCE_CLIPS = 8  # per caption, for the reference statistics
VAE_STEPS, BASE_STEPS, REWARD_STEPS = 1200, 6000, 2600  # training steps
# web videos (a multiple of 48), and the base policy's for the reward model
WEB_CLIPS, REWARD_CLIPS = 48 * 400, 1920
FAMILIES = {"hunyuan_video15": architecture, "wan": wan}


def build_vae(family: ModuleType, out: Path, seed: int) -> None:
    """Train the VAE and write it, with latents scaled to unit variance."""
    torch.manual_seed(seed)
    vae = _new_vae(family)
    optimizer = MuonAndAdamW(vae, num_steps=VAE_STEPS, warmup=20, decay_from=0.4, adamw_lr=3e-3)
    rng = generator(seed, "vae")
    bar = steps(VAE_STEPS, "VAE")
    for _ in bar:
        labels = random_labels(8, rng)
        strength = torch.from_numpy((rng.random(8) < 0.35) * rng.random(8)).float()
        videos = world.render(labels, rng, strength)
        posterior = vae.encode(videos).latent_dist
        noise = torch.from_numpy(rng.standard_normal(posterior.mean.shape, dtype="float32"))
        reconstruction = vae.decode(posterior.mean + posterior.std * noise).sample
        # Saturated pixels, which are the object, have seven times the weight.
        saturated = videos.amax(1, keepdim=True) - videos.amin(1, keepdim=True) > 0.3
        squared = ((1 + 6 * saturated) * (videos - reconstruction) ** 2).mean()
        divergence = posterior.kl().mean() / videos[0].numel()
        optimizer.step(
            squared + 0.3 * (videos - reconstruction).abs().mean() + KL_WEIGHT * divergence
        )
        bar.set_postfix(error=f"{squared.item():.4f}", refresh=False)
    with torch.no_grad():
        latents = vae.encode(
            world.render(world.LABELS, generator(seed, "scale"))
        ).latent_dist.mode()
    family.save_vae(vae, latents, out)


def _new_vae(family: ModuleType) -> nn.Module:
    vae = family.new_model("vae")
    family_of(vae).prepare_vae(vae)
    with torch.no_grad():
        # Start with little posterior noise and zero residual branches; otherwise a learning rate of
        # 3e-3 is unstable.
        vae.get_parameter(family.LOG_VARIANCES).chunk(2)[1].sub_(5.0)  # the first half are means
        for name, parameter in vae.named_parameters():
            if any(end in name for end in family.RESIDUAL_ENDS):
                parameter.zero_()
    return vae


def build_base(family: ModuleType, out: Path, seed: int) -> None:
    """Train the transformer by flow matching on web data and write the EMA of its weights."""
    vae = load_vae(out, dtype=torch.float32, device="cpu")
    encode = next(part for part in family_of(vae).parts if part.kind == "text").load(out, vae=vae)
    texts = [encoded["states"] for encoded in encode([*world.CAPTIONS, ""])]
    conditions = Conditions(tuple(Condition(text) for text in texts))
    latents, captions = _web_data(vae, seed)

    torch.manual_seed(seed)
    transformer = family.new_model("transformer")
    _draw_unused_parts(family, transformer, seed)
    prepare(transformer, {"text"})
    optimizer = MuonAndAdamW(
        transformer, num_steps=BASE_STEPS, warmup=50, decay_from=0.3, adamw_lr=2e-3
    )
    average = [p.detach().clone() for p in optimizer.parameters]
    rng, mean_loss = generator(seed, "base"), EMA(0.02)
    bar = steps(BASE_STEPS, "base policy")
    for step in bar:
        rows = torch.from_numpy(rng.integers(len(latents), size=48))
        prompts = captions[rows].clone()
        prompts[torch.from_numpy(rng.random(48) < 0.1)] = len(world.CAPTIONS)  # the empty prompt
        # attention batches by length
        by_length = torch.tensor([len(texts[i]) for i in prompts.tolist()]).argsort()
        rows, prompts = rows[by_length], prompts[by_length]
        loss = _flow_matching_loss(
            transformer, latents[rows], conditions.select(prompts.tolist()), rng
        )
        optimizer.step(loss)
        decay = min(0.998, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in optimizer.parameters], 1 - decay)
        bar.set_postfix(loss=f"{mean_loss(loss.item()):.4f}", refresh=False)
    with torch.no_grad():
        torch._foreach_copy_(optimizer.parameters, average)
    family.save_transformer(transformer, out, seed)


def _draw_unused_parts(family: ModuleType, transformer: nn.Module, seed: int) -> None:
    """Set the parts that are not saved to the weights that loading will draw."""
    component = family_of(transformer).transformer
    weights = component.to_original(transformer.state_dict())
    for name, tensor in weights.items():
        if name.startswith(family.DRAWN_PARTS):
            weights[name] = draw_tensor(seed, name, tuple(tensor.shape))
    transformer.load_state_dict(component.to_diffusers(weights))


@torch.no_grad()
def _web_data(vae: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """Return latents of web videos (videos, channels, frames, height, width) and their caption
    indices (videos,).
    """
    rng = generator(seed, "web")
    labels = world.LABELS.repeat(WEB_CLIPS // len(world.LABELS), 1)
    web = web_labels(labels, rng)
    strength = corruption_strengths(len(labels), rng)
    latents = []
    for part, corruption in tqdm(
        list(zip(labels.split(48), strength.split(48))), desc="web videos", disable=None
    ):
        videos = world.render(part, rng, corruption)
        latents.append(
            family_of(vae).latents(vae.config).scaled(vae.encode(videos).latent_dist.mode())
        )
    return torch.cat(latents), (web[:, 0] * 3 + web[:, 1]) * 4 + web[:, 2]


def _flow_matching_loss(
    transformer: nn.Module, clean: Tensor, conditions: Conditions, rng
) -> Tensor:
    """Return the mean squared error of the velocity at stratified sigmas (shift 3) for clean
    latents.
    """
    batch = len(clean)
    uniform = torch.from_numpy((rng.permutation(batch) + rng.random(batch)) / batch).float()
    sigma = 3 * uniform / (1 + 2 * uniform)
    noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype="float32"))
    level = sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * clean + level * noise
    velocity = transformer(noisy, timestep=1000 * sigma, conditions=conditions.samples)
    return ((velocity - (noise - clean)) ** 2).mean()


@torch.no_grad()
def build_reference_statistics(out: Path, seed: int) -> None:
    """Write the feature statistics of clean, VAE-reconstructed videos for the held-out Fréchet
    distance.
    """
    vae = load_vae(out, dtype=torch.float32, device="cpu")
    labels = world.LABELS.repeat(REFERENCE_CLIPS, 1)
    videos = world.render(labels, generator(seed, "reference"))
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


def build_reward_model(out: Path, seed: int) -> None:
    """Train the miniature's VideoAlign on rendered videos and on videos of the base policy in
    ``out``.
    """
    config = load_config("configs/miniature.yaml", pretrained_model_root=str(out))
    device = torch.device("cpu")
    encoder, vae = load_encoder(config, device)
    pipeline = load_pipeline(config, device, encoder=encoder, vae=vae, kinds=frozenset({"text"}))
    clips = policy_clips(
        pipeline, rollout_schedule(config.rollout), encoder, count=REWARD_CLIPS, seed=seed
    )
    train_reward_model(out, clips, num_steps=REWARD_STEPS, batch_size=64, seed=seed)


@exit_on_error("examples.miniature_from_scratch")
def main() -> None:
    parser = Parser(__doc__.splitlines()[0], prog="examples.miniature_from_scratch")
    parser.add_argument(
        "--family", default="hunyuan_video15", choices=FAMILIES, help="model family of the classes"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("ckpts/miniature"), help="folder to write"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all stages")
    options = parser.parse_args()
    out, seed, family = options.output_dir, options.seed, FAMILIES[options.family]
    make_folder(out)
    family.save_text_encoder(out, seed)
    build_vae(family, out, seed)
    build_reference_statistics(out, seed)
    build_base(family, out, seed)
    if family.HAS_REWARD_MODEL:
        build_reward_model(out, seed)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
