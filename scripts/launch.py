"""Start the processes of a run on this node with torchrun, and return an exit code that says how
the run has ended.

python -m scripts.launch [flags of torchrun] post_train.py --config FILE.yaml [flags]

torchrun itself returns 1 after any failure and any signal.
"""

import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from hyvideo.files.run_folder import FINISHED, RECORD, STOPPED, read_record
from hyvideo.settings.command_line import parse
from hyvideo.settings.processes import FINAL_CODES, STOPPED_CODE


def main(arguments: list[str] | None = None) -> int:
    """Run torchrun and return the exit code of the process that failed first.

    Return 1 if that process was killed. After a signal to this process, return 75 if the run has
    saved, else 1.
    """
    options = run.parse_args(arguments)
    signals = [*options.signals_to_handle.split(","), "SIGUSR1"]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # With nohup, SIGHUP stays ignored, here and in the processes.
        signals = [name for name in signals if name.strip() != "SIGHUP"]
    options.signals_to_handle = ",".join(signals)
    if options.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning
    began = time.time()
    try:
        run.run(options)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in FINAL_CODES:  # after these, the run has said why it ended
            print(error, file=sys.stderr)
        return max(failure.exitcode, 1)  # negative after a signal
    except SignalException as error:
        print(f"{error}; all processes have ended", file=sys.stderr)
        return STOPPED_CODE if has_saved(options.training_script_args, began) else 1
    return 0


def has_saved(flags: list[str], began: float) -> bool:
    """Return whether a run that a signal has ended lost nothing: it has saved, or the signal came
    before it began to train.
    """
    config = parse(flags).config.with_absolute_paths()
    output_dir = Path(config.record.output_dir)
    record = output_dir / RECORD
    if not record.exists() or record.stat().st_mtime < began:
        return True
    return read_record(output_dir).end in (FINISHED, STOPPED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
