"""The files of torch.distributed.checkpoint, read without trusting them.

Its ``.metadata`` is a pickle, and the library unpickles whatever it says. Here only the dozen names that describe
tensors are let through, and only files of the folder itself are opened.
"""

import io
import pickle
import warnings
from pathlib import Path, PurePath

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

# What the library says where there is one process.
warnings.filterwarnings("ignore", message=".*assuming the intent is to (load|save) in a single process")

_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    ),
}


class SafeReader(dcp.FileSystemReader):
    """The library's reader, with a ``.metadata`` that can only describe tensors."""

    def read_metadata(self, *_arguments, **_options) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """Description of the files. Raises ValueError for what is none."""
    try:
        metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except Exception as error:  # whatever a broken pickle raises, it is the file's fault
        raise ValueError(f"{folder}/.metadata is missing, damaged or no description of tensors: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{folder}/.metadata is no description of tensors")
    for info in metadata.storage_data.values():
        if PurePath(info.relative_path).name != info.relative_path:
            raise ValueError(f"{folder}/.metadata names a file outside of its folder: {info.relative_path!r}")
    return metadata


def read_shapes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Descriptions of the tensors by name: ``size``, ``properties.dtype``."""
    entries = read_metadata(folder).state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
