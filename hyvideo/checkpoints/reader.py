"""Safe reading of torch.distributed.checkpoint files from untrusted sources.

Their ``.metadata`` is a pickle. Only classes that describe tensors are unpickled, and only files
inside are opened.
"""

import io
import pickle
import warnings
from itertools import product
from pathlib import Path, PurePath

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

# The library warns on every load in a single process.
warnings.filterwarnings(
    "ignore", message=".*assuming the intent is to (load|save) in a single process"
)

_CHECKPOINT = "torch.distributed.checkpoint"
_DESCRIPTIONS = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING"
).split()
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *product([f"{_CHECKPOINT}.metadata"], _DESCRIPTIONS),
    *product(
        ["pathlib", "pathlib._local"],
        ["PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"],
    ),
}


class SafeReader(dcp.FileSystemReader):
    """`FileSystemReader` that reads ``.metadata`` with `read_metadata`."""

    def read_metadata(self, *_arguments, **_options) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a checkpoint. Raises ValueError if it is invalid."""
    try:
        metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except Exception as error:  # a corrupted pickle can raise anything
        raise ValueError(
            f"{folder}/.metadata is missing, corrupted or not tensor metadata: {error}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{folder}/.metadata is not tensor metadata")
    for info in metadata.storage_data.values():
        if PurePath(info.relative_path).name != info.relative_path:
            raise ValueError(
                f"{folder}/.metadata refers to a file outside its folder: {info.relative_path!r}"
            )
    return metadata


def read_shapes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of each tensor by name, with ``size`` and ``properties.dtype``."""
    entries = read_metadata(folder).state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
