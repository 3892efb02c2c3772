"""Conditions on settings (``c``) and number of processes (``n``) under which a setting has no effect."""

import math
from contextlib import suppress

from hyvideo.config.objectives import traits_of
from hyvideo.config.setting import Unused
from hyvideo.data.prompts import read_requests

MIN_VIDEOS_TO_STOP = 16  # fewest validation videos that can stop a run for reward hacking


def _has_too_few_videos(c, n: int) -> bool:
    with suppress(ValueError):  # `prompts_are_readable` reports unreadable files
        return len(read_requests(*c.data.valid_video_csv)) * c.record.validation_repeats < MIN_VIDEOS_TO_STOP
    return False


KL = Unused("kl_weight 0", lambda c, n: c.kl_strategy == "none")
FLAGS = Unused("kl_strategy {strategy}", lambda c, n: c.trust_region.kl_strategy != "flags" or c.kl_strategy == "none")
DUAL = Unused("kl_strategy {strategy}", lambda c, n: not c.kl_strategy.startswith("dual"))
VELOCITY = Unused("kl_strategy {strategy}", lambda c, n: not c.measures_velocity)
ANCHOR = Unused("no anchor", lambda c, n: not c.needs_anchor)
MOVING_ANCHOR = Unused("no moving anchor", lambda c, n: not c.anchor_moves)
# The first refresh would come after the last update, when the anchor is no longer used.
REFRESH = Unused(
    "the run has {num_updates} updates, so the anchor stays the initial policy",
    lambda c, n: c.trust_region.update_ref_model_step >= c.num_updates,
)
COPIES = Unused(
    "no anchor or EMA on a GPU",
    lambda c, n: c.model.device == "cpu" or not (c.needs_anchor or c.optimizer.ema_decay > 0),
)
GPU = Unused("device cpu", lambda c, n: c.model.device == "cpu")
RISE = Unused("kl_schedule constant", lambda c, n: c.trust_region.kl_schedule == "constant")
ADAPTATION = Unused("kl_schedule {kl_schedule}", lambda c, n: c.trust_region.kl_schedule != "adaptive")
# The first feedback follows update w + 1 and affects update w + 2 (w: kl_warmup_updates).
TIME_FOR_FEEDBACK = Unused(
    "the run has {num_updates} updates, and the feedback starts after kl_warmup_updates {kl_warmup_updates}",
    lambda c, n: c.num_updates <= math.ceil(c.kl_warmup) + 1,
)
FEEDBACK = (KL, ADAPTATION, TIME_FOR_FEEDBACK)
CLIP = Unused(
    "with num_generations {num_generations} no advantage exceeds {greatest_advantage:.3g}",
    lambda c, n: c.reward.advantage_clip >= math.sqrt(c.rollout.num_generations - 1),
)
MUON = Unused("use_muon false", lambda c, n: not c.optimizer.use_muon)
MATRICES = Unused(
    "muon_scope hidden trains LoRA factors with AdamW",
    lambda c, n: c.optimizer.lora_rank > 0 and c.optimizer.muon_scope == "hidden",
)
AVERAGE = Unused(
    "after the {num_updates} updates of the run, {left_of_base:.0%} of the EMA is still the base model",
    lambda c, n: c.optimizer.ema_decay**c.num_updates > 0.5,
)
LORA = Unused("lora_rank 0", lambda c, n: c.optimizer.lora_rank == 0)
RECOMPUTATION = Unused(
    "enable_gradient_checkpointing false", lambda c, n: not c.distributed.enable_gradient_checkpointing
)
COMPILE = Unused("enable_compile false", lambda c, n: c.distributed.enable_compile == "false")
OTHER_PROCESS = Unused("one process", lambda c, n: n == 1)
SHARDING = Unused("no sharding", lambda c, n: n == 1 or not c.distributed.enable_fsdp)
APART = Unused("batched_forward {batched_forward} runs one sample per forward pass", lambda c, n: not c.is_batched)
LEVELS = Unused("objective {objective}", lambda c, n: traits_of(c.loss.objective).trains != "levels")
STEPS = Unused("objective {objective}, which trains noise levels", lambda c, n: not LEVELS.holds(c, n))
RATIO = Unused("objective {objective}, which has no ratio", lambda c, n: not traits_of(c.loss.objective).has_ratio)
CHECK = Unused("gate_interval 0", lambda c, n: c.loss.gate_interval == 0)
SERVICE = Unused("no remote_reward_url", lambda c, n: not c.reward.remote_reward_url)
SCORERS = Unused("remote_reward_url: reward services replace the scorers", lambda c, n: not c.reward.loaded_scorers)
VIDEOALIGN = (SCORERS, Unused("no videoalign", lambda c, n: "videoalign" not in c.reward.loaded_scorers))
ONE_REWARD = Unused("one weighted dimension", lambda c, n: sum(map(bool, c.reward_weights.values())) == 1)
TILES = Unused("vae_tile_size 0", lambda c, n: c.model.vae_tile_size == 0)
GUIDANCE = Unused("cfg_scale {cfg_scale:g}", lambda c, n: not c.negative_requests)
LIMIT = Unused("save_total_limit 0", lambda c, n: c.record.save_total_limit == 0)
VALIDATION = Unused("no valid_video_csv", lambda c, n: not c.data.valid_video_csv)
FEW_VIDEOS = Unused(
    f"a validation needs {MIN_VIDEOS_TO_STOP} videos to stop a run; raise validation_repeats", _has_too_few_videos
)
VIDEOS = Unused("log_video_interval 0", lambda c, n: c.record.log_video_interval == 0 and not c.data.valid_video_csv)
