"""Checks of a checkpoint folder, from configs and headers alone: missing, corrupted and mismatched
files.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from hyvideo.data.prompts import Request
from hyvideo.models import loading
from hyvideo.models.config_file import read_config
from hyvideo.models.family import Family, Part, family_named
from hyvideo.models.guidance import Expert
from hyvideo.models.sizes import versions_of_sizes
from hyvideo.models.versions import RELEASED, experts_of, version_defaults
from hyvideo.weights.pipeline_folder import INDEX, read_index
from hyvideo.weights.weight_files import (
    Folder,
    problems_of,
    read_header,
    tensor_problems,
    with_label,
)


def check_checkpoint(
    root: str | Path,
    version: str | None,
    requests: Iterable[Request],
    *,
    weights_needed: bool = True,
) -> list[str]:
    """Return the problems that prevent loading the parts that the requests need; empty if there are
    none.

    ``weights_needed=False`` checks only configs and tokenizers, the files that
    ``random_weights_seed`` needs.
    """
    root = Path(root)
    requests = list(requests)
    family = family_of_folder(root, version)
    if family is None:
        return problems_of(
            lambda: _transformer_problems(root, version, None, weights_needed=weights_needed)
        )
    problems = problems_of(lambda: family.unread_files(root))
    if problems:
        return problems
    for expert in experts_of(version):
        problems += problems_of(
            partial(_transformer_problems, root, version, expert, weights_needed=weights_needed)
        )
    if not problems:
        problems = problems_of(lambda: version_problems(root, version, family))
    problems += problems_of(
        lambda: model_problems(
            loading.vae_folder(root), "vae", family=family, weights_needed=weights_needed
        )
    )
    kinds = family.kinds(requests)
    for part in family.parts:
        if part.kind in kinds:
            problems += problems_of(
                partial(part_problems, part, root, requests, weights_needed=weights_needed)
            )
    return problems or problems_of(lambda: latent_problems(root, version, family))


def family_of_folder(root: Path, version: str | None) -> Family | None:
    """Return the family of a folder's transformer or, if it is missing or corrupted, the family of
    ``version``; None if the version is not listed.
    """
    with suppress(ValueError):  # the caller reports it among the problems
        return loading.read_family(loading.transformer_folder(root, version))
    listed = version_defaults(version).family
    return family_named(listed) if listed else None


def _transformer_problems(
    root: Path, version: str | None, expert: Expert | None, *, weights_needed: bool
) -> list[str]:
    folder = loading.transformer_folder(root, version, expert)
    return model_problems(folder, weights_needed=weights_needed)


def model_problems(
    folder: Folder,
    part: str = "transformer",
    *,
    family: Family | None = None,
    weights_needed: bool = True,
) -> list[str]:
    """Return the problems that prevent loading a folder's ``transformer`` or ``vae``, of ``family``
    if given.
    """
    if part == "transformer":
        component = loading.read_transformer(folder, family)
    else:
        component = getattr(family or loading.read_family(folder), part)
    model, is_original = loading.build_on_meta(component, folder)
    if not weights_needed:
        return []
    expected = loading.expected_shapes(component, model.state_dict(), is_original)
    return with_label(
        folder, tensor_problems(folder, expected, read_header(folder, loading.WEIGHTS_STEM))
    )


def part_problems(
    part: Part, root: Path, requests: Iterable[Request], *, weights_needed: bool = True
) -> list[str]:
    """Return the problems that prevent loading an encoder.

    For an encoder of only some requests, such as images, they name the first that needs it.
    """
    problems = problems_of(lambda: part.problems(root, weights_needed))
    if not part.feeds:
        return problems
    first = next(request for request in requests if part.content(request) is not None)
    return [
        f"{problem}. Needed by {first.described}; add the files or leave this prompt out"
        for problem in problems
    ]


def version_problems(root: Path, version: str | None, family: Family) -> list[str]:
    """Return the problem that a folder is that of other released versions than ``version``, by the
    transformer's sizes and the number of experts.

    A transformer of other sizes than all released ones may be named as any version.
    """
    index = read_index(root)
    folder = loading.transformer_folder(root, version)
    config = read_config(folder.path, folder.label)

    def has_experts_of(name: str | None) -> bool:
        return not index or index.get("boundary_ratio") == version_defaults(name).boundary

    versions = [name for name in versions_of_sizes(family.name, config) if has_experts_of(name)]
    hint = f"set transformer_version to {' or '.join(versions)}, or " if versions else ""
    if not has_experts_of(version):
        return [
            f"{root / INDEX} has boundary_ratio {index.get('boundary_ratio')}, the noise level "
            f"between two experts, but transformer_version {version} has "
            f"{version_defaults(version).boundary}; {hint}set transformer_version and "
            "pretrained_model_root to the same model"
        ]
    if version not in RELEASED or version in versions or not versions:
        return []
    if version_defaults(version).family != family.name:  # which the caller reports
        return []
    return [
        f"{folder.path} has the transformer of {' or '.join(versions)}, but transformer_version is "
        f"{version}, of which the run takes shift, guidance scale and steps; {hint}set "
        "pretrained_model_root to that model"
    ]


def latent_problems(root: Path, version: str | None, family: Family) -> list[str]:
    """Return a problem if the transformer and the VAE have latents of different channels, from
    their configs.
    """
    folder = loading.transformer_folder(root, version)
    vae_folder = loading.vae_folder(root)
    arguments = loading.read_arguments(loading.read_transformer(folder), folder)[0]
    # diffusers' classes with the default None return as many channels as they get; a class of the
    # family's package may have neither argument
    channels = arguments.get("out_channels") or arguments.get("in_channels")
    needed = family.latents(loading.read_arguments(family.vae, vae_folder)[0]).channels
    if channels in (needed, None):
        return []
    return [f"{vae_folder.path} needs {needed} latent channels, but {folder.path} has {channels}"]
