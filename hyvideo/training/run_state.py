"""Going on with a run: which of its settings may be others now, and which would make it another run.

What is about the machine, the records or the layout may change. What the rollouts, rewards, loss or updates depend on
may not, unless that is said.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hyvideo.config.identity import Changes, changed_settings
from hyvideo.config.settings import Config


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
) -> Changes:
    """Settings and named files of a checkpoint that are not those of now.

    Args:
        saved_rollouts, rollouts: Of an iteration, then and now.
        saved_contents: `contents`, then.
    """
    found = changed_settings(saved, config.flat(), same_rollouts=saved_rollouts in (None, rollouts))
    for name, digest in contents(config).items():
        if saved_contents.get(name, digest) != digest:
            found.of_the_method.append(f"the contents of {name} {config.flat()[name]} are not what they were")
    return found


def refuse_changes(found: Changes) -> None:
    """Raises ValueError where the run would become another one."""
    if found.of_the_method:
        raise ValueError(
            "the run to go on with was made with other settings, and would become another run:\n  "
            + "\n  ".join(found.of_the_method)
            + "\nset them as they were, begin a new run in another output_dir, or set allow_changed_settings"
        )
