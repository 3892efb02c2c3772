"""Bytes that a rank gets from others in an iteration, and the seconds they take on given links.

    gather of weights     parameters x 2 bytes x (n - 1) / n        each forward of the transformer, each backward again
    reduction             trained x 4 bytes x (n - 1) / n           each backward, to n shards
    between replicas      2 x trained x 4 bytes / n x (R - 1) / R   the last backward of an update, R = dp_replicate
    exchange of tokens    four times the image tokens of a rank     each block, by sequence parallelism

A call of the transformer is one forward: of all samples and branches together with ``batched_forward``, else of each.
Rings enter a node through all its network cards, so what comes from other nodes comes once for all GPUs of a node.
"""

import math
from dataclasses import dataclass

from hyvideo.config.memory.hardware import Hardware
from hyvideo.config.memory.persistent import trained_parameters
from hyvideo.config.memory.phases import settled
from hyvideo.config.memory.planned_run import PlannedRun


@dataclass(frozen=True)
class Group:
    """Ranks that hold the parts of what is gathered or reduced among them."""

    ranks: int
    nodes: int

    def received(self, size: float) -> float:
        """Bytes that a rank receives of ``size`` bytes, of which it has its own part."""
        return size * (self.ranks - 1) / self.ranks

    def from_other_nodes(self, size: float) -> float:
        """Bytes of them that come over the network, for each rank of a node."""
        return size * (self.nodes - 1) / self.ranks

    def seconds(self, size: float, hardware: Hardware) -> float:
        """Seconds of a ring, which its slowest link decides."""
        return max(self.received(size) / (hardware.link * 1e9), self.from_other_nodes(size) / (hardware.network * 1e9))


@dataclass(frozen=True)
class Traffic:
    """Bytes of the messages of an iteration, whole; a rank has a part of each already."""

    shards: Group  # ranks that share one copy of the parameters
    replicas: Group
    sampling: float  # weights, gathered for rollouts, the anchor's means and old velocities
    training: float  # weights, gathered for training
    reduced: float  # gradients, to their shards
    averaged: float  # gradients of a shard, between replicas: twice their size
    exchanged: float  # tokens that a rank receives

    @property
    def of_shards(self) -> float:
        return self.sampling + self.training + self.reduced

    @property
    def received(self) -> float:
        """Bytes that a rank receives."""
        return self.shards.received(self.of_shards) + self.replicas.received(self.averaged) + self.exchanged

    @property
    def from_other_nodes(self) -> float:
        """Bytes of weights and gradients that come over the network, for each GPU of a node."""
        return self.shards.from_other_nodes(self.of_shards) + self.replicas.from_other_nodes(self.averaged)


def traffic(run: PlannedRun) -> Traffic:
    """Messages of an iteration."""
    settings = run.settings
    num_nodes = math.ceil(run.world_size / run.hardware.gpus_per_node)
    num_replicas = run.world_size // run.num_shards
    is_apart = run.samples_at_once(2) == 1  # then what a group shares spares calls too
    steps = run.sampling_forwards if is_apart else settings.grpo_sampling_steps
    batches = settings.gradient_accumulation_steps * steps
    updates = settings.num_updates_per_rollout
    calls_of_pass = run.calls_of(settings.mini_batch_size_per_update, run.plan.trained_branches)
    calls = updates * run.backwards_per_update * calls_of_pass
    compared = calls * (run.anchor_forwards + run.old_forwards) // max(1, run.plan.num_trained_steps)
    without_gradient = batches * run.calls_of(settings.batch_size, run.plan.sampled_branches) + compared
    gathered = gathered_bytes(run)
    gradients = trained_parameters(run) * 4
    only_last = settings.gradient_sync == "last" or (settings.gradient_sync == "auto" and settings.lora_rank)
    return Traffic(
        shards=Group(run.num_shards, math.ceil(run.num_shards / run.hardware.gpus_per_node)),
        replicas=Group(num_replicas, min(num_replicas, num_nodes)),
        sampling=gathered * (without_gradient if settings.reshard_after_forward else min(2, without_gradient)),
        training=gathered * calls * (2 if settings.reshard_after_forward else 1),
        reduced=gradients * (updates if only_last else calls),
        # Each forward of the last pass has a backward of its own, which reduces what it adds.
        averaged=2 * gradients / run.num_shards * updates * calls_of_pass,
        exchanged=_exchanged_bytes(run),
    )


def gathered_bytes(run: PlannedRun) -> int:
    """Bytes of the weights that one forward of the transformer gathers, those of the rank itself included."""
    return run.architecture.parameters * run.compute_bytes


def _exchanged_bytes(run: PlannedRun) -> float:
    """Bytes of query, key, value and attention's output that the all-to-alls of an iteration bring to a rank."""
    sp_size, model = run.settings.sp_size, run.architecture
    forward = 4 * run.image_tokens / sp_size * (sp_size - 1) / sp_size * model.width * model.num_layers
    passes = 2 if settled(run).checkpointing == "none" else 3  # forward, backward, and again where it is recomputed
    forwards = run.forwards_without_gradient + passes * run.forwards_with_gradient
    return run.rollouts_per_replica * forwards * forward * run.compute_bytes
