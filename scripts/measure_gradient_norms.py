"""Measure the policy's gradient norm at each denoising step and compare it with theory: Figure 4 of the paper.

    python -m scripts.measure_gradient_norms --config configs/miniature.yaml --output_path outputs/gradients.json
    python -m scripts.measure_gradient_norms --config configs/miniature.yaml --output_path cps.json --sde_type cps
    torchrun --nproc_per_node=8 -m scripts.measure_gradient_norms --config configs/hunyuanvideo15_480p_8gpu.yaml \\
        --output_path outputs/gradients.json --rollouts 16

Also accepts the flags of post_train.py; --resume_from_checkpoint measures a checkpoint instead of the base model. Does
not train. Writes only the JSON, and encoded prompts with --conditions_dir; hyvideo/evaluation/figures/gradient_norms.py
describes the measurement and the fields. The exit code is 2 for a usage error.
"""

import shutil
from contextlib import ExitStack
from pathlib import Path

from hyvideo.config import processes
from hyvideo.config.command_line import parse
from hyvideo.config.rules import check
from hyvideo.config.settings import Config
from hyvideo.data.outside import Parser, exit_on_error
from hyvideo.distributed import mesh as ranks
from post_train import build


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output_path", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rollouts", type=int, default=8, help="number of rollouts, over all processes")
    options, flags = parser.parse_known_args(argv)
    command = parse(flags)
    if command.print_config:
        parser.error("--print_config is a flag of post_train.py only")
    folder = options.output_path.with_name(
        f".{options.output_path.name}.run"
    )  # same for all ranks: they may share conditions
    try:
        with exit_on_error("measure_gradient_norms.py"):
            measure(command.config, options.output_path, folder, options.rollouts)
    finally:
        if processes.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    ranks.stop()


def measure(config: Config, out: Path, folder: Path, rollouts: int) -> None:
    """Write the measurement to ``out``. Raises ValueError for settings that cannot be measured."""
    from hyvideo.evaluation.figures.gradient_norms import measurement, norms_per_visit, summarise, table
    from hyvideo.records.run_files import write_json

    if not out.parent.is_dir():
        raise ValueError(f"the folder of --output_path must exist, got {str(out)!r}")
    replicas = max(1, processes.world_size() // config.distributed.sp_size)
    config = measurement(config, rollouts=rollouts, replicas=replicas, folder=folder)
    check(config, processes.world_size())
    with ExitStack() as at_end:
        trainer = build(config, at_end)
        trainer.bar.total = trainer.iteration + 1
        norms = norms_per_visit(trainer.update, scored_rollouts(trainer))
    if trainer.mesh.is_main:
        result = summarise(config.flat(), trainer.pipeline.scheduler, trainer.update.step_weights, norms)
        write_json(out, result | {"rollouts": rollouts})
        print(table(result))
        print(f"written to {out}")


def scored_rollouts(trainer):
    """Return the next iteration's rollouts with advantages."""
    from hyvideo.records.stage_timer import StageTimer

    trainer.iteration += 1
    rollouts, pending = trainer.collector.collect(trainer.iteration, StageTimer(trainer.device, trainer.progress.enter))
    rewards = trainer.rewards.wait(pending)
    advantages, metrics = trainer.rewards.advantages(rollouts.indices, rewards)
    trainer.rewards.check_failed_rewards(metrics, rewards, trainer.iteration)
    trainer.update.refresh_step_weights()
    return rollouts.with_rewards(rewards, advantages.to(trainer.device))


if __name__ == "__main__":
    main()
