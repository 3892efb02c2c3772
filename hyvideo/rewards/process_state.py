"""Settings of torch and of the process that the code of a scorer may change, and that are restored
after it.

In a thread other than the main one, settings that may change meanwhile in the main thread are left
alone: torch itself or the decoding of the next batch changes them.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """A setting with its name in messages."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


@contextmanager
def restored_state(owner: str) -> Iterator[None]:
    """Restore what the body changes, with a warning that names ``owner``.

    Raises ValueError for what cannot be restored: a closed sys.stdout, and torch's inference mode.
    """
    is_main = threading.current_thread() is threading.main_thread()
    settings = SETTINGS + (MAIN_THREAD_SETTINGS if is_main else ())
    before = [setting.read() for setting in settings]
    filters = _error_filters()
    was_closed, was_inference = _is_stdout_closed(), torch.is_inference_mode_enabled()
    try:
        yield
    finally:
        for added in [each for each in _error_filters() if each not in filters]:
            warnings.filters.remove(added)
        changes = []
        for setting, value in zip(settings, before):
            now = setting.read()
            if now != value:
                setting.write(value)
                changes.append(f"{setting.name} from {value} to {now}")
        if changes:
            advice = "this was undone, because it would also affect training"
            warnings.warn(f"{owner} changes {', '.join(changes)}; {advice}", stacklevel=3)
    if _is_stdout_closed() and not was_closed:
        raise ValueError("it closes sys.stdout, which the run needs")
    if torch.is_inference_mode_enabled() and not was_inference:
        raise ValueError(
            "it leaves torch's inference mode enabled; write `with torch.inference_mode():` in "
            "each method"
        )


def _set_default_device(device: torch.device) -> None:
    # A default device costs time in every call, so the CPU is not set as one.
    torch.set_default_device(None if device.type == "cpu" else device)


def _float32_precision() -> tuple[str, str, str]:
    """Return the precision of float32 products and convolutions, such as TF32."""
    cudnn = torch.backends.cudnn
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,
    )


def _set_float32_precision(precision: tuple[str, str, str]) -> None:
    both, products, convolutions = precision
    torch.set_float32_matmul_precision(both)
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = convolutions


def _is_cudnn_deterministic() -> bool:
    return torch.backends.cudnn.deterministic


def _set_cudnn_deterministic(flag: bool) -> None:
    torch.backends.cudnn.deterministic = flag


def _does_cudnn_measure() -> bool:
    return torch.backends.cudnn.benchmark


def _set_cudnn_measures(flag: bool) -> None:
    torch.backends.cudnn.benchmark = flag


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def _set_folder(folder: str) -> None:
    if folder:
        os.chdir(folder)


def _error_filters() -> list[tuple]:
    """Return the filters that turn warnings into errors; imported libraries may add others."""
    return [each for each in warnings.filters if each[0] == "error"]


def _is_stdout_closed() -> bool:
    return getattr(sys.stdout, "closed", False)


SETTINGS = (
    Setting("the gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("the default device", torch.get_default_device, _set_default_device),
    Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("the precision of float32", _float32_precision, _set_float32_precision),
    Setting("cudnn.deterministic", _is_cudnn_deterministic, _set_cudnn_deterministic),
    Setting("the working directory", _folder, _set_folder),
)
MAIN_THREAD_SETTINGS = (
    Setting(
        "the use of deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    # decoding in the main thread sets it
    Setting("cudnn.benchmark", _does_cudnn_measure, _set_cudnn_measures),
    Setting(
        "the detection of anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    ),
)
