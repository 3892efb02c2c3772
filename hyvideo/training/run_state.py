"""Going on with a run: which of its settings may be others now, and which would make it another run.

What is about the machine, the records or the layout may change. What the rollouts, rewards, loss or updates depend on
may not, unless that is said.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hyvideo.config.settings import SECTIONS, Config

# Beside all of the sections "distributed" and "record".
_FREE = frozenset(
    "pretrained_model_root precompute_conditions conditions_dir device num_threads vae_tile_size vae_tile_overlap "
    "batch_guidance decode_batch_size reward_offload reward_retries check_reward max_missing_fraction "
    "remote_reward_url remote_reward_timeout mini_batch_size_per_update gate_interval gate_tolerance kl_compute_mode "
    "reference_mode_offload max_steps max_bad_updates valid_video_csv".split()
)
_OF_THE_START = frozenset(("resume_from_checkpoint", "allow_changed_settings"))  # not worth telling
# Free as long as an iteration has as many rollouts.
_LAYOUT = frozenset(("batch_size", "gradient_accumulation_steps"))


@dataclasses.dataclass(frozen=True)
class Differences:
    """Sentences on the settings that are not those of the checkpoint."""

    free: list[str]
    of_the_method: list[str]


def contents(config: Config) -> dict[str, str]:
    """Hashes of the files that decide what is learned, by the setting that names them."""
    paths = {"prompts_csv": config.data.prompts_csv, "reward_config": config.reward.reward_config}
    return {name: hashlib.blake2b(Path(path).read_bytes()).hexdigest() for name, path in paths.items() if path}


def differences(
    saved: dict,
    config: Config,
    *,
    saved_rollouts: int | None,
    rollouts: int,
    saved_contents: Mapping[str, str] = MappingProxyType({}),
) -> Differences:
    """Of a checkpoint's settings and those of now.

    Args:
        saved_rollouts, rollouts: Of an iteration, then and now.
        saved_contents: `contents`, then.
    """
    free_names = _FREE | {f.name for part in ("distributed", "record") for f in dataclasses.fields(SECTIONS[part])}
    if saved_rollouts in (None, rollouts):
        free_names |= _LAYOUT
    free, of_the_method = [], []
    for name, value in config.flat().items():
        if name in _OF_THE_START or name not in saved or _plain(saved[name]) == _plain(value):
            continue
        sentence = f"{name} is {value!r} and was {saved[name]!r}"
        (free if name in free_names else of_the_method).append(sentence)
    for name, digest in contents(config).items():
        if saved_contents.get(name, digest) != digest:
            of_the_method.append(f"the contents of {name} {config.flat()[name]} are not what they were")
    return Differences(free, of_the_method)


def refuse_changes(found: Differences) -> None:
    """Raises ValueError where the run would become another one."""
    if found.of_the_method:
        raise ValueError(
            "the run to go on with was made with other settings, and would become another run:\n  "
            + "\n  ".join(found.of_the_method)
            + "\nset them as they were, begin a new run in another output_dir, or set allow_changed_settings"
        )


def _plain(value: object) -> object:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
