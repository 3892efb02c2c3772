"""Predict memory, cost and legal layouts of a run without a GPU: ``python -m scripts.plan --config FILE.yaml``.

    python -m scripts.plan --config configs/hunyuanvideo15_480p_8gpu.yaml --world_size 8 --sp_size 4

Also accepts every flag of post_train.py. Reads the settings and, if present, the transformer's config.json; no weights.
The exit code is 0 for any plan, even of a run that does not fit, and 2 for a usage error.
"""

import dataclasses
import math

from hyvideo.config.command_line import parse
from hyvideo.config.memory.hardware import Hardware
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.memory.report import memory_table, report
from hyvideo.config.rules import check_ranges
from hyvideo.data.outside import Parser, exit_on_error
from hyvideo.models.sizes import read_architecture


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__, prog="plan.py")
    parser.add_argument("--world_size", type=int, default=8, help="number of GPUs (8)")
    assumed = {field.name: field for field in dataclasses.fields(Hardware)}
    for name, field in assumed.items():
        words = f"{field.metadata['help']} ({field.default:g})"
        parser.add_argument(f"--{name}", type=field.type, default=field.default, help=words)
    parser.add_argument("--text_tokens", type=int, default=300, help="tokens of the longest prompt (300)")
    parser.add_argument("--table", action="store_true", help="print only the memory by number of GPUs and sp_size")
    options, settings = parser.parse_known_args(argv)
    for name in ("world_size", "text_tokens", *assumed):
        value = vars(options)[name]
        if not (value > 0 and math.isfinite(value)):
            parser.error(f"--{name} must be a positive number, got {value}")
    config = parse(settings).config
    with exit_on_error("plan.py"):
        check_ranges(config.flat())
        architecture = read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
        hardware = Hardware(**{name: vars(options)[name] for name in assumed})
        run = PlannedRun(config, options.world_size, architecture, options.text_tokens, hardware)
        for size in (config.rollout_size, config.validation_size):
            architecture.latent_size(*size)
        print(memory_table(run) if options.table else report(run))


if __name__ == "__main__":
    main()
