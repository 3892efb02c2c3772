"""The probe of compiled blocks, with a backend whose numbers depend on the gradient mode of the
compilation.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hyvideo.distributed.parallelize import parallelize
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.trainer import Trainer
from hyvideo.training import compile_probe, policy

CPU = torch.device("cpu")
RELATIVE_ERROR = 1e-3


def in_mode(values):
    """Return the outputs of a block, larger if they are computed without gradient."""
    scale = 1.0 if torch.is_grad_enabled() else 1.0 + RELATIVE_ERROR
    return tuple(each * scale if isinstance(each, Tensor) else each for each in values)


@torch._dynamo.register_backend
def other_numbers_without_gradient(graph, inputs):
    return lambda *values: in_mode(graph(*values))


@pytest.fixture
def quick_compiler(monkeypatch):
    """Replace ``Module.compile``, which takes a minute, by a function with the same effect as the
    backend.
    """

    def compile(block, **options):
        block._compiled_call_impl = lambda *inputs, **given: in_mode(
            block._call_impl(*inputs, **given)
        )

    monkeypatch.setattr(nn.Module, "compile", compile)


def trainer_of(config, mesh, backend, **changes):
    compiled = {"enable_compile": True, "grpo_sampling_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "parallelize", partial(parallelize, compile_backend=backend))
        trainer = Trainer(config.with_settings(**compiled, **changes), mesh, CPU)
    trainer.iteration = 1
    return trainer


LORA = {"lora_rank": 2, "activation_checkpointing": "full"}


def check_first_iteration(config, mesh, capsys, backend, **changes):
    trainer = trainer_of(config, mesh, backend, **changes)
    assert trainer.run.pipeline.samples_in_gradient_mode
    assert "sampled in gradient mode" in capsys.readouterr().err
    metrics = trainer.run_iteration()
    assert metrics["policy/ratio_first_deviation"] <= 1e-6 and metrics["grad/norm"] > 0


@pytest.mark.system
def test_a_run_samples_in_gradient_mode_if_compiled_blocks_depend_on_it(
    tiny_config, mesh, capsys, quick_compiler
):
    check_first_iteration(tiny_config, mesh, capsys, "eager", **LORA)


@pytest.mark.slow
def test_with_torch_compile_rollout_and_update_then_run_the_same_graphs(tiny_config, mesh, capsys):
    torch._dynamo.reset()
    check_first_iteration(
        tiny_config, mesh, capsys, other_numbers_without_gradient.__name__, **LORA
    )
    torch._dynamo.reset()


def test_all_ranks_sample_in_gradient_mode_if_one_needs_it(tiny_config, mesh, monkeypatch):
    trainer = Trainer(tiny_config, mesh, CPU)
    monkeypatch.setattr(compile_probe, "all_objects", lambda agrees, mesh: [agrees, False])
    conditions = trainer.run.encoder(trainer.run.source.requests[:1], (1, 16, 16))
    schedule = trainer.run.source.schedule
    compile_probe.match_gradient_mode(
        trainer.run.pipeline, schedule, conditions, trainer.config.sampling.size, mesh
    )
    assert trainer.run.pipeline.samples_in_gradient_mode


@pytest.mark.parametrize("batched, batch_size", [("true", 2), ("false", 1)])
def test_the_probe_runs_blocks_with_the_batches_of_the_update(
    tiny_config, mesh, monkeypatch, quick_compiler, batched, batch_size
):
    """Another batch size, one or several, would be compiled for the probe alone."""
    found = []
    velocity_at_steps = GRPOPipeline.velocity_at_steps

    def recorded(pipeline, latents, schedule, steps, conditions):
        found.append(len(latents))
        return velocity_at_steps(pipeline, latents, schedule, steps, conditions)

    monkeypatch.setattr(GRPOPipeline, "velocity_at_steps", recorded)
    trainer_of(tiny_config, mesh, "eager", batched_forward=batched, mini_batch_size_per_update=2)
    assert set(found) == {batch_size}


def test_the_blocks_of_a_sampled_velocity_keep_no_graph(tiny_config, mesh):
    """In gradient mode the graph of a block ends with it, and the velocity has the same bits and no
    gradient.
    """
    trainer = Trainer(tiny_config, mesh, CPU)
    pipeline, transformer = trainer.run.pipeline, trainer.run.policy.transformer
    requests = trainer.run.source.requests[:1]
    conditions = trainer.run.encoder(requests, (1, 16, 16))
    noise, timestep = torch.randn(1, *trainer.run.source.noise.shape), torch.tensor([1000.0])
    depths = []

    def record(block, inputs, outputs):
        depths.append([each.grad_fn for each in inputs[:2]])

    for block in transformer.transformer_blocks[1:]:
        block.register_forward_hook(record)
    with torch.no_grad():
        expected = pipeline.velocity(noise, timestep, conditions)
        depths.clear()
        pipeline.samples_in_gradient_mode = True
        found = pipeline.velocity(noise, timestep, conditions)
    assert torch.equal(found, expected) and not found.requires_grad
    assert depths and not any(any(inputs) for inputs in depths)
    assert not transformer.detaches_blocks
    trained = pipeline.velocity(noise, timestep, conditions)
    assert trained.requires_grad and torch.equal(trained, expected)
