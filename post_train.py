"""Post-trains HunyuanVideo-1.5, or the miniature, by SAGE-GRPO: ``post_train.py --config FILE.yaml [flags]``.

Run it with torchrun for several processes. ``--print_config`` shows the settings and the arithmetic of the run.
"""

import sys

import yaml

from hyvideo.config import CommandLine, parse
from hyvideo.plan import check, describe, make_plan


def main() -> int:
    command = parse()
    try:
        return run(command)
    except ValueError as error:
        print(f"post_train.py: {error}", file=sys.stderr)
        return 2


def run(command: CommandLine) -> int:
    """Checks the settings, then loads and trains. Nothing is loaded before everything cheap has been checked."""
    config = command.config
    from hyvideo.distributed import mesh as ranks

    check(config, ranks.world_size())
    if command.print_config:
        print(yaml.safe_dump(config.flat(), sort_keys=False))
        print(describe(config, make_plan(config, ranks.world_size())))
        return 0

    import torch

    from hyvideo.components import choose_device
    from hyvideo.summary import print_start, print_summary
    from hyvideo.trainer import Trainer

    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
    device = choose_device(config.model.device, ranks.local_rank())
    mesh = ranks.start(config.distributed.sp_size, device)
    trainer = Trainer(config, mesh, device)
    if mesh.is_main:
        print_start(trainer)
    trainer.train()
    if mesh.is_main:
        print_summary(trainer)
    ranks.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
