"""Build a miniature checkpoint in about an hour: ``python -m examples.miniature_from_scratch``.

A random frozen text encoder, a VAE trained on rendered videos, the reference statistics for the
held-out Fréchet distance, a base policy trained on videos with wrong captions and defects, and a
reward model (not for Wan). The same machine with the same number of threads builds the same files
from ``--seed``.
"""

from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from examples.miniature_from_scratch import architecture, wan
from examples.miniature_from_scratch.base_policy import (
    build_reference_statistics,
    caption_texts,
    train_policy,
    web_videos,
)
from examples.miniature_from_scratch.optimizer import MuonAndAdamW, steps
from examples.miniature_from_scratch.reward_model import policy_clips
from examples.miniature_from_scratch.reward_model import train as train_reward_model
from examples.miniature_from_scratch.web_data import random_labels
from hyvideo.data.randomness import generator
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import make_folder
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.miniature import world
from hyvideo.models.family import family_of, prepare
from hyvideo.models.loading import load_vae
from hyvideo.settings.command_line import load_config
from hyvideo.weights.weight_files import draw_tensor

# Weight of the VAE's KL term: latents are smooth enough for the transformer, and reconstructions
# are still sharp.
KL_WEIGHT = 5e-2
REFERENCE_CLIPS = 8  # per caption, for the reference statistics
# training steps
VAE_STEPS = 1200
BASE_STEPS = 6000
REWARD_STEPS = 2600
# web videos (a multiple of 48), and the base policy's for the reward model
WEB_CLIPS = 48 * 400
REWARD_CLIPS = 1920
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
    data = web_videos(vae, seed, number=WEB_CLIPS)
    texts = caption_texts(out, vae)
    torch.manual_seed(seed)
    transformer = family.new_model("transformer")
    _draw_unused_parts(family, transformer, seed)
    prepare(transformer, {"text"})
    train_policy(transformer, data, texts, num_steps=BASE_STEPS, seed=seed)
    family.save_transformer(transformer, out, seed)


def _draw_unused_parts(family: ModuleType, transformer: nn.Module, seed: int) -> None:
    """Set the parts that are not saved to the weights that loading will draw."""
    component = family_of(transformer).transformer
    weights = component.to_original(transformer.state_dict())
    for name, tensor in weights.items():
        if name.startswith(family.DRAWN_PARTS):
            weights[name] = draw_tensor(seed, name, tuple(tensor.shape))
    transformer.load_state_dict(component.to_diffusers(weights))


def build_reward_model(out: Path, seed: int) -> None:
    """Train the miniature's VideoAlign on rendered videos and on videos of the base policy in
    ``out``.
    """
    config = load_config("configs/miniature.yaml", pretrained_model_root=str(out))
    device = torch.device("cpu")
    encoder, vae = load_encoder(config, device)
    pipeline = load_pipeline(config, device, encoder=encoder, vae=vae, kinds=frozenset({"text"}))
    clips = policy_clips(
        pipeline, config.sampling.schedule(), encoder, count=REWARD_CLIPS, seed=seed
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
    out = options.output_dir
    seed = options.seed
    family = FAMILIES[options.family]
    make_folder(out)
    family.save_text_encoder(out, seed)
    build_vae(family, out, seed)
    build_reference_statistics(out, seed, clips_per_caption=REFERENCE_CLIPS)
    build_base(family, out, seed)
    if family.HAS_REWARD_MODEL:
        build_reward_model(out, seed)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
