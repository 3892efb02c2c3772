"""Runs a program on the GPU that does not exist, where that can be built."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.conftest import ROOT


def counted(module: str) -> Any:
    """Return the JSON that a program prints, run in its own process: torch has looked for CUDA in this one.

    Skips the test where there is no g++, which compiles the device, or where torch has CUDA of its own.
    """
    if not shutil.which("g++") or torch.version.cuda:
        pytest.skip("the GPU that does not exist is compiled by g++, for a torch without CUDA of its own")
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
