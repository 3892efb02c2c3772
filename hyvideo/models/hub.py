"""Publishing of a folder on the Hugging Face Hub, with the user's own login."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id


def check_login(repository: str) -> None:
    """Raise ValueError unless the hub can be reached and knows the user, or for a wrong name."""
    validate_repo_id(repository)
    if "/" not in repository:
        raise ValueError(f"--push_to_hub must be OWNER/NAME, got {repository}")
    with _one_sentence(repository, "log in with `hf auth login`, or set HF_TOKEN"):
        HfApi().whoami()


def push(folder: Path, repository: str) -> str:
    """Upload a folder as a repository, which is created if it is missing, and return its address.

    Raises ValueError if that fails; the folder stays complete.
    """
    with _one_sentence(repository, f"later, run `hf upload {repository} {folder}`"):
        address = HfApi().create_repo(repository, exist_ok=True)
        HfApi().upload_folder(folder_path=folder, repo_id=repository)
    return str(address)


@contextmanager
def _one_sentence(repository: str, way_out: str) -> Iterator[None]:
    try:
        yield
    except (OSError, HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{repository} cannot be published: {reason}; {way_out}") from error
