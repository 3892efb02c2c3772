"""Half an hour with a GPU: whether the project is right on it, and how fast; every number in a table that can be sent.

    python -m scripts.gpu_check right                       8 minutes: kernels, tests, ratios of 1, waits, runs, resume
    python -m scripts.gpu_check fast                        9 minutes: forward, training, LoRA, decode at 480 x 864 x 81
    python -m scripts.gpu_check right --tiny --device cpu   all of it, small, on any machine

Needs no weights and no network. Each check is a process of its own with a time limit; --out has gpu.json, gpu.md and
a log of each check, written after every row. Ends with 1 if a check failed. docs/performance.md has what is expected.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hyvideo.data.outside import Parser, make_folder, refusals
from hyvideo.evaluation.isolated_checks import Check, Row, run_checks

SECONDS = {"right": 480, "fast": 540}
TINY_MODEL = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "rope_axes_dim": (4, 6, 6)}
TINY_MODEL |= {"num_refiner_layers": 1, "text_embed_dim": 64, "image_embed_dim": 24}
TINY_MODEL |= {"in_channels": 9, "out_channels": 4}
TINY_VAE = {"block_out_channels": (16,) * 5, "latent_channels": 4, "layers_per_block": 1}


def tests(device: str, file: str, keyword: str = "") -> Iterator[Row]:
    """Tests that are marked cuda, each a row with the properties that it records."""
    import pytest

    reports = []

    class Reports:
        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                reports.append(report)
                print(report.nodeid, report.outcome, report.user_properties, flush=True)  # should time run out

    os.environ["CHECK_DEVICE"] = device
    code = pytest.main(
        ["-q", "-m", "cuda", "-p", "no:cacheprovider", "-k", keyword, f"tests/cuda/{file}"], plugins=[Reports()]
    )
    for report in reports:
        why = {} if report.passed else {"why": str(report.longrepr).splitlines()[-1]}
        what = {"what": report.nodeid.split("::")[-1], "ok": report.passed}
        yield what | dict(report.user_properties) | {"seconds": report.duration} | why
    yield {"what": f"pytest ended with {int(code)}", "ok": code == 0}


def checks_of(call: str, device: str, tiny: bool) -> dict[str, Check]:
    """The checks of a call, in their order."""
    import torch
    import torch._dynamo  # what is imported here is there where processes are forked

    from hyvideo.evaluation import gpu_checks as on
    from hyvideo.evaluation.speed import Workload

    where = torch.device(device)
    full = Workload(where)
    size, vae, tile, decoded = (81, 480, 864), {}, 256, Workload(where, torch.float16)
    if tiny:
        torch.set_num_threads(1)
        full = Workload(where, sizes=TINY_MODEL, grid=(2, 4, 4), text_tokens=8)
        size, vae, tile, decoded = (5, 64, 64), TINY_VAE, 32, Workload(where, torch.float32, TINY_MODEL, (2, 4, 4))
    if call == "fast":
        return {
            "machine": Check(partial(on.machine, full), 60),
            "forward": Check(partial(on.forwards, full), 170),
            "training": Check(partial(on.training, full), 200),
            "lora": Check(partial(on.lora, full, size), 120),
            "decode": Check(partial(on.decode, decoded, vae, tile), 60),
            "profile": Check(partial(on.profile, full), 100),
        }
    return {
        "machine": Check(partial(on.machine, full), 60),
        "attention": Check(partial(on.attention, full), 60),
        "tests": Check(partial(tests, device, "test_on_gpu.py"), 120),
        "on_policy_eager": Check(partial(tests, device, "test_ratios.py", "not compiled"), 120),
        "on_policy_compiled": Check(partial(tests, device, "test_ratios.py", "compiled"), 180),
        "runs": Check(partial(tests, device, "test_runs.py"), 200),
    }


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("call", nargs="+", choices=SECONDS, help="right, fast, or both")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--only", nargs="+", help="names of checks to run; all by default")
    parser.add_argument("--out", default="outputs/gpu_check", help="folder for gpu.json, gpu.md and logs")
    options = parser.parse_args(argv)
    with refusals("gpu_check.py"):
        make_folder(Path(options.out))
        checks = {}
        for call in options.call:
            checks |= checks_of(call, options.device, options.tiny)
        if unknown := sorted(set(options.only or ()) - set(checks)):
            raise ValueError(f"--only must name checks of {', '.join(checks)}, got {', '.join(unknown)}")
        if options.device == "cuda":
            from hyvideo.training.model_setup import choose_device

            choose_device("cuda")
    checks = {name: check for name, check in checks.items() if name in (options.only or checks)}
    good = run_checks(
        checks,
        Path(options.out),
        seconds=sum(SECONDS[call] for call in options.call),
        fork=options.device == "cpu",
        title=f"gpu_check {' '.join(options.call)}{' --tiny' * options.tiny} on {options.device}",
        on_row=lambda check, row: print(f"{check}: {row}", flush=True),
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
