"""Flags of the public reference that have another name here, or none.

`translate` turns the names of a command line or a file into settings before anything else sees
them.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hyvideo.files.cli import TRUTHS
from hyvideo.files.text import quote
from hyvideo.settings import processes

# Name in the reference -> setting.
RENAMED = {
    "pretrained_transformer_version": "transformer_version",
    "train_video_csv": "prompts_csv",
    "validation_global_seed": "validation_seed",
    "validation_num_inference_steps": "validation_steps",
    "validate_video_length": "validation_num_frames",
    "validation_video_length": "validation_num_frames",
    "video_length": "validation_num_frames",
    "validation_timestep_shift": "validation_shift",
    "validation_negative_prompt": "negative_prompt",
    "neg_prompt": "negative_prompt",
    "lora_r": "lora_rank",
    "video_fps": "fps",
    "infer_flow_shift_video": "shift",
    "adv_clip_max": "advantage_clip",
    "precision": "dtype",
    "vae_precision": "vae_dtype",
}
SIZES = {  # HEIGHTxWIDTH
    "validation_fixed_size": ("validation_height", "validation_width"),
    "fixed_size": ("height", "width"),  # of generate.py
}
# Name of a reward model in the reference -> here.
REFERENCE_SCORERS = {"videoalign_local": "videoalign"}
BUCKETS = {"480": (352, 624), "640": (480, 864)}  # video_bucket_hw_base_size -> height, width
SWITCHES = (
    "use_lora use_moving_KL use_dual_kl enable_gradient_checkpointing reference_mode_offload"
).split()
# They decide nothing that this program leaves open, or switch on what it does not have.
IGNORED = (
    "post_train_type task_type data_type i2v_prob train_timestep_shift snr_type flow_snr_type "
    "num_workers prefetch_factor log_interval model_type vae_name multitask_mask_training_type "
    "validation_prompts lora_dropout reward_checkpoint_mode kl_compute_mode spool_rounds "
    "batch_guidance use_8bit_adam enable_cache use_sageattn"
).split()
IGNORED_BY_GENERATE = (
    "sparse_attn sage_blocks_range use_fp8_gemm quant_type include_patterns original_noise_dir "
    "save_generation_config"
).split()
_DEBUG = "debug_"  # start of the names of the reference's debug switches, which are ignored


def is_ignored(name: str) -> bool:
    """Return whether post_train.py ignores a flag of the reference."""
    return name in IGNORED or name.startswith(_DEBUG)


def add_flags(parser: argparse.ArgumentParser, words: Iterable[str]) -> None:
    """Add the flags of the reference that are neither settings nor in `RENAMED`, without help."""
    for name in ("validation_fixed_size", "video_bucket_hw_base_size"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", nargs="?", const="true", help=argparse.SUPPRESS)
    debug = {word[2:].partition("=")[0] for word in words if word.startswith(f"--{_DEBUG}")}
    for name in (*IGNORED, *sorted(debug)):
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)


def print_ignored(names: Iterable[str], reason: str) -> None:
    """Print the flags that have no effect on stderr of rank 0."""
    if processes.rank() == 0:
        print(f"ignored flags: {', '.join(names)}; {reason}", file=sys.stderr)


def translate(
    given: Mapping[str, Any], inherited: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of the names of a command line or a file, and the name that gave each.

    They override the ``inherited`` settings. Raises ValueError if two names give a setting
    different values, and for an invalid size or switch.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in given.items():
        for setting, each in _settings_of(name, value).items():
            if setting in values and values[setting] != each:
                raise ValueError(
                    f"{names[setting]} and {name} set {setting} to {values[setting]!r} and "
                    f"{each!r}; remove one of them"
                )
            values[setting], names[setting] = each, name
    switches = {name: _is_true(name, given[name]) for name in SWITCHES if name in given}
    if switches.pop("use_lora", None):
        rank = {"lora_rank": 8, "lora_alpha": 16}
        values |= {
            name: value
            for name, value in rank.items()
            if name not in values and not inherited.get(name)
        }
    elif "use_lora" in given:
        values["lora_rank"] = 0
    recomputes = switches.pop("enable_gradient_checkpointing", None)
    if recomputes is False:
        values["activation_checkpointing"] = "none"
    elif recomputes and inherited.get("activation_checkpointing", "none") == "none":
        values.setdefault("activation_checkpointing", "auto")
    has_anchor_away = switches.pop("reference_mode_offload", None)
    if has_anchor_away is not None:
        offload = values.get("offload", inherited.get("offload")) or []
        others = [offload] if isinstance(offload, str) else offload
        others = [each for each in others if each not in ("", "anchor")]
        values["offload"] = [*others, "anchor"] if has_anchor_away else others
    if switches and "kl_strategy" in values:
        print_ignored(switches, "kl_strategy chooses the KL terms")
    elif switches:
        values["kl_strategy"] = kl_strategy(switches, str(inherited.get("kl_strategy", "")))
    ignored = list(filter(is_ignored, given))
    if ignored:
        print_ignored(ignored, "this program decides or lacks what they do in the reference")
    return values, names


def _settings_of(name: str, value: Any) -> dict[str, Any]:
    """Return the settings that a name stands for; none for switches and ignored flags."""
    if is_ignored(name) or name in SWITCHES:
        return {}
    if name in SIZES:
        return dict(zip(SIZES[name], size_of(name, value)))
    if name == "video_bucket_hw_base_size":
        if str(value) not in BUCKETS:
            raise ValueError(
                f"{name} must be one of {', '.join(BUCKETS)}, got {quote(value)}; set height and "
                "width for another size"
            )
        return dict(zip(("height", "width"), BUCKETS[str(value)]))
    if RENAMED.get(name) == "negative_prompt" and (value is None or value.lower() == "none"):
        value = ""
    return {RENAMED.get(name, name): value}


def size_of(name: str, value: Any) -> tuple[int, int]:
    """Return the height and width of a size such as 480x864; 0 and 0 for ``none``."""
    if str(value).lower() == "none":
        return 0, 0
    sides = re.fullmatch(r"(\d{1,5})[xX*](\d{1,5})", str(value))
    if not sides:
        raise ValueError(
            f"{name} must be height x width, such as 480x864, or none, got {quote(value)}"
        )
    return int(sides[1]), int(sides[2])


def _is_true(name: str, value: Any) -> bool:
    if str(value).lower() not in TRUTHS:
        raise ValueError(f"{name} must be true or false, got {quote(value)}")
    return TRUTHS[str(value).lower()]


def kl_strategy(switches: Mapping[str, bool], inherited: str) -> str:
    """Return the ``kl_strategy`` of the reference's switches; one that is not given keeps its part
    of the ``inherited`` strategy.
    """
    is_moving = switches.get("use_moving_KL", not inherited.endswith("fixed"))
    is_dual = switches.get("use_dual_kl", inherited not in ("fixed", "moving"))
    anchor = "moving" if is_moving else "fixed"
    return f"dual_{anchor}" if is_dual else anchor


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message in which settings that were given under another flag also show that flag."""
    for setting, flag in flags.items():
        if setting != flag:
            message = re.sub(rf"\b{setting}\b", f"{setting} (given as --{flag})", message, count=1)
    return message
