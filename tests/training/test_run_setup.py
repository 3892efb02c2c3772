"""Every setting reaches the component that uses it, tested with values other than the defaults."""

import inspect

import pytest
import torch

from hyvideo.data.randomness import normal
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from hyvideo.training import policy, run_setup
from hyvideo.training.iteration import sample
from tests.test_trainer import CPU, Redness

OFF_DEFAULT = {
    "clip_range": 0.03,
    "use_grad_balancing": False,
    "gate_interval": 7,
    "kl_strategy": "dual_fixed",
    "kl_velocity": "gaussian",
    "dual_kl_moving_weight": 0.6,
    "dual_kl_step_weight": 0.3,
    "kl_weight": 0.5,
    "kl_coef": 0.02,
    "kl_schedule": "adaptive",
    "kl_warmup_updates": 3,
    "kl_target": 0.07,
    "learning_rate": 3e-3,
    "weight_decay": 0.02,
    "betas": [0.8, 0.98],
    "adam_epsilon": 1e-6,
    "max_grad_norm": 1e-3,
    "max_bad_updates": 5,
    "warmup_steps": 4,
    "optimizer": "muon",
    "ema_decay": 0.9,
    "advantage_clip": 0.4,
}


@pytest.fixture
def trainer(tiny_config, mesh):
    return Trainer(tiny_config.with_settings(**OFF_DEFAULT), mesh, CPU, scorers={"test": Redness()})


def test_loss_and_trust_region_follow_the_settings(trainer):
    update = trainer.run.update
    weights = update.config.objective.kl_weights
    assert (weights.position, weights.velocity) == (0.6, 0.3)
    schedule = update.kl_coefficient.settings
    assert (schedule.schedule, schedule.warmup_updates) == ("adaptive", 3)
    assert (schedule.minimum, schedule.maximum, schedule.target) == (0.02, 0.5, 0.07)
    assert update.kl_coefficient.value == 0.02
    assert (update._is_check_due(8), update._is_check_due(7)) == (True, False)
    assert update.nonfinite.max_bad_updates == 5
    assert set(trainer.run.objective.step_weights(trainer.run.source.schedule).tolist()) == {
        0.0,
        1.0,
    }  # without the equalizer
    assert trainer.run.policy.anchor.refresh_every is None


def test_optimizers_follow_the_settings_and_each_parameter_has_one(trainer):
    adamw, muon = trainer.run.policy.optimizers.optimizers
    (group,) = adamw.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        3e-3,
        (0.8, 0.98),
        1e-6,
        0.02,
    )
    (group,) = muon.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (3e-3, 0.95, 0.02)
    names = {id(parameter): name for name, parameter in trainer.run.policy.trained.items()}
    by_muon = {names[id(p)] for p in muon.param_groups[0]["params"]}
    by_adamw = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert by_muon | by_adamw == set(trainer.run.policy.trained) and not by_muon & by_adamw
    blocks = {name for name in trainer.run.policy.trained if name.startswith("transformer_blocks.")}
    matrices = {
        name
        for name in blocks
        if trainer.run.policy.trained[name].ndim == 2 and ".norm" not in name
    }
    assert by_muon == {
        name for name in matrices if name.split(".")[2] in ("attn", "ff", "ff_context")
    }


def test_an_iteration_uses_gradient_clipping_learning_rate_and_advantage_clipping(trainer):
    applied = []
    step = trainer.run.policy.optimizers.step

    def record_step(rate):
        applied.append(
            (
                rate,
                torch.stack([p.grad.norm() for p in trainer.run.policy.parameters]).norm().item(),
            )
        )
        step(rate)

    trainer.run.policy.optimizers.step = record_step
    trainer.iteration = 1
    seen = []
    terms = trainer.run.objective.terms

    def recorded_terms(rollouts, *others, **options):
        seen.append(rollouts)
        return terms(rollouts, *others, **options)

    trainer.run.objective.terms = recorded_terms
    sums, accumulate = [], trainer.run.update._accumulate
    trainer.run.update._accumulate = lambda work: (sums.append(accumulate(work)), sums[-1])[1]
    metrics = trainer.run_iteration()
    assert sums[0].sums.dtype == torch.float64  # of the metrics, over all terms of the update
    assert applied[0][0] == pytest.approx(3e-3 / 4) == metrics["lr"]
    assert metrics["grad/norm"] > 1e-3 and applied[0][1] == pytest.approx(1e-3, rel=1e-3)
    assert seen[0].advantages.abs().max().item() == pytest.approx(0.4)


def test_an_unusable_adapter_is_rejected_before_anything_is_loaded(tiny_config, mesh, monkeypatch):
    monkeypatch.setattr(run_setup, "load_encoder", None)
    config = tiny_config.with_settings(lora_rank=2, lora_target_modules=["nothing"])
    with pytest.raises(ValueError, match="no trainable linear layer"):
        Trainer(config, mesh, CPU, scorers={"test": Redness()})


# Settings of rollouts, decoding, loading, parallelism, validation and records.
ELSEWHERE = {
    "seed": 7,
    "fps": 12.0,
    "sde_type": "flow_grpo",
    "eta": 0.3,
    "last_step": "deterministic",
    "shift": 2.5,
    "cfg_scale": 2.0,
    "guidance_interval": "0.1:0.9",
    "batched_forward": "false",
    "sde_window": "fixed:0:1",
    "use_same_noise": True,
    "decode_batch_size": 3,
    "timestep_fraction": 0.9,
    "max_missing_fraction": 0.75,
    "vae_dtype": "bf16",
    "encoder_dtype": "fp32",
    "dtype": "bf16",
    "vae_tile_size": 64,
    "vae_tile_overlap": 0.25,
    "conditions_dir": "conditions",
    "lora_rank": 2,
    "lora_alpha": 6.0,
    "lora_target_modules": ["attn.to_q", "ff.net.2"],
    "activation_checkpointing": "selective",
    "reshard_after_forward": False,
    "offload": ["anchor"],
    "save_total_limit": 5,
    "save_asynchronously": False,
    "timeout": 1234.0,
    "log_video_interval": 3,
    "log_num_videos": 2,
    "valid_video_csv": ["assets/miniature/prompts/smoke.csv"],
    "validation_steps": 3,
    "validation_seed": 11,
    "validation_repeats": 2,
    "validation_batch_size": 4,
    "validation_num_frames": 9,
    "validation_shift": 4.0,
    "validation_cfg_scale": 3.0,
    "validation_height": 24,
    "validation_width": 32,
    "on_reward_hacking": "stop",
    "hacking_threshold": 0.7,
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Return a trainer with these settings, and the arguments of `parallelize`."""
    folder, calls = tmp_path_factory.mktemp("elsewhere"), []
    kept = {
        "prompts_csv": "assets/miniature/prompts/smoke.csv",
        "output_dir": str(folder / "run"),
        "report": False,
    }
    settings = ELSEWHERE | kept | {"conditions_dir": str(folder / "conditions")}
    config = load_config("configs/smoke.yaml", num_updates_per_rollout=1, **settings)

    def record(*arguments, **options):
        calls.append(options)
        return parallelize(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "parallelize", record)
        yield Trainer(config, Mesh.single(), CPU, scorers={"test": Redness()}), *calls


def test_the_sampler_follows_the_settings(elsewhere):
    trainer, _ = elsewhere
    sampling, collector = trainer.run.pipeline.sampling, trainer.run.source
    assert sampling.guidance.scale == 2.0
    assert not sampling.batched_forward and sampling.guidance.interval == pytest.approx(
        (0.1, 0.9), abs=1e-5
    )
    assert collector.schedule == Schedule.build(
        "flow_grpo",
        num_steps=trainer.config.rollout.grpo_sampling_steps,
        shift=2.5,
        eta=0.3,
        last_step="deterministic",
        reference_conventions=trainer.config.rollout.reference_conventions,
    )
    assert (collector.noise.seed, collector.noise.is_shared, collector.order.seed) == (7, True, 7)
    assert collector.schedule_of(1).stochastic_steps == collector.schedule.stochastic_steps[:1]


def test_models_are_loaded_as_the_settings_say(elsewhere):
    trainer, _ = elsewhere
    assert trainer.run.pipeline.compute_dtype == trainer.run.encoder.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in trainer.run.pipeline.vae.parameters()} == {
        torch.bfloat16
    }
    assert trainer.run.encoder.store.folder.name == "conditions"
    assert (
        trainer.run.pipeline.vae.tiling == (64, 0.25)
        and trainer.run.pipeline.vae.tile_overlap_factor == 0.25
    )
    text = trainer.run.encoder.parts[0]
    loaded = trainer.run.encoder._load(text)
    text_encoder = inspect.getclosurevars(loaded).nonlocals["encode"]
    assert {parameter.dtype for parameter in text_encoder.model.parameters()} == {torch.float32}


def test_the_policy_is_parallelized_and_adapted_as_the_settings_say(elsewhere):
    trainer, options = elsewhere
    assert options == {
        "recompute": "selective",
        "compile": False,
        "shard": False,  # one process
        "reshard_after_forward": False,
        "compute_dtype": torch.bfloat16,
    }
    lora = trainer.run.policy.lora()
    assert {(pair.rank, pair.alpha) for pair in lora.values()} == {(2, 6.0)}
    assert {name.partition(".attn.")[2] or name.partition(".ff.")[2] for name in lora} == {
        "to_q",
        "net.2",
    }


def test_validation_follows_the_settings(elsewhere):
    validation = elsewhere[0].validation
    pipeline = validation.pipeline
    assert validation.schedule == Schedule.ode(3, 4.0)
    assert pipeline.sampling.guidance.scale == 3.0
    assert (validation.size, validation.decode_batch_size, validation.fps) == ((9, 24, 32), 3, 12.0)
    assert validation.groups[:4] == [0, 0, 1, 1] and validation.prompts[0] == validation.prompts[1]
    assert (
        validation.settings.on_reward_hacking,
        validation.settings.hacking_threshold,
    ) == ("stop", 0.7)
    noise = normal(validation.latent_shape, 11, "validation noise", 1, 0)
    assert torch.equal(validation._noise(2), noise)
    sampled, sample_ode = [], pipeline.sample_ode
    pipeline.sample_ode = lambda conditions, noise, schedule: (
        sampled.append(len(noise)) or sample_ode(conditions, noise, schedule)
    )
    decoded = decode_sizes(pipeline)
    list(validation.videos([0, 1, 2, 3, 4]))
    assert sampled == [4, 1] and decoded == [3, 1, 1]


def decode_sizes(pipeline):
    """Return a list that receives the number of videos of each call of the VAE's decoder from now
    on.
    """
    sizes, decode = [], pipeline.vae.decode
    pipeline.vae.decode = lambda latents, **others: (
        sizes.append(len(latents)) or decode(latents, **others)
    )
    return sizes


def test_records_follow_the_settings(elsewhere, monkeypatch):
    trainer, _ = elsewhere
    writers = []
    monkeypatch.setattr(
        run_setup, "CheckpointWriter", lambda *_, **options: writers.append(options)
    )
    config = trainer.config.with_settings(timeout=1234.0)
    run_setup._checkpoint_writer(config, trainer.mesh, trainer.lease, "1a2b")
    assert writers[0]["timeout"] == 1234.0 and writers[0]["run"] == "1a2b"
    assert writers[0]["check_owner"] == trainer.lease.check
    checkpoints, recorder = trainer.run.state.checkpoints, trainer.run.recorder
    assert (checkpoints.keep, checkpoints.is_asynchronous) == (5, False)
    assert (recorder.interval, recorder.num_videos, recorder.seed, recorder.fps) == (3, 2, 7, 12.0)
    assert trainer.run.rewards.max_missing_fraction == 0.75


def test_rollouts_are_decoded_and_scored_as_the_settings_say(elsewhere):
    trainer, _ = elsewhere
    scored, submit = [], trainer.run.scorer.submit
    trainer.run.scorer.submit = lambda *batches, fps: (
        scored.append(fps) or submit(*batches, fps=fps)
    )
    decoded = decode_sizes(trainer.run.pipeline)
    _, pending = sample(trainer.run, 1)
    trainer.run.rewards.wait(pending)
    size = trainer.config.rollout.batch_size
    assert decoded == [3] * (size // 3) + [size % 3] * (size % 3 > 0) and set(scored) == {12.0}
