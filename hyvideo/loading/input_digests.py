"""Digests of everything that a run reads and that decides what it learns, by the setting that names
it: the rows of a CSV, the bytes of a file of code, and samples of files of weights.

A resumed run must have the same, except for those that ``allow_changed_settings`` names.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from hyvideo.data.prompts import hash_requests
from hyvideo.files.digests import digest_file, digest_of, digest_weights
from hyvideo.models import loading
from hyvideo.models.guidance import OTHER_EXPERT
from hyvideo.settings.config import Config
from hyvideo.settings.identity import code_of, weights_of
from hyvideo.settings.reward_settings import compared_options
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sections import ModelSettings

MODELS = "pretrained_model_root/"  # start of the names of the models that a run loads


def digest_inputs(config: Config, inputs: RunInputs, kinds: Collection[str]) -> dict[str, str]:
    """Return the digests of a run's inputs.

    ``kinds`` are the kinds of conditions that its prompts need. Raises OSError for a file that
    cannot be read.
    """
    found = {
        name: digest_of([digest_file(path) for path in paths])
        for name, paths in code_of(config).items()
    }
    found |= {name: digest_weights([path]) for name, path in weights_of(config).items()}
    if not config.objective.videos_from:
        found["prompts_csv"] = hash_requests(inputs.requests)
    if config.reward.reward_config:
        found["reward_config"] = digest_of(compared_options(config.reward))
    found |= digest_models(config.model, kinds)
    return found


def digest_models(model: ModelSettings, kinds: Collection[str]) -> dict[str, str]:
    """Return the digests of the weights of the transformer, the VAE and the encoders of ``kinds``;
    empty for random weights.
    """
    if model.random_weights:
        return {}
    root = Path(model.pretrained_model_root)
    expert = model.trained_expert
    transformer = loading.transformer_folder(root, model.transformer_version, expert)
    folders = {"transformer": [transformer.path], "vae": [root / "vae"]}
    if expert:
        partner = loading.transformer_folder(root, model.transformer_version, OTHER_EXPERT[expert])
        folders["partner"] = [partner.path]
    for part in loading.read_family(transformer).parts:
        if part.kind in kinds:
            folders[part.kind] = [root / folder for folder in part.folders]
    return {f"{MODELS}{name}": digest_weights(paths) for name, paths in folders.items()}


def changed_inputs(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the inputs whose digest differs. A name that only one has is a changed
    setting, or a model that is loaded now and was not before.
    """
    return sorted(name for name in saved.keys() & now.keys() if saved[name] != now[name])
