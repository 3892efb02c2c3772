"""The identity of an evaluation: settings, and the contents of every file that decides it; no paths but the policy's.

A stored evaluation stands for a new one where all of it agrees (`scores_file.read_evaluation`). It sees

    prompts     their texts in order, and the bytes of their images
    base        every byte of the transformer's files, the VAE's, the encoders' and those of a LoRA that runs start from
    scorers     their resolved options, and every byte of their files, of options that are paths, and of the
                code of a scorer from outside this project
    policy      its path; every byte of a LoRA, a transformer or videos; of a checkpoint what `fingerprint` says

and not what lies elsewhere: the models of a reward service or of the hub, which it knows by address or name, a base
model of Qwen2-VL that an adapter of VideoAlign finds beside its folder, this project's code and the packages.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyvideo.config.command_line import reward_options
from hyvideo.config.identity import evaluation_settings, named_files
from hyvideo.config.sections import RewardSettings
from hyvideo.data.prompts import contents_of, read_requests
from hyvideo.distributed.manifest import fingerprint
from hyvideo.models import loading
from hyvideo.models.reward_models.rewards import SCORERS, Entry, code_files
from hyvideo.models.weight_files import Folder


def world_identity(settings: Mapping[str, Any], reward: RewardSettings, *, has_model: bool = True) -> dict[str, object]:
    """Settings and contents that evaluations of several policies have in common, from all settings by flag.

    Where videos are given the model's weights do not count. Raises ValueError for unreadable prompts or options.
    """
    root, csvs = Path(settings["pretrained_model_root"]), settings["valid_video_csv"]
    base = named_files(settings).get("pretrained_lora_path", [])
    if transformer := loading.find_transformer(root, settings["transformer_version"]):
        folders = loading.read_family(Folder(transformer, "transformer")).folders
        base = [transformer, *(root / folder for folder in folders if not folder.startswith("text_encoder/")), *base]
    options = {} if reward.remote_reward_url else reward_options(reward)
    scorers = {
        name: {"options": given | {"path": None}, "files": fingerprint(_scorer_files(name, root, given))}
        for name, given in options.items()
    }
    return {
        "settings": evaluation_settings(settings),
        "prompts": contents_of(read_requests(*csvs)) if csvs else None,
        "base": fingerprint(base) if has_model else None,
        "scorers": scorers,
    }


def policy_identity(**sources: Path | None) -> dict[str, object]:
    """Paths and contents of what is evaluated: a checkpoint, a LoRA, videos; of nothing, the base model."""
    return {name: {"path": str(path), "files": fingerprint([path])} for name, path in sources.items() if path}


def _scorer_files(name: str, root: Path, options: dict) -> list[Path]:
    entry = SCORERS.get(name, Entry(name, ".", ()))  # one that does not ship has no files but its options
    folder = Path(options.get("path") or root / entry.folder)
    files = [folder / part for part in entry.files]
    files += [Path(value) for key, value in options.items() if (key != "path" or not files) and _is_path(value)]
    return files + code_files([name])


def _is_path(value: object) -> bool:
    return isinstance(value, str) and len(value) < 1000 and Path(value).exists()
