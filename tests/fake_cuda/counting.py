"""Run a program on the fake CUDA device, if it can be compiled."""

import json
import shutil
import subprocess
from typing import Any

import pytest
import torch

from tests.forked import ROOT, python


def counted(module: str, *arguments: str) -> Any:
    """Return the JSON that a program prints.

    In its process, torch has not looked for CUDA before the fake device.

    Skips the test if g++, which compiles the device, is missing, or if torch is a CUDA build.
    """
    if not shutil.which("g++") or torch.version.cuda:
        pytest.skip("the fake CUDA device needs g++ and a torch build without CUDA")
    command = [python(preload="tests.fake_cuda.programs"), "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
