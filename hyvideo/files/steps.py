"""Programs of several steps: the commands that they run, and the record of what they were asked for."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyvideo.files.cli import exit_on_signals
from hyvideo.files.files import ROOT, read_json


def run(command: Sequence[object]) -> int:
    """Run a command in the project's folder and return its exit code.

    Ctrl-C and signals end the command by SIGTERM, after which it may save its work; a second Ctrl-C
    kills it.
    """
    with exit_on_signals():
        # In a process group of its own, so that Ctrl-C in a terminal reaches only this program.
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, process_group=0)
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait()
            except KeyboardInterrupt:
                process.kill()
                process.wait()
            raise


def changed(record: Path, given: Mapping[str, Any]) -> list[str]:
    """Return the names whose value differs from that in a recorded JSON file; names that the record
    lacks are not compared.
    """
    found = read_json(record, str(record))
    now = json.loads(json.dumps(given))
    return [name for name in now if now[name] != found.get(name, now[name])]
