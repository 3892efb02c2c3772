"""What the ranks of a run must have in common, compared before any weights are loaded."""

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hyvideo.distributed.collectives import agree
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.digests import digest_file, digest_of

PACKAGES = ("torch", "diffusers", "transformers")


def require_same_start(settings: Mapping[str, Any], device: torch.device, mesh: Mesh) -> None:
    """Raise ValueError on all ranks if they have other code, versions or settings. Collective."""
    root = Path(__file__).resolve().parents[2]  # of an installed copy, where packages are
    agree("the Python code of the project:", code_digest(root), mesh)
    versions = {name: metadata.version(name) for name in PACKAGES}
    # Patch versions of Python have the same language and library.
    versions["Python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    agree("the version of", versions, mesh)
    agree("the kind of device", device.type, mesh)
    agree("the setting", settings, mesh)


def code_digest(root: Path) -> str:
    """Return a digest of the names and contents of the project's Python files."""
    files = [*root.glob("*.py"), *root.glob("hyvideo/**/*.py"), *root.glob("scripts/**/*.py")]
    return digest_of([[str(file.relative_to(root)), digest_file(file)] for file in sorted(files)])
