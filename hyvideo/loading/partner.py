"""The partner of the policy: the frozen expert of a model of two, whose noise levels are not trained."""

from collections.abc import Sequence

import torch

from hyvideo.data.prompts import Request
from hyvideo.distributed.collectives import raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.distributed.sharded_tensors import fill_shards
from hyvideo.loading.model_setup import stream_expert
from hyvideo.models import loading
from hyvideo.models.guidance import OTHER_EXPERT
from hyvideo.models.offload import loaded_on, put
from hyvideo.models.placement import Placement
from hyvideo.pipelines.grpo_pipeline import DTYPES, Partner
from hyvideo.settings.config import Config


def load_partner(
    config: Config, mesh: Mesh, device: torch.device, requests: Sequence[Request]
) -> Partner | None:
    """Load the expert that is not trained; None for a model of a single transformer. Collective.

    It is where the config places it, or sharded like the policy.
    """
    if config.trained_expert is None:
        return None
    model, distributed = config.model, config.distributed
    expert = OTHER_EXPERT[config.trained_expert]
    placement = config.placements.partner
    folder = loading.transformer_folder(
        model.pretrained_model_root, model.transformer_version, expert
    )
    transformer, weights = stream_expert(
        model,
        expert,
        loading.read_family(folder).kinds(requests),
        dtype=DTYPES[model.dtype],
        device=device,
        weight_dtype=model.partner_weight_dtype,
        read=mesh.is_main,  # the other ranks receive the weights
    )
    transformer.requires_grad_(False)
    parallelize(
        transformer,
        mesh,
        recompute="none",
        compile=distributed.enable_compile == "true",
        is_hooked=placement == Placement.BLOCKS,
        shard=distributed.enable_fsdp and mesh.world_size > 1,
        reshard_after_forward=distributed.reshard_after_forward,
        compute_dtype=DTYPES[model.dtype],
    )
    with raise_on_all_ranks(mesh):
        kept_on = loaded_on(placement, device)
        fill_shards(transformer, weights, device=device, kept_on=kept_on)
    put(transformer, placement, device)
    return Partner(transformer, expert, config.version.boundary)
