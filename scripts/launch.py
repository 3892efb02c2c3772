"""Start the processes of a run on this node: torchrun with this project's handling of signals and
restarts.

python -m scripts.launch [flags of torchrun] post_train.py --config FILE.yaml [flags]
"""

import sys
from pathlib import Path

from hyvideo.distributed import agent
from hyvideo.records.metrics_file import complete_lines
from hyvideo.settings.command_line import parse
from hyvideo.settings.processes import use_expandable_segments


def last_finished(flags: list[str]) -> int:
    path = Path(parse(flags).config.record.output_dir) / "metrics.jsonl"
    return (
        max((iteration for iteration, _ in complete_lines(path)), default=0)
        if path.is_file()
        else 0
    )


if __name__ == "__main__":
    use_expandable_segments()  # inherited by the processes
    sys.exit(agent.main(sys.argv[1:], last_finished))
