"""Measure the policy's gradient norm at each denoising step and compare it with theory: Figure 4 of
the paper.

    python -m examples.gradient_norms --config configs/miniature.yaml --output_dir outputs/gradients
    torchrun --nproc_per_node=8 -m examples.gradient_norms --config configs/hunyuanvideo15_480p_8gpu.yaml \\
        --output_dir outputs/gradients

Accepts the flags of post_train.py and measures the rollouts of one iteration, without training: of
the base model, or of a checkpoint (--resume_from_checkpoint). Writes gradients.json to
--output_dir; examples.sampler_figures draws it.

For each stochastic step t, the loss is the mean over rollouts of the policy term of that step
alone; its gradient norm is taken over all trained parameters. The equalizer multiplies the term by
S_t: the weighted norm is measured, and dividing it by S_t gives the unweighted one. The theoretical
norm N_t, of the log-probability's gradient with respect to the velocity, omits the path from the
velocity to the parameters and a factor common to all steps.

gradients.json has the settings of the sampler, and `steps`, a list from noise to data:

    sigma, inverse_std      noise level before the step, and 1 / std of its noise
    theory, weight          N_t and S_t = median(N) / N_t
    norm, norm_weighted     unweighted and weighted norm
"""

import math
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from examples.sampler_figures import steps_of
from hyvideo.checks.rules import check
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import average_gradients, clip_gradients
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.yaml_files import read_yaml
from hyvideo.records.run_files import write_json
from hyvideo.settings import processes
from hyvideo.settings.command_line import parse
from hyvideo.settings.config import Config
from hyvideo.training.iteration import collect
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.rollout_batch import RolloutBatch, chunks
from post_train import build

USAGE = "python -m examples.gradient_norms --config FILE.yaml [flags of post_train.py]"


def main(argv: list[str] | None = None) -> None:
    _, flags = Parser(__doc__, usage=USAGE).parse_known_args(argv)
    config = measurement(parse(flags).config)
    with exit_on_error("gradient_norms.py"), ExitStack() as at_end:
        check(config, processes.world_size())
        trainer = build(config, at_end)
        if trainer.mesh.is_main:
            at_end.push(trainer.lease)  # release it at the end
        trainer.bar.total = trainer.iteration + 1
        rollouts = scored_rollouts(trainer)
        norms = norms_per_visit(trainer.run.update, rollouts)
        if trainer.mesh.is_main:
            result = summarise(config, trainer.run.objective.step_weights(rollouts.schedule), norms)
            path = trainer.output_dir / "gradients.json"
            write_json(path, result)
            spreads = [spread(result["steps"], name) for name in ("norm", "norm_weighted")]
            print(
                "largest / smallest norm of a step: {:.3g}, with the equalizer {:.3g}".format(
                    *spreads
                )
            )
            print(f"written to {path}")
    ranks.stop()


def measurement(config: Config) -> Config:
    """Return the settings of a run, changed so that all steps add noise and are visited in order,
    without a KL term.
    """
    changes = read_yaml(Path(__file__).with_suffix(".yaml"))
    return config.with_settings(eta=config.eta, **changes)  # the eta of the run's window


def scored_rollouts(trainer) -> RolloutBatch:
    """Return the next iteration's rollouts with advantages."""
    trainer.iteration += 1
    return collect(trainer.run, trainer.iteration).rollouts


def norms_per_visit(update: PolicyUpdate, rollouts: RolloutBatch) -> list[float]:
    """Return the weighted gradient norm of each step in visiting order.

    Called on every rank, with scored rollouts.
    """
    parameters = update.policy.parameters
    mesh = update.mesh
    batches = chunks(range(len(rollouts)), update.config.rows_per_pass)
    norms = []
    for column in range(rollouts.trained_steps.shape[1]):
        for number, rows in enumerate(batches):
            update.policy.before_backward(is_last=number == len(batches) - 1)
            terms = update.objective.terms(rollouts, {}, rows, column, kl_coefficient=0.0)
            (terms.loss.sum() / len(rollouts)).backward()
        average_gradients(parameters, mesh, is_sharded=update.policy.is_sharded)
        norms.append(clip_gradients(parameters, math.inf))
        for parameter in parameters:
            parameter.grad = None
    return norms


def summarise(config: Config, step_weights: Tensor, norms: list[float]) -> dict:
    """Return the content of gradients.json; ``norms`` were measured with ``step_weights``, shape
    (steps,).
    """
    settings = config.flat()
    sampler = {name: settings[name] for name in ("sde_type", "eta", "shift", "last_step")}
    sampler["num_steps"] = config.rollout.grpo_sampling_steps
    weights = [weight for weight in step_weights.tolist() if weight]  # 0 at deterministic steps
    steps = [
        step | {"weight": weight, "norm": norm / weight, "norm_weighted": norm}
        for step, weight, norm in zip(steps_of(**sampler), weights, norms, strict=True)
    ]
    return sampler | {"steps": steps}


def spread(steps: list[dict], name: str) -> float:
    """Return the largest norm of a step divided by the smallest one."""
    norms = [step[name] for step in steps]
    return max(norms) / min(norms) if min(norms) > 0 else math.inf


if __name__ == "__main__":
    main()
