"""Policies that a command names. Imports no torch."""

import re
from dataclasses import replace
from pathlib import Path

from hyvideo.checkpoints.format import complete
from hyvideo.files.text import quote
from hyvideo.generation.generation import Source
from hyvideo.settings.sampling import Sampling
from hyvideo.weights.file_names import LORA_FILES

BASE = "base"
Policies = dict[str, tuple[Source, Sampling]]  # by name


def read_policies(words: list[str], sampling: Sampling) -> Policies:
    """Parse policies given as ``base`` or ``name=path`` (see `source_of`).

    Raises ValueError for invalid words.

    A suffix such as ``@6`` sets the guidance scale of a policy's settings, and ``@4steps`` its
    number of steps. Suffixes are part of its name.
    """
    policies: Policies = {}
    for word in words:
        pattern = r"(.*?)((?:@(\d+(?:\.\d+)?))?(?:@(\d+)steps)?)"
        plain, suffix, scale, steps = re.fullmatch(pattern, word, re.DOTALL).groups("")
        name, has_path, path = plain.partition("=")
        if not has_path and name != BASE:
            raise ValueError(f"a policy must be `{BASE}` or `name=path`, got {quote(word)}")
        if name + suffix in policies:
            raise ValueError(f"policies need different names, got {quote(name + suffix)} twice")
        source = source_of(Path(path)) if has_path else Source()
        of_policy = sampling
        if scale:  # of two experts, for both
            guidance = float(scale)
            of_policy = replace(
                sampling, guidance_scale=guidance, low_noise_guidance_scale=guidance
            )
        if steps:
            of_policy = replace(of_policy, steps=int(steps))
        policies[name + suffix] = (source, of_policy)
    return policies


def source_of(path: Path) -> Source:
    """Return the policy of a LoRA file or folder, of a checkpoint, or of a run (its newest
    checkpoint).
    """
    if not path.exists():
        raise ValueError(
            f"a policy must be a run, a checkpoint or a LoRA, got {quote(path)}: it does not exist"
        )
    if path.is_file() or any((path / name).is_file() for name in LORA_FILES):
        return Source(lora=path)
    checkpoints = complete(path)
    return Source(checkpoints[-1] if checkpoints else path)
