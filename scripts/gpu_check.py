"""Check that the project computes correctly on a GPU, and measure its speed.

Results are tables that can be shared.

    python -m scripts.gpu_check eager       kernels, log-ratio, decoding, compilation
    python -m scripts.gpu_check pilots      post_train.py --pilot of two recipes with 24 GB, random weights
    python -m scripts.gpu_check compiled    log-ratio, forward and training passes, fp8, gradient of the decoding
    python -m scripts.gpu_check layouts     the CPU's numbers, FSDP, resume
    python -m scripts.gpu_check more        copies of weights, offloading, step cache, VideoAlign, HPSv3, each miniature
    python -m scripts.gpu_check all --tiny --device cpu     all of it, with tiny models, on any machine
    python -m scripts.gpu_check weights --pretrained_model_root ckpts --transformer_version 480p_i2v
                                            the released weights: samples against diffusers'

Each part takes at most 9.5 minutes, the first four 28 minutes, without weights and network. `eager`
creates the kernels that later parts use, in a folder beside --output_dir; kernels.tar.xz in
--output_dir has them for a machine that starts empty (--kernels). hardware.yaml there has the
measured rates for the plan of a run (GPU_HARDWARE_FILE). Each check runs tests of tests/cuda in a separate
process with a time limit and the allocator settings of a run. gpu.json and gpu.md in --output_dir
are written whenever a check has measured something; gpu.log is the output of all checks. gpu.md
begins with measured beside expected numbers. The exit code is 1 if a check failed, but not because
of a speed or of a memory outside of the expected range.
docs/cost.md#check-a-gpu explains the results.
"""

import argparse
import json
import re
import sys
import tarfile
from pathlib import Path

import yaml

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import make_folder, publish
from hyvideo.planning.hardware import hardware_of_device
from hyvideo.settings.processes import configure_allocator
from tests import forked
from tests.isolated_checks import Check, Number, run_checks, summary

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PARTS = {
    part: {name: Check(**row) for name, row in rows.items()}
    for part, rows in _TABLE["parts"].items()
}
WEIGHTS = {name: Check(**row) for name, row in _TABLE["weights"].items()}
NUMBERS = [Number(**row) for row in _TABLE["numbers"]]
COMPILED = "compiled"  # in the working folder
KERNELS = "kernels.tar.xz"
HARDWARE = "hardware.yaml"
# Of the FLOPs of a forward pass with 18,318 tokens, the size of the shipped recipes.
_ATTENTION_SHARE = 0.6


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "parts",
        nargs="+",
        choices=[*PARTS, "all", "weights"],
        help="one or more parts, or all five",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device to check")
    parser.add_argument(
        "--tiny", action="store_true", help="use tiny models; always with --device cpu"
    )
    parser.add_argument("--only", nargs="+", help="run only these checks")
    parser.add_argument("--pretrained_model_root", help="folder of the checkpoints (weights only)")
    parser.add_argument(
        "--transformer_version", default="480p_t2v", help="version to check (weights only)"
    )
    parser.add_argument("--output_dir", default="outputs/gpu_check", help="folder of the results")
    parser.add_argument("--kernels", help=f"{KERNELS} of an earlier part")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    parts = [part for part in options.parts if part != "weights"]
    if "all" in parts:
        parts = list(PARTS)
    checks = {name: check for part in parts for name, check in PARTS[part].items()}
    if "weights" in options.parts:
        checks |= WEIGHTS
    out = Path(options.output_dir)
    work = out.with_name(f"{out.name}_work")  # of compiled kernels and rows
    with exit_on_error("gpu_check.py"):
        make_folder(out)
        make_folder(work)
        unknown = sorted(set(options.only or ()) - set(checks))
        if unknown:
            raise ValueError(
                f"--only must name checks among {', '.join(checks)}, got {', '.join(unknown)}"
            )
        if "weights" in options.parts and not (options.pretrained_model_root or options.tiny):
            raise ValueError("weights needs --pretrained_model_root, the folder of the checkpoints")
        if options.device == "cuda":
            from hyvideo.loading.model_setup import choose_device

            choose_device("cuda")
        if options.kernels:
            unpack_kernels(Path(options.kernels), work)
    # a used GPU cannot be forked
    python = forked.python() if options.device == "cpu" else sys.executable
    configure_allocator()
    variables = _variables(options, python, work)
    chosen = {
        name: check._replace(environment=_environment(check, variables))
        for name, check in checks.items()
        if not options.only or name in options.only
    }
    numbers = [] if options.tiny or options.device == "cpu" else NUMBERS
    all_passed = run_checks(
        chosen,
        out,
        work,
        seconds=sum(check.seconds for check in chosen.values()),
        title=f"gpu_check {' '.join(options.parts)}{' --tiny' * options.tiny} on {options.device}",
        numbers=numbers,
        python=python,
        on_row=lambda check, row: print(f"{check}: {row}", flush=True),
    )
    print(summary(out, numbers))
    pack_kernels(work, out / KERNELS)
    write_hardware(json.loads((out / "gpu.json").read_text()), out / HARDWARE)
    return 0 if all_passed else 1


def _variables(options: argparse.Namespace, python: str, work: Path) -> dict[str, str]:
    """Return the environment variables that tell the tests of all checks what to check."""
    variables = {
        "CHECK_DEVICE": options.device,
        "CHECK_VERSION": options.transformer_version,
        "CHECK_PYTHON": python,
        "TORCHINDUCTOR_CACHE_DIR": str((work / COMPILED).resolve()),
    }
    if options.tiny:
        variables["CHECK_TINY"] = "1"
    if options.pretrained_model_root:
        variables["CHECK_MODEL_PATH"] = options.pretrained_model_root
    return variables


def pack_kernels(work: Path, file: Path) -> None:
    """Write the compiled kernels of the working folder to an archive, if there are any."""
    if (work / COMPILED).is_dir():
        with publish(file) as path, tarfile.open(path, "w:xz") as archive:
            archive.add(work / COMPILED, COMPILED)


def unpack_kernels(file: Path, work: Path) -> None:
    """Add the kernels of an archive to the working folder. Raises ValueError if it is unreadable."""
    try:
        with tarfile.open(file) as archive:
            archive.extractall(work, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ValueError(
            f"--kernels must be a {KERNELS} of an earlier part, got {file}: {error}"
        ) from error


def write_hardware(results: list[dict], file: Path) -> None:
    """Write the measured rates of a GPU as a row of hyvideo/planning/hardware.yaml, if they are
    known.

    The rate is that of a forward pass of the recipes: products and attention by their shares of the
    FLOPs.
    """
    rows = {row["what"]: row for result in results for row in result["rows"]}
    machine = rows.get("test_machine", {})
    products = [value for name, value in machine.items() if name.startswith("TFLOP/s of")]
    attention = [
        row.get("TFLOP/s", 0.0)
        for name, row in rows.items()
        if re.fullmatch(r"test_speed\[.*-18318\]", name)
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
    }
    with publish(file) as path:
        path.write_text(yaml.safe_dump({"gpus": {known.name or machine["device"]: row}}))
    print(f"measured rates: {file}; GPU_HARDWARE_FILE={file} lets the plan of a run use them")


def _environment(check: Check, variables: dict[str, str]) -> dict[str, str]:
    environment = {**check.environment, **variables}
    if check.configs:
        environment["CHECK_CONFIGS"] = " ".join(check.configs)
    return environment


if __name__ == "__main__":
    sys.exit(main())
