"""Check that the project computes correctly on a GPU, and measure its speed.

Results are tables that can be shared.

    python -m scripts.gpu_check eager       kernels, the CPU's numbers, log-ratio, decoding, copies of weights
    python -m scripts.gpu_check compiled    compilation, log-ratio, forward and training passes, fp8
    python -m scripts.gpu_check pilots      post_train.py --pilot of two recipes with 24 GB, random weights
    python -m scripts.gpu_check layouts     FSDP, offloading, step cache, super-resolution, VideoAlign, resume
    python -m scripts.gpu_check all --tiny --device cpu     all of it, with tiny models, on any machine
    python -m scripts.gpu_check weights --pretrained_model_root ckpts --transformer_version 480p_i2v
                                            the released weights: samples against diffusers'

Each part takes at most 9.5 minutes and needs no weights and no network. `compiled` creates the
kernels that later parts use, in --work_dir. Each check runs tests of tests/cuda in a separate
process with a time limit and the allocator settings of a run. gpu.json and gpu.md in --output_dir
are written whenever a check has measured something; gpu.log is the output of all checks. gpu.md
begins with measured beside expected numbers. The exit code is 1 if a check failed.
docs/gpu_check.md explains the results.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import yaml

from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.data.files import ROOT, make_folder
from hyvideo.settings.processes import use_expandable_segments
from tests import forked
from tests.isolated_checks import Check, Number, run_checks, summary

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PARTS = {
    part: {name: Check(**row) for name, row in rows.items()}
    for part, rows in _TABLE["parts"].items()
}
WEIGHTS = {name: Check(**row) for name, row in _TABLE["weights"].items()}
NUMBERS = [Number(**row) for row in _TABLE["numbers"]]
WITHOUT_AV = ROOT / "tests/cuda/without_av"


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "parts",
        nargs="+",
        choices=[*PARTS, "all", "weights"],
        help="one or more parts, or all four",
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
    parser.add_argument(
        "--work_dir", default="outputs/gpu_check_work", help="folder of compiled kernels and rows"
    )
    parser.add_argument(
        "--no_precision_casts",
        action="store_true",
        help="compile without rounding to bf16 between fused operations, if the compiler of this "
        "torch fails on it",
    )
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
    work = Path(options.work_dir)
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
            from hyvideo.training.model_setup import choose_device

            choose_device("cuda")
    # a used GPU cannot be forked
    python = forked.python() if options.device == "cpu" else sys.executable
    use_expandable_segments()
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
    return 0 if all_passed else 1


def _variables(options: argparse.Namespace, python: str, work: Path) -> dict[str, str]:
    """Return the environment variables that tell the tests of all checks what to check."""
    variables = {
        "CHECK_DEVICE": options.device,
        "CHECK_VERSION": options.transformer_version,
        "CHECK_PYTHON": python,
        "TORCHINDUCTOR_CACHE_DIR": str((work / "compiled").resolve()),
    }
    if options.tiny:
        variables["CHECK_TINY"] = "1"
    if options.pretrained_model_root:
        variables["CHECK_MODEL_PATH"] = options.pretrained_model_root
    if options.no_precision_casts:
        variables["COMPILE_PRECISION_CASTS"] = "false"
    if importlib.util.find_spec("av") is None:
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), str(WITHOUT_AV)])
        )
    return variables


def _environment(check: Check, variables: dict[str, str]) -> dict[str, str]:
    environment = {**check.environment, **variables}
    if check.configs:
        environment["CHECK_CONFIGS"] = " ".join(check.configs)
    return environment


if __name__ == "__main__":
    sys.exit(main())
