"""Identity of an evaluation: its settings and the contents of every file that affects it.

A stored evaluation is reused if its identity is the same (`scores_file.read_evaluation`). It covers

    prompts     their texts in order, and the bytes of their images
    base        the transformer, VAE and encoder files
    loras       those that are merged into the base model, and the one that runs start from
    expert      the one, of two, that a policy replaces
    scorers     their resolved options, their files, options that are paths, and the code of a scorer
                from outside this project
    policy      its path, and its files or videos; for a checkpoint, the digests in it

It does not cover the models of a reward service or of the hub, this code or installed packages.
"""

import os
from pathlib import Path

from hyvideo.data.prompts import hash_requests, read_requests
from hyvideo.files.custom_code import code_files
from hyvideo.files.digests import digest_weights
from hyvideo.models import loading
from hyvideo.models.versions import experts_of
from hyvideo.rewards.rewards import SCORERS, Entry
from hyvideo.settings.config import Config
from hyvideo.settings.identity import evaluation_settings, weights_of
from hyvideo.settings.reward_settings import reward_options
from hyvideo.settings.sections import RewardSettings
from hyvideo.weights.weight_files import Folder


def joint_identity(
    config: Config, reward: RewardSettings, *, has_model: bool = True
) -> dict[str, object]:
    """Return the part of the identity that evaluations share, of a model or, without ``has_model``,
    of videos.
    """
    root = Path(config.model.pretrained_model_root)
    csvs = config.data.valid_video_csv
    loras = {
        name: digest_weights([path])
        for name, path in weights_of(config).items()
        if name != "anchor_path"
    }
    base = []
    version = config.model.transformer_version
    found = [loading.find_transformer(root, version, expert) for expert in experts_of(version)]
    transformers = [folder for folder in found if folder]
    if transformers:
        folders = loading.read_family(Folder(transformers[0], "transformer")).folders
        base = [
            *transformers,
            *(root / folder for folder in folders if not folder.startswith("text_encoder/")),
        ]
    scorers = {}
    for name, given in reward_options(reward).items():
        files = digest_weights(_scorer_files(name, root, given))
        scorers[name] = {"options": given | {"path": None}, "files": files}
    settings = evaluation_settings(config)
    if not has_model:
        del settings["fps"]  # each video has its own
    return {
        "settings": settings,
        "prompts": hash_requests(read_requests(*csvs)) if csvs else None,
        "base": digest_weights(base) if has_model else None,
        "loras": loras if has_model else {},
        "expert": config.trained_expert if has_model else None,
        "scorers": scorers,
    }


def policy_identity(**sources: Path | None) -> dict[str, object]:
    """Return paths and contents of the evaluated checkpoint, LoRA or videos; empty for the base
    model.
    """
    return {
        name: {"path": str(path), "files": digest_weights([path])}
        for name, path in sources.items()
        if path
    }


def _scorer_files(name: str, root: Path, options: dict) -> list[Path]:
    # a custom scorer has no files except in its options
    entry = SCORERS.get(name, Entry(name, ".", ()))
    folder = Path(options.get("path") or root / entry.folder)
    files = [folder / part for part in entry.files]
    files += [
        Path(value)
        for key, value in options.items()
        if (key != "path" or not files) and isinstance(value, str) and os.path.exists(value)
    ]
    return files + code_files([name])
