"""Memory, cost and legality of a run before anybody waits for a GPU: ``python -m scripts.plan --config FILE.yaml``.

    python -m scripts.plan --config configs/hunyuanvideo15_480p_8gpu.yaml --world_size 8 --sp_size 4

Takes every flag of post_train.py beside its own. Reads settings, and a transformer's config.json where there is one;
no weights. Ends with 0 when there is a plan, whatever it says, and with 2 when it was called wrongly.
"""

import argparse
import math
import sys
from pathlib import Path

# So that the file can be run by its path, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hyvideo.config.command_line import parse
from hyvideo.config.memory.model_sizes import read_architecture
from hyvideo.config.memory.report import report
from hyvideo.config.memory.run_shape import RunShape
from hyvideo.config.memory.tables import markdown
from hyvideo.config.rules import check_ranges


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Every flag of post_train.py is taken too; python post_train.py --help lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--world_size", type=int, default=8, help="number of GPUs; 8")
    parser.add_argument("--gpu_memory", type=float, default=80.0, help="GiB of one GPU; 80")
    parser.add_argument("--rate", type=float, default=400.0, help="TFLOP/s that one GPU reaches; 400")
    parser.add_argument("--text_tokens", type=int, default=300, help="tokens of the longest prompt; 300")
    parser.add_argument("--table", action="store_true", help="Markdown of memory over numbers of GPUs, and stop")
    own, settings = parser.parse_known_args()
    for name in ("world_size", "gpu_memory", "rate", "text_tokens"):
        value = vars(own)[name]
        if not (value > 0 and math.isfinite(value)):
            parser.error(f"--{name} must be a positive number, got {value}")
    config = parse(settings).config
    try:
        check_ranges(config.flat())
        architecture = read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
        shape = RunShape.of(config, own.world_size, text_tokens=own.text_tokens)
        architecture.latent_size(shape.frames, shape.height, shape.width)
    except ValueError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    if own.table:
        print(markdown(shape, architecture, " ".join(["python -m scripts.plan", *sys.argv[1:]])))
    else:
        print(report(config, shape, architecture, gpu_memory=own.gpu_memory, rate=own.rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
