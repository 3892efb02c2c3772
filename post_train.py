"""Post-trains HunyuanVideo-1.5, or the miniature, by SAGE-GRPO: ``post_train.py --config FILE.yaml [flags]``.

Run it with torchrun for several processes. ``--print_config`` shows the settings and the arithmetic of the run.
"""

import sys

import yaml

from hyvideo.config import Config, parse
from hyvideo.distributed import mesh as ranks
from hyvideo.idle_settings import idle_settings
from hyvideo.plain_text import brief
from hyvideo.plan import check, describe, make_plan
from hyvideo.summary import print_idle, print_start, print_summary


def main() -> int:
    command = parse()
    config = command.config
    try:
        check(config, ranks.world_size())
        if command.print_config:
            print(yaml.safe_dump(config.flat(), sort_keys=False))
            plan = make_plan(config, ranks.world_size())
            print(describe(config, plan))
            print_idle(idle_settings(config, plan, ranks.world_size()))
            return 0
        trainer = build(config)
    except ValueError as error:  # of the user; what goes wrong later keeps its traceback
        print(f"post_train.py: {brief(str(error))}", file=sys.stderr)
        return 2
    if trainer.mesh.is_main:
        print_start(trainer)
    trainer.train()
    if trainer.mesh.is_main:
        print_summary(trainer)
    ranks.stop()
    return 0


def build(config: Config):
    """Joins the other processes and loads the models. Imports what is heavy only now."""
    import torch

    from hyvideo.components import choose_device
    from hyvideo.distributed.preflight import preflight
    from hyvideo.trainer import Trainer

    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
    device = choose_device(config.model.device, ranks.local_rank())
    settings = config.distributed
    if ranks.world_size() > 1:  # before a rank that hangs would let the others wait
        preflight(config, ranks.Mesh(ranks.rank(), ranks.world_size(), settings.sp_size), device)
    mesh = ranks.start(
        settings.sp_size, device, dp_replicate=settings.dp_replicate, timeout=settings.collective_timeout
    )
    return Trainer(config, mesh, device)


if __name__ == "__main__":
    sys.exit(main())
