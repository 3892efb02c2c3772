"""Check whether a run could start on these nodes, without loading weights.

Usage: ``torchrun ... -m scripts.preflight --config FILE.yaml [--timeout 60] [flags of post_train.py]``. Each rank exits
with 0 if all are ready, else with 2; the first rank reports the reasons.
"""

import argparse

import torch

from hyvideo.config import processes
from hyvideo.config.command_line import parse
from hyvideo.config.identity import named_files
from hyvideo.config.memory.disk import check_room
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.rules import check
from hyvideo.data.outside import exit_on_error
from hyvideo.distributed import mesh as ranks
from hyvideo.evaluation.reward_hacking.rule import check_output_dir
from hyvideo.models.sizes import read_architecture


@exit_on_error("preflight")
def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--timeout", type=float, default=60.0)
    options, flags = parser.parse_known_args()
    config = parse(flags).config

    from hyvideo.distributed.preflight import preflight
    from hyvideo.distributed.rank_agreement import name_ranks
    from hyvideo.training.model_setup import choose_device  # slow to import

    mesh = ranks.Mesh(processes.rank(), processes.world_size(), config.distributed.sp_size)
    device, problem = torch.device("cpu"), ""
    try:  # collected and reported for all ranks: a rank that exits here would only appear as missing
        check(config, mesh.world_size)
        check_output_dir(config.record)
        if mesh.is_main:
            architecture = read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
            check_room(PlannedRun(config, mesh.world_size, architecture))
        device = choose_device(config.model.device, processes.local_rank())
    except ValueError as error:
        problem = str(error)
    settings = config.flat()
    preflight(settings, named_files(settings), mesh, device, timeout_s=options.timeout, problem=problem)
    if mesh.is_main:
        print(f"preflight: ready, {name_ranks(range(mesh.world_size))}", flush=True)
    ranks.stop()


if __name__ == "__main__":
    main()
