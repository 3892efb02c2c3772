"""Identity of an evaluation: its settings and the contents of every file that affects it.

A stored evaluation is reused if its identity is the same (`scores_file.read_evaluation`). It covers

    prompts     their texts in order, and the bytes of their images
    base        the transformer, VAE and encoder files, and a LoRA that runs start from
    scorers     their resolved options, their files, options that are paths, and the code of a scorer
                from outside this project
    policy      its path, and its files or videos; for a checkpoint, the digests in it

It does not cover the models of a reward service or of the hub, this code or installed packages.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyvideo.config.all_settings import RewardSettings
from hyvideo.config.command_line import reward_options
from hyvideo.config.identity import evaluation_settings, weights_of
from hyvideo.data.custom_code import code_files
from hyvideo.data.digests import digest_weights
from hyvideo.data.prompts import hash_requests, read_requests
from hyvideo.models import loading
from hyvideo.models.weight_files import Folder
from hyvideo.rewards.rewards import SCORERS, Entry


def joint_identity(
    settings: Mapping[str, Any], reward: RewardSettings, *, has_model: bool = True
) -> dict[str, object]:
    """Return the part of the identity that evaluations share, of a model or, without ``has_model``,
    of videos.
    """
    root, csvs = Path(settings["pretrained_model_root"]), settings["valid_video_csv"]
    base = weights_of(settings).get("pretrained_lora_path", [])
    if transformer := loading.find_transformer(root, settings["transformer_version"]):
        folders = loading.read_family(Folder(transformer, "transformer")).folders
        base = [
            transformer,
            *(root / folder for folder in folders if not folder.startswith("text_encoder/")),
            *base,
        ]
    options = {
        name: given
        for name, given in reward_options(reward).items()
        if name in reward.loaded_scorers
    }
    scorers = {
        name: {
            "options": given | {"path": None},
            "files": digest_weights(_scorer_files(name, root, given)),
        }
        for name, given in options.items()
    }
    return {
        "settings": evaluation_settings(settings),
        "prompts": hash_requests(read_requests(*csvs)) if csvs else None,
        "base": digest_weights(base) if has_model else None,
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
        if (key != "path" or not files) and _is_path(value)
    ]
    return files + code_files([name])


def _is_path(value: object) -> bool:
    return isinstance(value, str) and len(value) < 1000 and Path(value).exists()
