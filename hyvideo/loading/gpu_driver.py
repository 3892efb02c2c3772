"""Problems with the NVIDIA driver, its memory and cuDNN on this machine, found before a run loads
anything.
"""

import os
import subprocess
from contextlib import suppress

import torch

_TRIAL_BYTES = 4 * 2**20
_ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # new and old name
_NEEDED_DRIVER = {"12": 525, "13": 580}  # oldest driver, by the major version of CUDA


def driver_problem() -> str | None:
    """Return why torch cannot use the NVIDIA GPUs of this machine; None if it can, or has none, or
    they are hidden.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or torch.cuda.is_available() or not (driver := driver_version()):
        return None
    cuda, major = torch.version.cuda or "none", driver.partition(".")[0]
    needed = _NEEDED_DRIVER.get(cuda.partition(".")[0], 0)
    if cuda == "none":
        fix = "Install a torch wheel with CUDA"
    elif major.isdigit() and int(major) < needed:
        fix = f"Install driver {needed} or newer, or a torch wheel for an older CUDA"
    else:
        fix = "See the error of `python -c 'import torch; torch.cuda.init()'`"
    return (
        f"torch cannot use the NVIDIA GPUs of this machine, got driver {driver} and torch "
        f"{torch.__version__} for CUDA {cuda}. {fix}, or set device cpu"
    )


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None without GPUs."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.split()[0]
    return None


def check_allocator(device: torch.device) -> None:
    """Allocate a little memory on a GPU.

    Raises ValueError if its driver does not support expandable segments.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    try:
        torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        used = [
            name
            for name in _ALLOCATOR_VARIABLES
            if "expandable_segments:True" in os.environ.get(name, "")
        ]
        if not used or "CUDA driver error" not in str(error):
            raise
        raise ValueError(
            f"torch cannot allocate memory on {device} in expandable segments, got "
            f"{str(error).splitlines()[0]!r}; WSL2 and some virtual GPUs do not support them. Set "
            f"{used[0]}=expandable_segments:False"
        ) from error


def cudnn_problem() -> str | None:
    """Return a warning if torch does not use this version of cuDNN for 3D convolutions in 16 bits,
    else None.
    """
    version, cuda = (
        torch.backends.cudnn.version() or 0,
        (torch.version.cuda or "12").partition(".")[0],
    )
    if not 90800 <= version < 91500:
        return None
    return (
        f"torch does not use cuDNN 9.{version // 100 % 100} for 3D convolutions in 16 bits, unless "
        "their weights are channels-last like the VAE's: custom scorers may be slow and need more "
        f"memory. Run `pip install 'nvidia-cudnn-cu{cuda}>=9.15'`"
    )
