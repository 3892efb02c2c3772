"""Checks of a checkpoint folder before anything is loaded: what is missing, broken or does not fit, in sentences.

Configs and the headers of the weight files are read, a second or two for the full-size model.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hyvideo.data.prompts import Request
from hyvideo.models import loading
from hyvideo.models.family import Family, family_named
from hyvideo.models.versions import version_defaults
from hyvideo.models.weight_files import Folder, labelled, problems_of, read_header, read_json, tensor_problems


def check_checkpoint(
    root: str | Path, version: str | None, requests: Iterable[Request], *, weights_needed: bool = True
) -> list[str]:
    """Problems that keep the parts that the requests need from loading; empty when there are none.

    ``weights_needed=False`` checks what ``random_weights_seed`` needs: the configs and the tokenizers.
    """
    root = Path(root)
    family = _family(root, version)
    kinds = family.kinds(requests)
    checks = [
        lambda: model_problems(loading.transformer_folder(root, version), weights_needed=weights_needed),
        lambda: pipeline_problems(root),
        lambda: model_problems(loading.vae_folder(root), "vae", family=family, weights_needed=weights_needed),
        *(lambda part=part: part.problems(root, weights_needed) for part in family.parts if part.kind in kinds),
    ]
    return [problem for check in checks for problem in problems_of(check)]


def _family(root: Path, version: str | None) -> Family:
    """Return the family of a folder's transformer; where that is missing or broken, the one its version belongs to."""
    with suppress(ValueError):  # one of the problems
        return loading.read_family(loading.transformer_folder(root, version))
    return family_named(version_defaults(version).family)


def model_problems(
    folder: Folder, part: str = "transformer", *, family: Family | None = None, weights_needed: bool = True
) -> list[str]:
    """Problems that keep the ``transformer`` or the ``vae`` of a folder from loading, by its config and headers.

    ``family`` is the one that it must be of; by default its config says of which it is.
    """
    component = getattr(family or loading.read_family(folder, part), part)
    model, is_original = loading.build_without_memory(component, folder)
    if not weights_needed:
        return []
    expected = loading.expected_shapes(component, model.state_dict(), is_original)
    return labelled(folder, tensor_problems(folder, expected, read_header(folder, loading.WEIGHTS_STEM)))


def pipeline_problems(root: Path) -> list[str]:
    """Problems of the pipeline that a model_index.json describes: the program trains a single transformer."""
    path = root / "model_index.json"
    parts = read_json(path, "pipeline") if path.is_file() else {}
    others = sorted(
        name for name, of in parts.items() if name.startswith("transformer_") and of not in (None, [None, None])
    )
    return [f"{path} has {', '.join(others)} beside the transformer: such models cannot be used"] if others else []


def size_problems(root: str | Path, version: str | None, *, num_frames: int, height: int, width: int) -> list[str]:
    """Reasons why the models of a folder cannot make videos of this size; empty when they can. Reads configs only."""
    folder, of_vae = loading.transformer_folder(root, version), loading.vae_folder(root)
    family = loading.read_family(folder)
    settings = loading.read_arguments(family.transformer, folder)[0]
    patch = family.patch(settings)
    latents = family.latents(loading.read_arguments(family.vae, of_vae)[0])
    multiple = latents.spatial * patch[1]
    problems = []
    if latents.channels != (channels := settings["out_channels"]):
        problems.append(f"{of_vae.path} has latents of {latents.channels} channels, {folder.path} makes {channels}")
    if height % multiple or width % multiple:
        problems.append(f"height and width must be multiples of {multiple}, got {height} x {width}")
    if num_frames % latents.temporal != 1:
        problems.append(f"the number of frames must be {latents.temporal}n + 1, got {num_frames}")
    return problems
