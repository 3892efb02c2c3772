"""Run a program on the fake CUDA device, if it can be compiled."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.conftest import ROOT


def counted(module: str) -> Any:
    """Return the JSON that a program prints, run in a new process: in this one, torch has already looked for CUDA.

    Skips the test if g++, which compiles the device, is missing, or if torch is a CUDA build.
    """
    if not shutil.which("g++") or torch.version.cuda:
        pytest.skip("the fake CUDA device needs g++ and a torch build without CUDA")
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
