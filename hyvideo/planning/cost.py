"""Floating-point operations and seconds of an iteration and a validation, for given GPUs and links.

    forward  = 2 x tokens x parameters of a token's stream  +  4 x tokens^2 x width, in each block
    backward = 2 x matrix products of a forward pass  +  2.5 x its attention  +  recomputation
    seconds of a stage = max(computing, gathers and reductions) + exchanges of tokens

`Hardware` has separate rates for matrix products, attention, convolutions and memory-bound kernels.
"""

import math
from dataclasses import dataclass

from hyvideo.models.sizes import ForwardFlops
from hyvideo.planning.activations import tokens_outside_attention
from hyvideo.planning.memory import resolve_auto
from hyvideo.planning.network import exchange_seconds, traffic
from hyvideo.planning.overheads import anchor_seconds, ema_seconds, optimizer_seconds
from hyvideo.planning.planned_run import BYTES, PlannedRun

# VideoAlign's Qwen2-VL-2B: per second of video, which is one pair of frames and 256 tokens, and for
# the question.
_SCORE_FLOPS_PER_VIDEO_SECOND = 2 * 256 * (4 * 0.665e9 + 1.31e9)
_SCORE_FLOPS_PER_QUESTION = 2 * 1000 * 1.31e9
# forward passes: five products instead of two, because kernels compute the scores again
_ATTENTION_BACKWARD = 2.5
# Traffic of a block's memory-bound kernels in its forward and backward pass, in units of its input.
# Eager: counted on a fake CUDA device. Compiled: counted by torch's compiler on a CPU
# (`tests/planning/test_compiled_traffic.py`).
_TRAFFIC = {"eager": (42, 81), "compiled": (29, 73)}
_LORA_TRAFFIC = {"eager": (87, 106), "compiled": (49, 72)}
# A LoRA's own products, which are too thin to compute much: inputs and outputs of nine widths per
# block.
_LORA_PRODUCTS = 18, 36
# bytes per FLOP: 154 GB for a tile of 0.133 PFLOP, counted on a fake CUDA device
_DECODING_TRAFFIC = 1.16e-3
# Seconds of a block's pass that do not depend on its tokens, such as launches and partly filled
# waves; estimated.
_BLOCK_SECONDS = 0.5e-3
# a sample with more tokens fills a GPU, so that batches are hardly faster; estimated
_FILLING_TOKENS = 8192
COMPILATION = 270.0  # seconds that the first iteration takes longer, estimated at 3 to 6 minutes


@dataclass(frozen=True)
class Duration:
    """Seconds of an iteration."""

    stages: dict[str, float]  # by the names that `StageTimer` measures
    network: float  # all messages
    waiting: float  # messages that computing does not hide
    overheads: dict[str, float]  # contained in the stages, by what takes them

    @property
    def total(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True)
class Pass:
    """Work of a pass of the transformer for one video and branch on one rank, in units of a forward
    pass.
    """

    products: int = 1
    attention: int = 1
    attention_backward: float = 0.0
    forwards: int = 1  # including recomputation
    backwards: int = 0

    def flops(self, run: PlannedRun) -> ForwardFlops:
        forward, attention = _forward(run), self.attention + self.attention_backward
        return ForwardFlops(
            self.products * forward.image,
            self.products * forward.text,
            attention * forward.attention,
        )

    def seconds(self, run: PlannedRun, *, samples_per_call: float = 1) -> float:
        """Return the seconds of computing, without exchanges; the samples of a call share launches
        and waves.
        """
        forward = _forward(run)
        hardware = run.hardware
        model = run.architecture
        to_forward, to_backward = block_traffic(run)
        size = tokens_outside_attention(run) * model.width * run.compute_bytes * model.num_layers
        return (
            hardware.seconds("products", self.products * forward.products)
            + hardware.seconds("attention", self.attention * forward.attention)
            + hardware.seconds("attention backward", self.attention_backward * forward.attention)
            + hardware.seconds(
                "memory", (self.forwards * to_forward + self.backwards * to_backward) * size
            )
            + model.num_layers
            * (self.forwards + 2 * self.backwards)
            * _BLOCK_SECONDS
            / samples_per_call
        )


def block_traffic(run: PlannedRun) -> tuple[float, float]:
    """Return the bytes of a block's memory-bound kernels in its forward and backward pass, in units
    of its input.
    """
    way = "compiled" if run.settings.enable_compile == "true" else "eager"
    if not run.settings.lora_rank:
        return _TRAFFIC[way]
    forward, backward = _LORA_TRAFFIC[way]
    return forward + _LORA_PRODUCTS[0], backward + _LORA_PRODUCTS[1]


def _forward(run: PlannedRun) -> ForwardFlops:
    return run.architecture.forward(run.image_tokens, run.text_tokens).per_rank(
        run.settings.sp_size
    )


def training_pass(run: PlannedRun) -> Pass:
    """Return the work of a training forward and backward pass.

    A backward pass has a product for the gradient of the input and, except under a LoRA, one for
    that of the weights.
    """
    kind = resolve_auto(run).checkpointing
    products = 2 if run.settings.lora_rank else 3
    forwards = 1 if kind == "none" else 2
    return Pass(
        products=products + forwards - 1,
        attention=2 if kind == "full" else 1,
        attention_backward=_ATTENTION_BACKWARD,
        forwards=forwards,
        backwards=1,
    )


def training_forwards(run: PlannedRun) -> float:
    """Return the cost of a training forward and backward pass in forward passes: 1 + 2, plus what
    is recomputed.
    """
    forward = run.architecture.forward(run.image_tokens, run.text_tokens)
    linear = (forward.image + forward.text) / forward.total
    return 3 + {"none": 0.0, "selective": linear, "full": 1.0}[resolve_auto(run).checkpointing]


def forwards_per_rollout(run: PlannedRun) -> float:
    """Return the forward passes of all branches for a rollout: sampling, anchor means and
    training.
    """
    return run.forwards_without_gradient + training_forwards(run) * run.forwards_with_gradient


def iteration_flops(run: PlannedRun) -> float:
    per_video = 0.0
    if run.config.objective.scores_rollouts:
        per_video = decode_flops(run) + scoring_flops(run)
    return run.world_size * sum(stage_flops(run).values()) + run.plan.rollouts * per_video


def passes_by_stage(run: PlannedRun) -> dict[str, tuple[float, Pass]]:
    """Return the number and kind of the transformer's passes in each stage of an iteration on a
    rank.
    """
    numbers = {
        "rollout": (run.sampled_forwards, Pass()),
        "anchor": (run.compared_forwards, Pass()),
        "update": (run.forwards_with_gradient, training_pass(run)),
    }
    return {
        stage: (run.rollouts_per_replica * number, kind)
        for stage, (number, kind) in numbers.items()
    }


def samples_per_call(run: PlannedRun, stage: str) -> float:
    """Return the samples, of all branches, that share a forward pass of a stage on average; 1 if
    one fills a GPU.
    """
    if run.settings.batched_forward != "true" or run.image_tokens > _FILLING_TOKENS:
        return 1
    plan, settings = run.plan, run.settings
    branches = {
        "rollout": plan.sampled_branches,
        "anchor": plan.anchor_branches,
        "update": plan.trained_branches,
    }
    samples = settings.batch_size if stage == "rollout" else settings.mini_batch_size_per_update
    return samples * branches[stage]


def stage_flops(run: PlannedRun) -> dict[str, float]:
    """Return the FLOPs of the transformer on a rank in the stages of an iteration, as executed:
    with recomputation.
    """
    stages = {
        stage: number * kind.flops(run).total
        for stage, (number, kind) in passes_by_stage(run).items()
    }
    derivatives = run.rollouts_per_replica * run.derivative_forwards
    stages["update"] += derivatives * Pass().flops(run).total
    return stages


def forward_rate(run: PlannedRun) -> float:
    """Return the FLOP/s that a rank reaches in forward passes, with exchanges of tokens but no
    other communication.
    """
    return _forward(run).total / (Pass().seconds(run) + exchange_seconds(run))


def decode_flops(run: PlannedRun) -> float:
    """Return the FLOPs of decoding one video; overlaps of tiles are decoded twice."""
    ratio = run.architecture.spatial_compression_ratio
    covered, *sides = run.config.sampling.size
    for side in sides:
        covered *= (
            _tiled(
                side // ratio, run.settings.vae_tile_size // ratio, run.settings.vae_tile_overlap
            )
            * ratio
        )
    return run.architecture.decode_flops * covered


def scoring_flops(run: PlannedRun) -> float:
    """Return the FLOPs of VideoAlign on one video; 0 with a reward service.

    Smaller scorers are not counted.
    """
    reward, data = run.config.reward, run.config.data
    if "videoalign" not in reward.reward_model or reward.remote_reward_url:
        return 0.0
    return (
        _SCORE_FLOPS_PER_VIDEO_SECOND * data.sample_n_frames / data.fps + _SCORE_FLOPS_PER_QUESTION
    )


def video_seconds(run: PlannedRun) -> tuple[float, float]:
    """Return the seconds to decode one video and to score it."""
    # float32 takes twice as long
    hardware, flops = run.hardware, decode_flops(run) * BYTES[run.settings.vae_dtype] / 2
    decoding = hardware.seconds("convolutions", flops) + hardware.seconds(
        "memory", flops * _DECODING_TRAFFIC
    )
    return decoding, hardware.seconds("products", scoring_flops(run))


def duration(run: PlannedRun) -> Duration:
    """Return the seconds of one iteration.

    The ranks of a sequence-parallel group share decoding and scoring.
    """
    hardware = run.hardware
    sent = traffic(run)
    stages = {}
    network = 0.0
    waiting = 0.0
    for stage, (number, kind) in passes_by_stage(run).items():
        computing = number * kind.seconds(run, samples_per_call=samples_per_call(run, stage))
        if run.num_shards > 1:
            # copied out of the gathered buffer
            computing += hardware.seconds("memory", 2 * sent.gathered[stage])
        if stage == "update":
            messages = sent.shards.seconds(sent.gathered[stage] + sent.reduced, hardware)
            messages += sent.replicas.seconds(sent.averaged, hardware)
        else:
            messages = sent.shards.seconds(sent.gathered[stage], hardware)
        exchanges = number * (kind.forwards + kind.backwards) * exchange_seconds(run)
        exposed = max(0.0, messages - computing) + exchanges
        stages[stage] = computing + exposed
        network = network + messages + exchanges
        waiting = waiting + exposed
    overheads = overhead_seconds(run)
    stages["anchor"] += overheads["anchor's weights"]
    stages["update"] += overheads["optimizer"] + overheads["EMA"]
    stages["update"] += overheads["on-policy check"] + overheads["derivatives"]
    decoding, scoring = scored_video_seconds(run)
    if not run.config.objective.scores_rollouts:
        decoding = 0.0
        scoring = 0.0
    stages["update"] += reward_gradient_seconds(run)
    # Scoring counts in full even if it overlaps other stages, because it shares the GPU with them.
    return Duration(
        stages=stages | {"decode": decoding, "reward": scoring},
        network=network,
        waiting=waiting,
        overheads=overheads,
    )


def scored_video_seconds(run: PlannedRun) -> tuple[float, float]:
    """Return the seconds of an iteration to decode the videos and to score them."""
    # A sequence-parallel group shares the videos of a batch.
    videos = (
        math.ceil(run.settings.batch_size / run.settings.sp_size)
        * run.settings.gradient_accumulation_steps
    )
    decoding, scoring = video_seconds(run)
    return videos * decoding, videos * scoring


def reward_gradient_seconds(run: PlannedRun) -> float:
    """Return the seconds of an iteration to decode and score with a gradient, and of the backward
    passes.

    Decoding is computed forward three times: for the score, and again by tile and by residual
    block. The scorer's layers are computed forward twice. A backward pass by the inputs takes as
    long as a forward pass.
    """
    if not run.plan.num_reward_steps:
        return 0.0
    decoding, scoring = video_seconds(run)
    return run.rollouts_per_replica * ((3 + 1) * decoding + (2 + 1) * scoring)


def overhead_seconds(run: PlannedRun) -> dict[str, float]:
    """Return the seconds of an iteration for what is no pass of training or sampling."""
    updates = run.config.objective.updates
    checks = run.rollouts_per_replica * run.checked_forwards
    derivatives = run.rollouts_per_replica * run.derivative_forwards
    return {
        "optimizer": updates * optimizer_seconds(run),
        "EMA": updates * ema_seconds(run),
        "anchor's weights": anchor_seconds(run),
        "on-policy check": checks * (Pass().seconds(run) + exchange_seconds(run)),
        "derivatives": derivatives * (Pass().seconds(run) + exchange_seconds(run)),
    }


def validation_seconds(run: PlannedRun, num_videos: int) -> float:
    """Return the seconds of a validation of ``num_videos``, shared by the replicas; 0 without
    validation.
    """
    if not (sampling := run.validation):
        return 0.0
    videos = math.ceil(num_videos / run.plan.replicas)
    batch_size = max(1, min(videos, sampling.settings.batch_size))
    batches = math.ceil(videos / batch_size)
    sampled = sampling.with_settings(batch_size=batch_size, gradient_accumulation_steps=batches)
    return duration(sampled).stages["rollout"] + sum(scored_video_seconds(sampled))


def _tiled(side: int, tile: int, overlap: float) -> int:
    """Return the total number of latent rows of all tiles along a side."""
    if not tile or side <= tile:
        return side
    step = max(1, int(tile * (1 - overlap)))
    return sum(min(tile, side - start) for start in range(0, side, step))
