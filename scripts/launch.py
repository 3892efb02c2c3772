"""Start the processes of a run on this node with torchrun, and return an exit code that says how
the run has ended.

    python -m scripts.launch [flags of torchrun] post_train.py --config FILE.yaml [flags]

torchrun itself returns 1 after any failure and any signal. Wrong flags of post_train.py are reported
once, before torch is imported and processes start. `torchrun --help` lists the flags of torchrun.
"""

import os
import signal
import sys
import time
from pathlib import Path

from hyvideo.checks.machine_rules import machine_problems
from hyvideo.checks.rules import between_settings
from hyvideo.files.cli import Parser
from hyvideo.files.run_folder import FINISHED, RECORD, STOPPED, read_record
from hyvideo.files.text import shorten
from hyvideo.settings.command_line import parse
from hyvideo.settings.problems import raise_problems
from hyvideo.settings.processes import FINAL_CODES, STOPPED_CODE
from hyvideo.settings.reference_flags import with_flags
from hyvideo.settings.run_inputs import RunInputs

TRAINING = "post_train.py"


def main(arguments: list[str] | None = None) -> int:
    """Run torchrun and return the exit code of the process that failed first.

    Return 1 if that process was killed. After a signal to this process, return 75 if the run has
    saved, else 1.
    """
    words = sys.argv[1:] if arguments is None else arguments
    own, program = split_at_program(words)
    if Path(program[0]).name == TRAINING:
        try:
            check_settings(own, program[1:])
        except ValueError as error:
            print(f"{TRAINING}: {shorten(str(error))}", file=sys.stderr)
            return 2

    from torch.distributed import run  # after the checks: this takes seconds
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = run.parse_args(words)
    signals = [*options.signals_to_handle.split(","), "SIGUSR1"]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # With nohup, SIGHUP stays ignored, here and in the processes.
        signals = [name for name in signals if name.strip() != "SIGHUP"]
    options.signals_to_handle = ",".join(signals)
    if options.standalone and not options.local_addr:
        options.local_addr = "localhost"  # the machine's own name does not resolve everywhere
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


def split_at_program(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the flags of torchrun, and the program with its flags; exits for help, and without a
    program.
    """
    parser = Parser(
        __doc__, prog="launch.py", usage=f"launch.py [flags of torchrun] {TRAINING} ..."
    )
    for number, word in enumerate(words):
        if word.endswith(".py") or word in ("-m", "--module"):
            return words[:number], words[number:]
    parser.parse_known_args(words)
    parser.error(f"no program to start: add {TRAINING} and its flags")


def check_settings(own: list[str], flags: list[str]) -> None:
    """Raise ValueError for settings that the processes would refuse, and for files that are missing
    here; exits on unknown flags.

    ``own`` are the flags of torchrun, which give the number of processes. Prompts and videos are
    read by the processes only.
    """
    command = parse(flags)
    parser = Parser()
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", dest="processes", default="1")
    counts, _ = parser.parse_known_args(own)
    is_counted = counts.nnodes.isdigit() and counts.processes.isdigit()
    if command.print_config or not is_counted:  # the processes count themselves
        return
    world_size = int(counts.nnodes) * int(counts.processes)
    try:
        raise_problems(
            [
                *between_settings(command.config, world_size, command.file),
                *machine_problems(RunInputs(command.config, world_size)),
            ]
        )
    except ValueError as error:
        raise ValueError(with_flags(str(error), command.flags)) from error


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
    sys.exit(main())
