"""Bytes that a rank receives from others in an iteration, and the seconds they take on given links.

    gather of weights     parameters x 2 bytes x (n - 1) / n        each forward pass, and again each backward pass
    reduction             trained x 4 bytes x (n - 1) / n           each backward pass, to n shards
    between replicas      2 x trained x 4 bytes / n x (R - 1) / R   last backward pass of an update, R = dp_replicate
    exchange of tokens    four times the image tokens of a rank     each block, with sequence parallelism

A call of the transformer is one forward pass: of all samples and branches with ``batched_forward``,
else of one. Rings enter a node through all its network cards, so data from other nodes arrives once
for all GPUs of a node.
"""

import math
from dataclasses import dataclass

from hyvideo.planning.hardware import Hardware
from hyvideo.planning.memory import resolve_auto
from hyvideo.planning.persistent import trained_parameters
from hyvideo.planning.planned_run import PlannedRun

_EXCHANGE_LATENCY = 60e-6  # seconds of a block's two exchanges, estimated


@dataclass(frozen=True)
class Group:
    """Ranks that gather or reduce a tensor among them, each holding a part."""

    ranks: int
    nodes: int

    def received(self, size: float) -> float:
        """Return the bytes that a rank receives of ``size`` bytes, without its part."""
        return size * (self.ranks - 1) / self.ranks

    def from_other_nodes(self, size: float) -> float:
        """Return the bytes that come over the network, per rank of a node."""
        return size * (self.nodes - 1) / self.ranks

    def seconds(self, size: float, hardware: Hardware) -> float:
        """Return the seconds of a ring, determined by its slowest link."""
        return max(
            self.received(size) / (hardware.link * 1e9),
            self.from_other_nodes(size) / (hardware.network * 1e9),
        )


@dataclass(frozen=True)
class Traffic:
    """Total bytes of the messages of an iteration, including the part that a rank already holds."""

    shards: Group  # ranks that share one copy of the parameters
    replicas: Group
    gathered: dict[str, float]  # weights, by stage
    reduced: float  # gradients reduced to their shards
    averaged: float  # gradients of a shard averaged over replicas: twice their size
    exchanged: float  # tokens that a rank receives

    @property
    def shard_traffic(self) -> float:
        return sum(self.gathered.values()) + self.reduced

    @property
    def received(self) -> float:
        """Bytes received by a rank."""
        return (
            self.shards.received(self.shard_traffic)
            + self.replicas.received(self.averaged)
            + self.exchanged
        )

    @property
    def from_other_nodes(self) -> float:
        """Bytes of weights and gradients that come over the network, per GPU of a node."""
        return self.shards.from_other_nodes(self.shard_traffic) + self.replicas.from_other_nodes(
            self.averaged
        )


def traffic(run: PlannedRun) -> Traffic:
    """Return the messages of an iteration."""
    settings = run.settings
    num_nodes = math.ceil(run.world_size / run.hardware.gpus_per_node)
    num_replicas = run.world_size // run.num_shards
    batches = settings.gradient_accumulation_steps * settings.grpo_sampling_steps
    updates = run.config.objective.updates
    # A call is one forward pass of the transformer, which gathers all weights once, whatever its
    # batch. A pass is the velocity of one batch of rollouts at one trained step: one call for all
    # branches, or one call for each.
    calls_per_pass = run.num_calls(settings.mini_batch_size_per_update, run.plan.trained_branches)
    calls_of_anchor = run.num_calls(settings.mini_batch_size_per_update, run.plan.anchor_branches)
    passes = updates * run.backwards_per_update
    calls = passes * calls_per_pass
    # The anchor, and the old policy of nft, repeat a part of the passes. `anchor_forwards` and
    # `old_forwards` are numbers of steps per rollout, so the part is their ratio to the number of
    # trained columns.
    compared = calls_of_anchor * run.anchor_forwards + calls_per_pass * run.old_forwards
    columns = run.plan.num_trained_steps + run.plan.num_reward_steps
    compared = math.ceil(passes * compared / max(1, columns))
    sampled = batches * run.num_calls(settings.batch_size, run.plan.sampled_branches)
    # FSDP frees the gathered weights after a block's forward pass, and gathers them again for its
    # backward pass.
    derivatives = 2 * calls if run.derivative_forwards else 0
    gathers = {"rollout": sampled, "anchor": compared, "update": 2 * calls + derivatives}
    if not settings.reshard_after_forward:
        # The weights stay gathered until a backward pass frees them, so that only the first of
        # consecutive forward passes gathers.
        gathers = {"rollout": min(1, sampled), "anchor": min(1, compared), "update": calls}
    # forward, backward, recomputation
    exchanging = 2 if resolve_auto(run).checkpointing == "none" else 3
    exchanges = run.forwards_without_gradient + exchanging * run.forwards_with_gradient
    gradients = trained_parameters(run) * 4
    only_last = settings.gradient_sync == "last" or (
        settings.gradient_sync == "auto" and settings.lora_rank
    )
    return Traffic(
        shards=Group(run.num_shards, math.ceil(run.num_shards / run.hardware.gpus_per_node)),
        replicas=Group(num_replicas, min(num_replicas, num_nodes)),
        gathered={stage: gathered_bytes(run) * number for stage, number in gathers.items()},
        reduced=gradients * (updates if only_last else calls),
        # Each forward pass of the last batch has its own backward pass, which reduces its
        # gradients.
        averaged=2 * gradients / run.num_shards * updates * calls_per_pass,
        exchanged=run.rollouts_per_replica * exchanges * exchanged_bytes(run),
    )


def gathered_bytes(run: PlannedRun) -> int:
    """Return the bytes of the weights that one forward pass gathers, including those of the rank
    itself.
    """
    return run.architecture.parameters * run.compute_bytes


def exchanged_bytes(run: PlannedRun) -> float:
    """Return the bytes of queries, keys, values and attention outputs that a rank receives in a
    forward pass.
    """
    sp_size, model = run.settings.sp_size, run.architecture
    tokens = 4 * run.image_tokens / sp_size * (sp_size - 1) / sp_size
    return tokens * model.width * model.num_layers * run.compute_bytes


def exchange_seconds(run: PlannedRun) -> float:
    """Return the seconds of the exchanges of a forward pass: messages, copies that order the
    tokens, and latency.
    """
    sp_size = run.settings.sp_size
    hardware = run.hardware
    size = exchanged_bytes(run)
    if sp_size == 1:
        return 0.0
    link = hardware.link if sp_size <= hardware.gpus_per_node else hardware.network
    copied = 2 * size * sp_size / (sp_size - 1)  # read and written, with the rank's own part
    latency = run.architecture.num_layers * _EXCHANGE_LATENCY
    return size / (link * 1e9) + hardware.seconds("memory", copied) + latency
