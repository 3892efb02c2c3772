"""Loads what a run needs: one place for training, generation and scripts."""

from dataclasses import dataclass

import torch
from torch import nn

from hyvideo.config import Config
from hyvideo.models import loading
from hyvideo.models.attention import freeze_dead_parameters, install
from hyvideo.pipelines.conditioning import PromptEncoder
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import DTYPES, HunyuanVideoGRPOPipeline, Sampling
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

# Parts that get no gradient without quoted text or a reference image, which this version does not feed.
UNUSED_PARTS = ("context_embedder_2.", "image_embedder.")
RANDOM_WEIGHTS_SEED = 0


@dataclass(frozen=True)
class Components:
    """The loaded models of a run."""

    pipeline: HunyuanVideoGRPOPipeline
    encoder: PromptEncoder


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """``auto`` takes this process's GPU if there is one. Raises ValueError where cuda is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a GPU that torch can use, and there is none; set device auto or cpu")
    use_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")


def load_components(config: Config, device: torch.device) -> Components:
    """Transformer in float32 (computing in ``dtype``), VAE in ``vae_dtype``, text encoder in ``dtype``.

    Raises: ValueError that lists what is wrong with the checkpoint folder, before any tensor is read.
    """
    model, rollout = config.model, config.rollout
    seed = RANDOM_WEIGHTS_SEED if model.random_weights else None
    root, version = model.pretrained_model_root, model.transformer_version
    problems = loading.check_checkpoint(root, version, weights_needed=not model.random_weights)
    if problems:
        raise ValueError("\n".join([f"the checkpoints in {root} cannot be used:", *problems]))

    common = {"device": device, "random_weights_seed": seed}
    transformer = loading.load_transformer(root, version, dtype=torch.float32, **common)
    prepare_transformer(transformer, recompute=config.distributed.enable_gradient_checkpointing)
    vae = loading.load_vae(root, dtype=DTYPES[model.vae_dtype], **common)
    tokenizer, text_encoder = loading.load_text_encoder(root, dtype=DTYPES[model.dtype], **common)
    encoder = PromptEncoder(tokenizer, text_encoder, image_width=transformer.config.image_embed_dim)
    scheduler = FlowMatchDiscreteScheduler(shift=rollout.shift, last_step=rollout.last_step)
    scheduler.set_timesteps(rollout.grpo_sampling_steps)
    pipeline = HunyuanVideoGRPOPipeline(
        transformer,
        vae,
        scheduler,
        sampling=Sampling(rollout.sde_type, rollout.eta, rollout.cfg_scale, rollout.batch_guidance),
        unconditional=encoder([""]).to(device) if rollout.cfg_scale > 1 else None,
        compute_dtype=DTYPES[model.dtype],
    )
    return Components(pipeline, encoder)


def prepare_transformer(transformer: nn.Module, *, recompute: bool) -> None:
    """Our attention, activation checkpointing if asked for, and no gradient where none can arrive."""
    install(transformer)
    freeze_dead_parameters(transformer)
    for name, parameter in transformer.named_parameters():
        if name.startswith(UNUSED_PARTS):
            parameter.requires_grad_(False)
    if recompute:
        transformer.enable_gradient_checkpointing()
