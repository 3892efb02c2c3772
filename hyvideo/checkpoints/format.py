"""The format of a checkpoint on disk: the names of its files, whether it is complete and intact, and
which checkpoint or LoRA a path names.

    checkpoints/000050/digests.json    digest of every file below; written last, before the rename
                       state.json      what `checkpoints.state.State` lists
                       model.json      class and configuration of the transformer
                       tensors/        torch.distributed.checkpoint
                       lora/           of LoRA training
                       .run            identity of the run that wrote it

No other file of the product spells these names. `loading` and `writer` read and write the tensors.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from hyvideo.files import run_folder
from hyvideo.files.digests import digest_file
from hyvideo.files.run_folder import CHECKPOINTS, MARK, RECORD, numbered

DIGESTS = "digests.json"
STATE = "state.json"
MODEL = "model.json"
TENSORS = "tensors"
LORA = "lora"
_METADATA = f"{TENSORS}/.metadata"  # of torch.distributed.checkpoint
_OWN_FILES = re.compile(
    "|".join(map(re.escape, (DIGESTS, STATE, MODEL, MARK))) + f"|({TENSORS}|{LORA})/.*"
)


def folder_of(output_dir: Path, iteration: int) -> Path:
    """Return the checkpoint folder of an iteration."""
    return output_dir / CHECKPOINTS / f"{iteration:06d}"


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of a run."""
    return (folder / TENSORS).is_dir()


def checkpoint_around(path: Path) -> Path | None:
    """Return the checkpoint that a path is or lies in, as a LoRA does; None if there is none."""
    for folder in (path, *path.absolute().parents[:2]):
        if is_checkpoint(folder):
            return folder
    return None


def is_complete(folder: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    return (folder / DIGESTS).is_file()


def is_lora(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of LoRA training, which needs the base model's
    weights.
    """
    return is_checkpoint(folder) and (folder / LORA).is_dir()


def all_in(output_dir: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, also of those that are not complete, oldest
    first.
    """
    return [path for _, path in numbered(output_dir, CHECKPOINTS) if path.is_dir()]


def complete(output_dir: Path) -> list[Path]:
    """Return the checkpoints that were written to their end, oldest first."""
    return [path for path in all_in(output_dir) if is_complete(path)]


# --- small files ----------------------------------------------------------------------------------


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=2))


def read_state(folder: Path) -> dict[str, Any]:
    """Return the contents of state.json."""
    return json.loads((folder / STATE).read_bytes())


def has_state(folder: Path) -> bool:
    """Return whether a folder has a state.json.

    Raises ValueError for a checkpoint without one.
    """
    # Path.is_file raises OSError if the name is too long
    if os.path.isfile(folder / STATE):
        return True
    if os.path.isdir(folder / TENSORS):
        raise ValueError(
            f"checkpoint {folder} is corrupted: {STATE} is missing; use an earlier one"
        )
    return False


def write_model(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the class and the configuration of the transformer beside its tensors."""
    (folder / MODEL).write_text(json.dumps(settings, indent=2) + "\n")


# --- digests --------------------------------------------------------------------------------------


def digest_files(folder: Path, *, rank: int = 0, num_ranks: int = 1) -> dict[str, str]:
    """Return the digests of this rank's share of the files of a checkpoint, by relative path."""
    left_out = (DIGESTS, MARK)  # a copy may lack the hidden mark
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name not in left_out
    )
    own = files[rank::num_ranks]
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        digests = list(pool.map(digest_file, own))
    return {str(path.relative_to(folder)): digest for path, digest in zip(own, digests)}


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of all files, which completes a checkpoint."""
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1, sort_keys=True))


def corruption_of(folder: Path, *, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Return why this rank's share of the files of a checkpoint differs from what was written; None
    if it does not.

    Reads all bytes of the share. Raises OSError for a file that cannot be read and may be intact.
    """
    try:
        return _changed_file(folder, rank, num_ranks)
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"


def _changed_file(folder: Path, rank: int, num_ranks: int) -> str | None:
    try:
        expected = json.loads((folder / DIGESTS).read_bytes())
        names = sorted(expected)[rank::num_ranks]
    except ValueError:
        return f"{DIGESTS} is invalid"
    if not {STATE, _METADATA} <= set(expected):
        return f"{DIGESTS} is incomplete"
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: digest_file(folder / name), names))
    changed = [name for name, digest in zip(names, found) if digest != expected[name]]
    return f"the contents of {changed[0]} have changed" if changed else None


def verify(folder: Path) -> None:
    """Raise ValueError if a checkpoint, or the one that a LoRA belongs to, differs from its digests.

    All files are read and hashed, once per process; about 1 GB per second and core. Other folders
    have no digests.
    """
    owner = checkpoint_around(folder)
    if owner:
        _verify_checkpoint(owner)


@lru_cache
def _verify_checkpoint(folder: Path) -> None:
    if problem := corruption_of(folder):
        raise ValueError(f"checkpoint {folder} is corrupted: {problem}; use an earlier one")


# --- what a path names ----------------------------------------------------------------------------


def newest_of_run(path: Path) -> Path:
    """Return the newest complete checkpoint of a run, which is printed, or ``path`` if it is no run.

    Raises ValueError for a run without a complete checkpoint.
    """
    if not any((path / name).exists() for name in (RECORD, CHECKPOINTS)):
        return path
    found = complete(path)
    if not found:
        raise ValueError(f"{path} is a run without a complete checkpoint; let it save one first")
    if os.environ.get("RANK", "0") == "0":
        print(f"using {found[-1]}, the newest checkpoint of the run", file=sys.stderr)
    return found[-1]


def lora_of_run(path: Path) -> Path:
    """Return the LoRA in a run's newest checkpoint or in a checkpoint; ``path`` if it is neither."""
    checkpoint = newest_of_run(path)
    return checkpoint / LORA if (checkpoint / LORA).is_dir() else checkpoint


def saved_policy(path: Path) -> Path:
    """Return the folder of a policy that a program is given, of a run the newest checkpoint.

    Raises ValueError if it is neither a checkpoint nor has a transformer, and as `newest_of_run`
    does.
    """
    folder = newest_of_run(path)
    configs = (folder / "config.json", *folder.glob("*/config.json"))
    if not is_checkpoint(folder) and not any(config.is_file() for config in configs):
        raise no_policy(path)
    return folder


def no_policy(path: Path) -> ValueError:
    """Return the error for a path that is neither a checkpoint nor a transformer."""
    problem = "is neither; give a folder in checkpoints/" if path.exists() else "does not exist"
    return ValueError(
        "a policy must be a checkpoint of a run or a transformer folder with a config.json: "
        f"{path} {problem}"
    )


def saved_lora(path: Path) -> Path:
    """Return the LoRA that a program is given, of a run's newest checkpoint or of a checkpoint the
    folder in it.

    Raises ValueError if it does not exist, and as `newest_of_run` does.
    """
    if not path.exists():
        raise ValueError(
            f"LoRA: {path} must be a safetensors file, or a folder with one; it does not exist"
        )
    return lora_of_run(path)


def run_of(folder: Path) -> Path | None:
    """Return the output folder that a checkpoint lies in; None if it was moved out of one."""
    checkpoints = folder.resolve().parent
    return checkpoints.parent if checkpoints.name == CHECKPOINTS else None


# --- deletion -------------------------------------------------------------------------------------


def remove_checkpoints_after(output_dir: Path, iteration: int, run: str) -> None:
    """Remove what killed processes have left, and the checkpoints of the run after ``iteration``."""
    run_folder.remove_later(output_dir, CHECKPOINTS, iteration, run, own_files=_OWN_FILES)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint as `run_folder.delete` does."""
    run_folder.delete(checkpoint, _OWN_FILES)


def keep_corrupted(checkpoint: Path) -> None:
    """Rename a corrupted checkpoint, so that it is kept and not looked at again."""
    kept = run_folder.free_name(checkpoint, ".corrupted")
    os.rename(checkpoint, kept)
    print(f"corrupted checkpoint {checkpoint} is kept as {kept.name}", file=sys.stderr, flush=True)
