"""Compare the training of two commits bit for bit, on this machine:

    python -m tests.net --base REV [--only NAME ...] [--cache FOLDER]

Runs every case of tests/net/cases.py from the working tree and from a git worktree of REV, each
through its own post_train.py. Compares metrics.jsonl, without what depends on time, and the tensors
of the last checkpoint. Prints one line per case; the exit code is 1 if a case differs or fails.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import warnings
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.net.cases import ALL, ITERATIONS, ROOT, Case, cases, flags
from tests.rated_pairs import write_pairs

MEASURED = ("time/", "memory/", "perf/", "quantiles/")  # metrics that depend on the machine's load


class Tree:
    """The source of a commit, and the cases that a worker process trains with it."""

    def __init__(self, source: Path, folder: Path, chosen: dict[str, Case], parallel: int):
        folder.mkdir()
        self.folder = folder
        self.names = list(chosen)
        self.results: dict[str, dict] = {}
        jobs = []
        for number, case in enumerate(chosen.values()):
            start = ["--config", f"configs/{case.config}.yaml", *ALL, *case.flags]
            runs = [
                [*start, *flags(output_dir=folder / str(number), max_steps=iterations)]
                for iterations in (*case.stops_after, ITERATIONS)
            ]
            jobs.append({"ranks": case.ranks, "runs": runs, "log": str(folder / f"{number}.log")})
        (folder / "jobs.json").write_text(json.dumps(jobs))
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(source),
            "PYTHONWARNINGS": "ignore",
        }
        environment["CUDA_VISIBLE_DEVICES"] = ""
        worker = [sys.executable, Path(__file__).with_name("worker.py")]
        self.process = subprocess.Popen(
            [*worker, folder / "jobs.json", str(parallel)],
            cwd=source,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def result(self, name: str) -> dict:
        """Wait for a case; return its metrics and the digests of its tensors, or its error."""
        while name not in self.results:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"the process that trains {self.names} has failed")
            number, ended_well = line.split()
            self.results[self.names[int(number)]] = self.read(int(number), ended_well == "True")
        return self.results[name]

    def read(self, number: int, ended_well: bool) -> dict:
        if not ended_well:
            return {"error": (self.folder / f"{number}.log").read_text()[-3000:]}
        output = self.folder / str(number)
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return {
            "metrics": [without_measured(json.loads(line)) for line in lines],
            "tensors": digests(output / "checkpoints" / f"{ITERATIONS:06d}" / "tensors"),
        }


def without_measured(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


def digests(folder: Path) -> dict[str, str]:
    """Return dtype, shape and a digest of the bytes of each tensor of a checkpoint, by name."""
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in sorted(entries.items())
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} "
        + hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()[:16]
        for name, tensor in tensors.items()
    }


def difference(base: dict, found: dict) -> str:
    """Return the first difference of two results of `run`, or an empty string."""
    for which, result in (("base", base), ("working tree", found)):
        if "error" in result:
            return f"{which}: {result['error']}"
    if len(base["metrics"]) != len(found["metrics"]):
        return f"lines of metrics.jsonl: {len(base['metrics'])} != {len(found['metrics'])}"
    for one, other in zip(base["metrics"], found["metrics"]):
        for name in chain(one, other):
            if json.dumps(one.get(name)) != json.dumps(other.get(name)):
                where = f"iteration {one['iteration']}, {name}"
                return f"{where}: {one.get(name)} != {other.get(name)}"
    names = [*base["tensors"], *found["tensors"]]
    differ = [n for n in names if base["tensors"].get(n) != found["tensors"].get(n)]
    if not differ:
        return ""
    first = differ[0]
    values = f"{base['tensors'].get(first)} != {found['tensors'].get(first)}"
    return f"{len(set(differ))} tensors of the checkpoint, first {first}: {values}"


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> list[str]:
    """Return what the bits of a result depend on beside the source."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = {line for line in lines if line.startswith(("model name", "flags"))}
    return [torch.__version__, platform.python_version(), *sorted(processor)]


def digest(machine: list[str], case: Case) -> str:
    reward = (ROOT / "tests/net/reward.py").read_text()
    parts = repr((machine, ALL, ITERATIONS, case, reward))
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def compare(base: str, only: list[str], cache: Path, scratch: Path) -> bool:
    """Print the result of each case; return whether all are equal."""
    commit = git("rev-parse", f"{base}^{{commit}}")
    pairs = cache / "pairs"
    if not (pairs / "pairs.csv").is_file():
        write_pairs(pairs)
    chosen = cases(pairs / "pairs.csv")
    unknown = set(only) - set(chosen)
    if unknown:
        raise SystemExit(f"unknown cases {sorted(unknown)}; use {sorted(chosen)}")
    chosen = {name: chosen[name] for name in only or chosen}
    files = {
        name: cache / commit / f"{digest(machine(), case)}.json" for name, case in chosen.items()
    }
    missing = {name: case for name, case in chosen.items() if not files[name].is_file()}
    tree = scratch / "base"
    git("worktree", "add", "--detach", str(tree), commit)
    try:
        before = Tree(tree, scratch / "of base", missing, parallel=1) if missing else None
        after = Tree(ROOT, scratch / "of working tree", chosen, parallel=1 if missing else 2)
        return all([print_case(name, files[name], before, after) for name in chosen])
    finally:
        git("worktree", "remove", "--force", str(tree))


def print_case(name: str, file: Path, before: Tree | None, after: Tree) -> bool:
    """Print whether the results of a case are equal. Keep the base's result in a file."""
    if file.is_file():
        base = json.loads(file.read_text())
    else:
        base = before.result(name)
        if "error" not in base:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(base))
    differs = difference(base, after.result(name))
    print(f"{name:20s} {differs or 'equal'}", flush=True)
    return not differs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.net", description=__doc__)
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases, default all")
    parser.add_argument("--cache", type=Path, help="keeps the base's results for later comparisons")
    given = parser.parse_args()
    with TemporaryDirectory() as scratch:
        cache = (given.cache or Path(scratch) / "cache").resolve()
        return 0 if compare(given.base, given.only, cache, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
