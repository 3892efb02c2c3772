"""What each setting may be by itself, whatever the others are: ranges of numbers, and what is text.

The upper bounds keep a slip of the hand from filling the memory before its message is printed.
"""

import math
from collections.abc import Iterator

from hyvideo.config.settings import Config
from hyvideo.data.outside import MAX_SETTING_BYTES, shown, text_problem

GREATEST = 10**9  # of any number that has no bound of its own
_MOST = (
    dict.fromkeys(("seed", "validation_seed"), 2**64 - 1)
    | dict.fromkeys(("grpo_sampling_steps", "validation_steps", "eta", "fps"), 1_000)
    | dict.fromkeys(("num_threads",), 1_024)
    | dict.fromkeys(("height", "width", "validation_height", "validation_width", "vae_tile_size", "lora_rank"), 8_192)
    | dict.fromkeys(("sample_n_frames", "validation_repeats", "log_num_videos"), 10_001)
    | dict.fromkeys(("batch_size", "num_generations", "gradient_accumulation_steps"), 100_000)
)
_LEAST = {"fps": 0.01, "shift": 0.001}


def range_problems(config: Config) -> Iterator[str]:
    """Numbers that make no sense, whatever the others are."""
    values = config.flat()
    at_least_one = (
        "dp_replicate height width sample_n_frames batch_size num_generations gradient_accumulation_steps "
        "grpo_sampling_steps "
        "decode_batch_size num_updates_per_rollout mini_batch_size_per_update update_ref_model_step kl_window "
        "max_steps max_bad_updates sp_size save_interval validation_interval validation_steps validation_repeats "
        "validation_batch_size"
    ).split()
    not_negative = (
        "eta kl_weight kl_coef kl_min_coef kl_gain kl_warmup_updates dual_kl_moving_weight dual_kl_step_weight "
        "weight_decay warmup_steps save_total_limit log_video_interval log_num_videos num_threads validation_height "
        "validation_width seed validation_seed vae_tile_size reward_retries lora_rank lora_alpha "
        "gate_interval keep_every spool_rounds watchdog_seconds"
    ).split()
    positive = (
        "learning_rate clip_range advantage_clip max_grad_norm adam_epsilon timestep_fraction "
        "remote_reward_timeout collective_timeout hacking_threshold"
    ).split()
    for name, value in values.items():
        if isinstance(value, (str, list)):
            yield from _text_problems(name, value)
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{name} must be a finite number, got {value}"
        elif value is not None and abs(value) > (most := _MOST.get(name, GREATEST)):
            bound = f"at most {most:,}" if value > 0 else f"at least {-most:,}"
            got = value if abs(value) < 2**64 or isinstance(value, float) else f"one of {value.bit_length()} bits"
            yield f"{name} must be a number of {bound}, got {got}"
        elif value is not None and name in _LEAST and not value >= _LEAST[name]:
            yield f"{name} must be at least {_LEAST[name]:g}, got {value}"
        elif name in at_least_one and value < 1:
            yield f"{name} must be at least 1, got {value}"
        elif name in not_negative and value < 0:
            yield f"{name} must not be negative, got {value}"
        elif name in positive and not value > 0:
            yield f"{name} must be positive, got {value}"
    for name in ("adam_beta1", "adam_beta2", "muon_momentum", "ema_decay"):
        if not 0 <= values[name] < 1:
            yield f"{name} must lie in [0, 1), got {values[name]}"
    if values["gate_tolerance"] is not None and not values["gate_tolerance"] > 0:
        yield f"gate_tolerance must be positive, got {values['gate_tolerance']}"
    if values["timestep_fraction"] > 1:
        yield f"timestep_fraction must be at most 1, got {values['timestep_fraction']}"
    if values["sde_type"] == "cps" and values["eta"] > 1:
        yield f"eta must be within [0, 1] for cps, got {values['eta']}"
    if not 0 <= values["max_missing_fraction"] <= 1:
        yield f"max_missing_fraction must lie in [0, 1], got {values['max_missing_fraction']}"
    if not 0 <= values["vae_tile_overlap"] < 1:
        yield f"vae_tile_overlap must lie in [0, 1), got {values['vae_tile_overlap']}"
    if values["sample_n_frames"] % 4 != 1:
        yield f"sample_n_frames must be 4n + 1, got {values['sample_n_frames']}"


def _text_problems(name: str, value: str | list[str]) -> Iterator[str]:
    for text in [value] if isinstance(value, str) else value:
        if problem := text_problem(text, MAX_SETTING_BYTES):
            yield f"{name} must be plain text, got {shown(text, 60)}: {problem}"
    if name == "transformer_version" and ("/" in value or "\\" in value or value in (".", "..")):
        yield f"{name} must be the name of a folder below transformer/, not a path, got {shown(value)}"
