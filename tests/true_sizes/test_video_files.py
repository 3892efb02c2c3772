"""Video files of true size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_video_is_the_same_file_whatever_was_in_memory_before(tmp_path):
    """x264's "mbtree" read memory that it had not written, for files of more than 40 frames and
    with AVX-512.
    """
    files = []
    for byte in (1, 85):
        file = tmp_path / f"{byte}.mp4"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment["MALLOC_PERTURB_"] = str(byte)  # the C library fills new memory with it
        subprocess.run(
            [sys.executable, "-m", "tests.true_sizes.video_files", file],
            env=environment,
            cwd=ROOT,
            check=True,
        )
        files.append(file.read_bytes())
    assert files[0] == files[1]
