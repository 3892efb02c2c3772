"""Conditions under which a setting does nothing, by what is lacking then: ``no.LORA`` where this is imported as ``no``.

Every condition is arithmetic on the other settings of the run (``c``) and the number of processes (``n``).
"""

import math
from contextlib import suppress

from hyvideo.config.setting import Unused
from hyvideo.data.prompts import read_requests

FEWEST_TO_STOP = 16  # videos of a validation that may end a run for reward hacking


def _shows_too_little(c, n: int) -> bool:
    """Claims that a validation has fewer videos than end a run."""
    with suppress(ValueError):  # of files that `prompts_are_readable` tells of
        return len(read_requests(*c.data.valid_video_csv)) * c.record.validation_repeats < FEWEST_TO_STOP
    return False


KL = Unused("kl_weight 0", lambda c, n: c.kl_strategy == "none")
FLAGS = Unused("kl_strategy {strategy}", lambda c, n: c.trust_region.kl_strategy != "flags" or c.kl_strategy == "none")
DUAL = Unused("kl_strategy {strategy}", lambda c, n: not c.kl_strategy.startswith("dual"))
VELOCITY = Unused("kl_strategy {strategy}", lambda c, n: not c.measures_velocity)
ANCHOR = Unused("no anchor", lambda c, n: not c.needs_anchor)
MOVING_ANCHOR = Unused("no moving anchor", lambda c, n: not c.anchor_moves)
# The first refresh is due after the last update, when nothing refers to the anchor any more.
REFRESH = Unused(
    "the run has {num_updates} updates, and the anchor stays the initial policy",
    lambda c, n: c.trust_region.update_ref_model_step >= c.num_updates,
)
COPIES = Unused(
    "no anchor and no average on a GPU",
    lambda c, n: c.model.device == "cpu" or not (c.needs_anchor or c.optimizer.ema_decay > 0),
)
RISE = Unused("kl_schedule constant", lambda c, n: c.trust_region.kl_schedule == "constant")
ADAPTATION = Unused("kl_schedule {kl_schedule}", lambda c, n: c.trust_region.kl_schedule != "adaptive")
# The feedback after update w + 1 is the first, for update w + 2.
TIME_FOR_FEEDBACK = Unused(
    "the run's {num_updates} updates end before the feedback, which follows kl_warmup_updates {kl_warmup_updates}",
    lambda c, n: c.num_updates <= c.trust_region.kl_warmup_updates + 1,
)
FEEDBACK = (KL, ADAPTATION, TIME_FOR_FEEDBACK)
CLIP = Unused(
    "no advantage of num_generations {num_generations} is above {greatest_advantage:.3g}",
    lambda c, n: c.reward.advantage_clip >= math.sqrt(c.rollout.num_generations - 1),
)
MUON = Unused("use_muon false", lambda c, n: not c.optimizer.use_muon)
MATRICES = Unused(
    "muon_scope hidden leaves the factors of a LoRA to AdamW",
    lambda c, n: c.optimizer.lora_rank > 0 and c.optimizer.muon_scope == "hidden",
)
AVERAGE = Unused(
    "after the run's {num_updates} updates {left_of_base:.0%} of the average is still the base",
    lambda c, n: c.optimizer.ema_decay**c.num_updates > 0.5,
)
LORA = Unused("lora_rank 0", lambda c, n: c.optimizer.lora_rank == 0)
RECOMPUTATION = Unused(
    "enable_gradient_checkpointing false", lambda c, n: not c.distributed.enable_gradient_checkpointing
)
COMPILE = Unused("enable_compile false", lambda c, n: c.distributed.enable_compile == "false")
OTHER_PROCESS = Unused("one process", lambda c, n: n == 1)
SHARDING = Unused("no sharding", lambda c, n: n == 1 or not c.distributed.enable_fsdp)
APART = Unused("batched_forward {batched_forward}: one sample per forward", lambda c, n: not c.is_batched)
NFT = Unused("objective grpo", lambda c, n: c.loss.objective != "nft")
RATIO = Unused("objective nft, which has no ratio", lambda c, n: c.loss.objective == "nft")
CHECK = Unused("gate_interval 0", lambda c, n: c.loss.gate_interval == 0)
SERVICE = Unused("no remote_reward_url", lambda c, n: not c.reward.remote_reward_url)
SCORERS = Unused(
    "remote_reward_url: the services have their own scorers", lambda c, n: bool(c.reward.remote_reward_url)
)
VIDEOALIGN = (SCORERS, Unused("no videoalign", lambda c, n: "videoalign" not in c.reward.reward_model))
TILES = Unused("vae_tile_size 0", lambda c, n: c.model.vae_tile_size == 0)
GUIDANCE = Unused("cfg_scale {cfg_scale:g}", lambda c, n: not c.negative_requests)
LIMIT = Unused("save_total_limit 0", lambda c, n: c.record.save_total_limit == 0)
VALIDATION = Unused("no valid_video_csv", lambda c, n: not c.data.valid_video_csv)
FEW_VIDEOS = Unused(
    f"a validation of fewer than {FEWEST_TO_STOP} videos ends no run; raise validation_repeats", _shows_too_little
)
VIDEOS = Unused("log_video_interval 0", lambda c, n: c.record.log_video_interval == 0 and not c.data.valid_video_csv)
