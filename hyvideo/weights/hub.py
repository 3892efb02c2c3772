"""Folders from and to the Hugging Face Hub: weights by the name of their repository, and publishing
with the user's own login.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from hyvideo.files.files import CACHED_REPOSITORY, is_repository

# Files of a pipeline in diffusers' layout, and second copies of its weights.
_INDEX = "model_index.json"
_OF_PIPELINE = (
    _INDEX,
    "LICENSE*",
    "NOTICE*",
    *(f"*/*.{ending}" for ending in ("json", "txt", "model", "jinja", "safetensors")),
)
_VARIANTS = ("*.fp16.*", "*.fp16-*", "*.bf16.*", "*.bf16-*")


def local_folder(
    path: str | Path, *, files: tuple[str, ...] = (), only_cached: bool = False
) -> str:
    """Return a folder of weights: ``path`` itself, the newest snapshot in a repository's folder of
    the hub's cache, or that of the repository ``path``, which is downloaded if it is not cached;
    with ``only_cached``, it is not, and ``path`` is returned.

    ``files`` are patterns of the needed files; by default, those of a pipeline in diffusers'
    layout. Raises ValueError if a repository has another layout, or is neither cached nor
    downloaded.
    """
    if Path(path).name.startswith(CACHED_REPOSITORY) and (Path(path) / "snapshots").is_dir():
        return str(_snapshot(Path(path)))
    if not is_repository(path):
        return str(path)
    repository = str(path)
    if only_cached:
        with suppress(LocalEntryNotFoundError):
            return _download(repository, files, local_files_only=True)
        return repository
    with _one_sentence(
        f"{repository} is no folder, and cannot be read from the Hugging Face Hub or its cache",
        "correct the name, log in with `hf auth login` if the model is gated, or copy the weights "
        "into a folder",
    ):
        if not files:
            folder = snapshot_download(repository, allow_patterns=[_INDEX])
            if not (Path(folder) / _INDEX).is_file():
                raise ValueError(
                    f"repository {repository} has no {_INDEX}, so it is not in diffusers' layout; "
                    "name one in this layout, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers, or "
                    "download it with download_weights.sh"
                )
        return _download(repository, files)


def _download(repository: str, files: tuple[str, ...], **options: bool) -> str:
    return snapshot_download(
        repository,
        allow_patterns=[*(files or _OF_PIPELINE)],
        ignore_patterns=[*_VARIANTS],
        **options,
    )


def _snapshot(folder: Path) -> Path:
    """Return the snapshot in a repository's folder of the cache that its branch main names, or the
    newest.
    """
    main = folder / "refs" / "main"
    if main.is_file():
        named = folder / "snapshots" / main.read_text().strip()
        if named.is_dir():
            return named
    snapshots = sorted((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
    if not snapshots:
        raise ValueError(f"{folder} of the hub's cache has no snapshot; download it again")
    return snapshots[-1]


def check_login(repository: str) -> None:
    """Raise ValueError unless the hub can be reached and knows the user, or for a wrong name."""
    validate_repo_id(repository)
    if "/" not in repository:
        raise ValueError(f"--push_to_hub must be OWNER/NAME, got {repository}")
    way_out = "log in with `hf auth login`, or set HF_TOKEN"
    with _one_sentence(f"{repository} cannot be published", way_out):
        HfApi().whoami()


def push(folder: Path, repository: str) -> str:
    """Upload a folder as a repository, which is created if it is missing, and return its address.

    Raises ValueError if that fails; the folder stays complete.
    """
    way_out = f"later, run `hf upload {repository} {folder}`"
    with _one_sentence(f"{repository} cannot be published", way_out):
        address = HfApi().create_repo(repository, exist_ok=True)
        HfApi().upload_folder(folder_path=folder, repo_id=repository)
    return str(address)


@contextmanager
def _one_sentence(what: str, way_out: str) -> Iterator[None]:
    try:
        yield
    except (OSError, HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{what}: {reason}; {way_out}") from error
