"""Names of the tensors in a folder, read without torch."""

from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open


def tensor_names(folder: Path) -> set[str]:
    """Return the names of all tensors in the safetensors files of a folder.

    A file that cannot be read has none here; it is reported where its tensors are compared with the
    model.
    """
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with suppress(SafetensorError, OSError), safe_open(path, framework="numpy") as file:
            names.update(file.keys())
    return names
