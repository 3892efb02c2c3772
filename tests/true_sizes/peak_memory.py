"""Score one video several times in a new process, and print its scores and the growth of its memory
as JSON.

python tests/true_sizes/peak_memory.py SCORER FOLDER FRAMES HEIGHT WIDTH
"""

import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from hyvideo.rewards.rewards import scorer_class
from tests.true_sizes.video_files import PROMPT, moving_blocks

KIB = 1024
FEW, MANY = 8, 24  # videos: two batches, after which the allocator has what it needs, and six


def peak_mib() -> float:
    """Return the largest memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB / 2**20


def main() -> None:
    name, folder, *size = sys.argv[1:]
    torch.set_num_threads(1)
    scorer = scorer_class(name)(folder)
    video = moving_blocks(*map(int, size))
    few = scorer.score([video] * FEW, [PROMPT] * FEW, fps=24)
    before = peak_mib()
    many = scorer.score([video] * MANY, [PROMPT] * MANY, fps=24)
    print(
        json.dumps(
            {
                "few": few,
                "many": many,
                "growth_mib": peak_mib() - before,
                "peak_gib": peak_mib() / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
