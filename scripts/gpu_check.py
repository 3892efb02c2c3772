"""Check that the project computes correctly on a GPU, and measure its speed. Results are tables that can be shared.

    python -m scripts.gpu_check right                            27 minutes: kernels, tests, ratios, runs, resume
    python -m scripts.gpu_check fast                             26 minutes: the 8.3 B model at 480 x 864 x 81
    python -m scripts.gpu_check right fast --tiny --device cpu   all of it, with tiny models, on any machine
    python -m scripts.gpu_check weights --pretrained_model_root ckpts --transformer_version 480p_i2v
                                                                 the released weights: samples against diffusers'

`right` and `fast` need no weights and no network. Each check runs tests of tests/cuda in a separate process with a time
limit. All checks share the kernels that the check `compile` creates in --output_dir. Writes gpu.json and gpu.md there
after every check, and each check's log and results after every test. The exit code is 1 if a check failed.
docs/performance.md has the expected results.
"""

import sys
from pathlib import Path

import yaml

from hyvideo.data.outside import Parser, exit_on_error, make_folder
from tests import forked
from tests.isolated_checks import Check, run_checks

CALLS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CHECKS = {call: {name: Check(**row) for name, row in rows["checks"].items()} for call, rows in CALLS.items()}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("call", nargs="+", choices=CHECKS, help="one or more of right, fast and weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device to check")
    parser.add_argument("--tiny", action="store_true", help="use tiny models; always with --device cpu")
    parser.add_argument("--only", nargs="+", help="run only these checks")
    parser.add_argument("--pretrained_model_root", help="folder of the checkpoints (weights only)")
    parser.add_argument("--transformer_version", default="480p_t2v", help="version to check (weights only)")
    parser.add_argument("--output_dir", default="outputs/gpu_check", help="output folder")
    options = parser.parse_args(argv)
    checks = {name: check for call in options.call for name, check in CHECKS[call].items()}
    with exit_on_error("gpu_check.py"):
        make_folder(Path(options.output_dir))
        if unknown := sorted(set(options.only or ()) - set(checks)):
            raise ValueError(f"--only must name checks among {', '.join(checks)}, got {', '.join(unknown)}")
        if "weights" in options.call and not (options.pretrained_model_root or options.tiny):
            raise ValueError("weights needs --pretrained_model_root, the folder of the checkpoints")
        if options.device == "cuda":
            from hyvideo.training.model_setup import choose_device

            choose_device("cuda")
    variables = {"CHECK_DEVICE": options.device, "CHECK_VERSION": options.transformer_version}
    variables |= {"CHECK_TINY": "1"} if options.tiny else {}
    variables |= {"CHECK_MODEL_PATH": options.pretrained_model_root} if options.pretrained_model_root else {}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(Path(options.output_dir, "compiled").resolve())}
    all_passed = run_checks(
        {
            name: check._replace(environment=check.environment | variables)
            for name, check in checks.items()
            if name in (options.only or checks)
        },
        Path(options.output_dir),
        seconds=sum(CALLS[call]["seconds"] for call in options.call),
        title=f"gpu_check {' '.join(options.call)}{' --tiny' * options.tiny} on {options.device}",
        python=forked.python() if options.device == "cpu" else sys.executable,  # a used GPU cannot be forked
        on_row=lambda check, row: print(f"{check}: {row}", flush=True),
    )
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
