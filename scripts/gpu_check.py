"""Check that the project computes correctly on a GPU, and measure its speed.

Results are tables that can be shared.

    python -m scripts.gpu_check quick       correct and speed, 10 minutes in all
    python -m scripts.gpu_check correct     equal likelihoods, five pilots, FSDP, resume, the CPU's numbers
    python -m scripts.gpu_check speed       forward and training passes, attention, decoding, copies
    python -m scripts.gpu_check more        generation, HPSv3, each miniature, the slowest kernels
    python -m scripts.gpu_check all         quick and more
    python -m scripts.gpu_check quick --tiny --device cpu   rehearses it with tiny models, on any machine
    python -m scripts.gpu_check weights --pretrained_model_root ckpts --transformer_version 480p_i2v
                                            the released weights: samples against diffusers'

Each part takes at most five minutes on a GPU with 140 GB, without weights and network. A part has lanes. A lane is a
process with a time limit that runs tests of tests/cuda with the allocator settings of a run. Lanes run side by side if
the memory of the GPU suffices, and alone if they measure. A smaller GPU takes longer, and its limits are longer.
gpu.json and gpu.md in --output_dir are written whenever a test has measured something, also if a time limit or SIGTERM
ends the check, and gpu.log has the output of the lanes. hardware.yaml has the measured rates for the plan of a run
(GPU_HARDWARE_FILE). gpu.md begins with measured beside expected numbers. The exit code is 1 if a lane failed, but not
because of a speed or of a memory outside of the expected range.
docs/cost.md#check-a-gpu explains the results.
"""

import argparse
import json
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from hyvideo.checks.machine_rules import is_installed
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import make_folder, publish
from hyvideo.planning.hardware import hardware_of, hardware_of_device
from hyvideo.settings.processes import configure_allocator, num_cores
from tests import forked
from tests.cuda.lanes import Lane, run_lanes
from tests.cuda.results import Number, summary

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PARTS = {
    part: {name: Lane(**row) for name, row in lanes.items()}
    for part, lanes in _TABLE["parts"].items()
}
NUMBERS = [Number(**row) for row in _TABLE["numbers"]]
SEVERAL = {"quick": ["correct", "speed"], "all": ["correct", "speed", "more"]}
HARDWARE = "hardware.yaml"
# Of the FLOPs of a forward pass with 18,318 tokens, the size of the shipped recipes.
_ATTENTION_SHARE = 0.6
_SLOW_CPU = 10.0  # of a rehearsal beside other programs


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "parts", nargs="+", choices=[*SEVERAL, *PARTS], help="what to check; one or more"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device to check")
    parser.add_argument(
        "--tiny", action="store_true", help="use tiny models; always with --device cpu"
    )
    parser.add_argument("--only", nargs="+", help="run only these lanes")
    parser.add_argument("--pretrained_model_root", help="folder of the checkpoints (weights only)")
    parser.add_argument(
        "--transformer_version", default="480p_t2v", help="version to check (weights only)"
    )
    parser.add_argument("--output_dir", default="outputs/gpu_check", help="folder of the results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    out = Path(options.output_dir)
    with exit_on_error("gpu_check.py"):
        if not is_installed("pytest"):
            raise ValueError(
                "gpu_check runs tests and needs pytest, which is not installed; run `pip install "
                "-r requirements-dev.txt`"
            )
        lanes = chosen_lanes(options)
        make_folder(out)
        room, slowness = gpu_of(options.device)
    # a used GPU cannot be forked
    python = forked.python() if options.device == "cpu" else sys.executable
    configure_allocator()
    numbers = [] if options.tiny or options.device == "cpu" else NUMBERS
    try:
        with tempfile.TemporaryDirectory(prefix="gpu_check-") as work:
            run_lanes(
                lanes,
                out,
                Path(work),
                room=room,
                slowness=slowness,
                title=f"gpu_check {' '.join(options.parts)}{' --tiny' * options.tiny} on {options.device}",
                numbers=numbers,
                python=python,
                environment=variables(options, python),
                on_row=lambda lane, row: print(f"{lane}: {row}", flush=True),
            )
    finally:  # also after a signal
        results = json.loads((out / "gpu.json").read_text())
        for result in results:
            end = result["reason"] or "passed"
            print(f"lane {result['lane']}: {end}, {result['seconds']:.0f} s")
        print("\n".join(summary(results, numbers)))
        write_hardware(results, out / HARDWARE)
    return 0 if all(result["ok"] for result in results) else 1


def _stop(number: int, _: object) -> None:
    """End the lanes, which have process groups of their own, with this program."""
    sys.exit(128 + number)


def chosen_lanes(options: argparse.Namespace) -> dict[str, Lane]:
    """Return the lanes of the parts. Raises ValueError for lanes and folders that do not exist."""
    parts = [name for part in options.parts for name in SEVERAL.get(part, [part])]
    lanes = {name: lane for part in parts for name, lane in PARTS[part].items()}
    unknown = sorted(set(options.only or ()) - set(lanes))
    if unknown:
        raise ValueError(
            f"--only must name lanes among {', '.join(lanes)}, got {', '.join(unknown)}"
        )
    if "weights" in parts and not (options.pretrained_model_root or options.tiny):
        raise ValueError("weights needs --pretrained_model_root, the folder of the checkpoints")
    return {name: lane for name, lane in lanes.items() if name in (options.only or lanes)}


def gpu_of(device: str) -> tuple[float, float]:
    """Return the memory of the GPU in GiB, which the lanes share, and by how much it is slower than
    an H200, for their time limits. On a CPU, tiny models always fit, and may take their time.

    Raises ValueError if there is no GPU.
    """
    if device == "cpu":
        return math.inf, _SLOW_CPU
    import torch

    from hyvideo.loading.gpu_driver import driver_problem

    if problem := driver_problem():
        raise ValueError(problem)
    if not torch.cuda.is_available():
        raise ValueError(
            "--device cuda needs a GPU that torch can use, and none was found; "
            "--tiny --device cpu rehearses the check"
        )
    found = torch.cuda.get_device_properties(0)
    gib = found.total_memory / 2**30
    expected = hardware_of("H200").rate
    rate = hardware_of_device(found.name, gib).rate or expected  # of an unknown GPU
    return gib, max(1.0, expected / rate)


def variables(options: argparse.Namespace, python: str) -> dict[str, str]:
    """Return the environment variables that tell the tests of all lanes what to check."""
    found = {
        "CHECK_DEVICE": options.device,
        "CHECK_VERSION": options.transformer_version,
        "CHECK_PYTHON": python,
    }
    if options.tiny:
        found["CHECK_TINY"] = "1"
    if options.pretrained_model_root:
        found["CHECK_MODEL_PATH"] = options.pretrained_model_root
    # Lanes that run side by side share the cores.
    threads = str(max(1, num_cores() // 4))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        found[name] = os.environ.get(name, threads)
    return found


def write_hardware(results: Sequence[dict], file: Path) -> None:
    """Write the measured rates of a GPU as a row of hyvideo/planning/hardware.yaml, if they are
    known.

    The rate is that of a forward pass of the recipes: products and attention by their shares of the
    FLOPs.
    """
    rows = {row["what"]: row for result in results for row in result["rows"]}
    machine = rows.get("test_speed.py::test_machine", {})
    products = [value for name, value in machine.items() if name.startswith("TFLOP/s of")]
    attention = [
        row.get("TFLOP/s", 0.0)
        for name, row in rows.items()
        if re.fullmatch(r"test_attention.py::test_speed\[.*-16x18318\]", name)
    ]
    if "device" not in machine or not products or not any(attention):
        return
    share = _ATTENTION_SHARE
    rate = 1 / ((1 - share) / max(products) + share / max(attention))
    known = hardware_of_device(machine["device"], machine["GiB"])
    row = {
        "device": re.escape(machine["device"]),
        "peak": known.peak,
        "rate": round(rate, 1),
        "bandwidth": round(machine["TB/s of copies"], 2),
        "gpu_memory": round(machine["GiB"], 1),
        "link": known.link,
        "host_link": round(machine["GB/s from pinned memory"], 1),
    }
    with publish(file) as path:
        path.write_text(yaml.safe_dump({"gpus": {known.name or machine["device"]: row}}))
    print(f"measured rates: {file}; GPU_HARDWARE_FILE={file} lets the plan of a run use them")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
