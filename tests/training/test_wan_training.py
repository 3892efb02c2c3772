"""Training of a small Wan model: ratios of 1, every training method, several ranks, and
resuming.
"""

import pytest
import torch

from hyvideo.config.command_line import load_config
from hyvideo.data.prompts import Request
from hyvideo.data.videos import read_video
from hyvideo.models.versions import version_defaults
from hyvideo.schedulers.transitions import SAMPLERS
from hyvideo.trainer import Trainer
from hyvideo.training.model_setup import check_checkpoint
from tests.distributed.launch import launch
from tests.test_trainer import CPU, Redness
from tests.tiny_checkpoint import write_original
from tests.tiny_wan import write_wan

MODULE = "tests.training.test_wan_training"
PROMPTS = ["a red car turns left", "a car turns"]
# 16 x 16 pixels would give 2 x 1 x 1 tokens, too few for 3 ranks; hence 48 x 32.
SETTINGS = {
    "transformer_version": "wan2.1_t2v_1.3b",
    "random_weights": False,
    "encoder_dtype": "fp32",
    "height": 48,
    "width": 32,
    "cfg_scale": 2.0,
    "shift": 3.0,
    "mini_batch_size_per_update": 4,
    "reward_model": ["test"],
    "num_threads": 1,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_wan(tmp_path_factory.mktemp("wan") / "ckpts")


@pytest.fixture
def config(tiny_config, root, tmp_path):
    csv = tmp_path / "prompts.csv"
    csv.write_text("\n".join(["prompt", *PROMPTS]) + "\n")
    return tiny_config.with_settings(
        **SETTINGS, pretrained_model_root=str(root), prompts_csv=str(csv)
    )


def iterations(config, mesh, count=1):
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    metrics = []
    for _ in range(count):
        trainer.iteration += 1
        metrics.append(trainer.run_iteration())
    return trainer, metrics


@pytest.mark.parametrize(
    "sde_type",
    [
        name if name == "sage_grpo" else pytest.param(name, marks=pytest.mark.slow)
        for name in SAMPLERS
    ],
)
def test_the_ratio_is_exactly_1_before_the_first_update(config, mesh, sde_type):
    _, (metrics,) = iterations(config.with_settings(sde_type=sde_type), mesh)
    assert metrics["policy/ratio_first_deviation"] == 0.0
    assert metrics["grad/norm"] > 0 and metrics["reward/std"] > 0


# Settings of configs/wan21_1gpu_4step.yaml that decide what is trained.
FEW_STEPS = {
    "sde_type": "cps",
    "eta": 0.9,
    "last_step": "deterministic",
    "sde_window": "random:2",
    "grpo_sampling_steps": 4,
    "shift": 5.0,
    "cfg_scale": 1.0,
    "kl_strategy": "fixed",
    "kl_weight": 0.1,
    "lora_rank": 2,
    "learning_rate": 1e-3,
}
FASTWAN = {"sigmas": "1,0.757,0.522", "grpo_sampling_steps": 3, "eta": 1.0, "sde_window": ""}


@pytest.mark.parametrize(
    "version, settings, ends",
    [
        ("wan2.1_t2v_1.3b_anyflow", {}, [937.5, 833.3333, 625.0, 0.0]),
        pytest.param("wan2.1_t2v_1.3b", {}, [None] * 4, marks=pytest.mark.slow),
        ("wan2.2_ti2v_5b_fastwan", FASTWAN, [None] * 3),
    ],
    ids=["AnyFlow", "own student", "FastWan"],
)
def test_grpo_trains_students_of_few_steps(config, mesh, tmp_path, version, settings, ends):
    is_anyflow = version.endswith("_anyflow")
    root = write_wan(tmp_path / "ckpts", is_anyflow=is_anyflow)
    settings = FEW_STEPS | settings | {"transformer_version": version}
    config = config.with_settings(**settings, pretrained_model_root=str(root), gate_interval=1)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    seen = []

    def record(module, inputs, options):
        value = options["ends"]
        seen.append(None if value is None else round(value[0].item(), 4))

    trainer.run.policy.transformer.register_forward_pre_hook(record, with_kwargs=True)
    trainer.iteration = 1
    metrics = trainer.run_iteration()
    # The rollouts are sampled together.
    assert seen[: len(ends)] == ends
    assert metrics["policy/ratio_first_deviation"] == 0.0 and metrics["grad/norm"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"use_muon": True}, marks=pytest.mark.slow),
        {
            "lora_rank": 2,
            "enable_gradient_checkpointing": True,
            "activation_checkpointing": "selective",
        },
        # The on-policy check needs a model that predicts better than zero velocity, unlike random
        # weights.
        {
            "objective": "nft",
            "nft_levels": 2,
            "eta": 0.0,
            "cfg_scale": 1.0,
            "lora_rank": 2,
            "base_weight_dtype": "fp8",
            "gate_interval": 0,
        },
        pytest.param(
            {
                "enable_compile": True,
                "compile_backend": "aot_eager",
                "enable_gradient_checkpointing": True,
            },
            marks=pytest.mark.slow,
        ),
        {
            "ema_decay": 0.5,
            "kl_strategy": "dual_moving",
            "kl_weight": 0.1,
            "update_ref_model_step": 1,
        },
    ],
    ids=["all weights", "muon", "LoRA", "NFT on fp8", "compiled", "anchor and EMA"],
)
def test_every_training_method_changes_the_weights(config, mesh, settings):
    trainer, metrics = iterations(config.with_settings(learning_rate=1e-3, **settings), mesh, 2)
    assert all(line["grad/norm"] > 0 for line in metrics)
    assert all(torch.isfinite(p).all() for p in trainer.run.policy.parameters)
    before, _ = iterations(config.with_settings(learning_rate=1e-3, **settings), mesh, 0)
    moved = [
        not torch.equal(p, q)
        for p, q in zip(trainer.run.policy.parameters, before.run.policy.parameters)
    ]
    assert sum(moved) > 0.9 * len(moved)


OWN_YAML = """
transformer_version: wan2.1_t2v_1.3b
dtype: fp32
height: 48
width: 32
sample_n_frames: 5
batch_size: 4
num_generations: 2
grpo_sampling_steps: 2
log_video_interval: 1
reward_model: test
report_to: none
device: cpu
num_threads: 1
"""


def test_a_run_uses_the_frame_rate_the_vae_precision_and_the_negative_prompt_of_the_version(
    root, config, mesh
):
    """These settings are not in the YAML file of the run."""
    folder = root.parent / "own"
    folder.mkdir()
    (folder / "own.yaml").write_text(OWN_YAML)
    places = {
        "pretrained_model_root": str(root),
        "prompts_csv": config.data.prompts_csv,
        "output_dir": str(folder),
    }
    trainer, (metrics,) = iterations(load_config(folder / "own.yaml", **places), mesh)
    assert {parameter.dtype for parameter in trainer.run.pipeline.vae.parameters()} == {
        torch.float32
    }
    video, fps = read_video(folder / "rollouts/000001/000.mp4")
    assert (len(video), fps) == (5, 16.0)
    (negative,) = trainer.run.encoder(
        [Request(version_defaults("wan2.1_t2v_1.3b").negative_prompt, is_negative=True)]
    ).samples
    assert (
        torch.equal(trainer.run.pipeline.negative.text, negative.text) and len(negative.text) > 50
    )
    assert metrics["grad/norm"] > 0


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(config, mesh, tmp_path):
    config = config.with_settings(
        max_steps=2, save_interval=1, learning_rate=1e-3, ema_decay=0.5, report_to=["none"]
    )
    uninterrupted = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    uninterrupted.train()
    interrupted = config.with_settings(output_dir=str(tmp_path / "interrupted"))
    Trainer(interrupted.with_settings(max_steps=1), mesh, CPU, scorers={"test": Redness()}).train()
    resumed = Trainer(
        interrupted.with_settings(resume_from_checkpoint="latest"),
        mesh,
        CPU,
        scorers={"test": Redness()},
    )
    assert resumed.iteration == 1
    resumed.train()
    expected = uninterrupted.run.policy.tensors()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in resumed.run.policy.tensors().items()
    )


# --- several ranks --------------------------------------------------------------------------------


def train(root, csv, folder, settings):
    """Return the metrics of two iterations on this rank."""
    from hyvideo.distributed import mesh as ranks

    common = SETTINGS | {
        "pretrained_model_root": root,
        "prompts_csv": csv,
        "output_dir": folder,
        "valid_video_csv": "",
    }
    common |= {
        "num_updates_per_rollout": 1,
        "log_video_interval": 0,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-2,
    }
    config = load_config("configs/smoke.yaml", **common | settings)
    mesh = ranks.start(config.distributed.sp_size, CPU)
    _, metrics = iterations(config, mesh, 2)
    return [
        {name: line[name] for name in ("reward/mean", "loss/total", "grad/norm", "policy/log_prob")}
        for line in metrics
    ]


LAYOUTS = {
    "2 ranks, FSDP": (2, {"batch_size": 4, "enable_fsdp": True}),
    "sequence parallelism of 2, FSDP": (2, {"batch_size": 8, "sp_size": 2, "enable_fsdp": True}),
    "sequence parallelism of 3": (3, {"batch_size": 8, "sp_size": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [["sequence parallelism of 2, FSDP"], pytest.param(list(LAYOUTS), marks=pytest.mark.slow)],
)
def test_several_ranks_give_the_rewards_and_gradients_of_one_process(root, tmp_path, layouts):
    (tmp_path / "prompts.csv").write_text("\n".join(["prompt", *PROMPTS]) + "\n")
    run = str(root), str(tmp_path / "prompts.csv")
    (expected,) = launch(f"{MODULE}:train", 1, *run, str(tmp_path / "one"), {"batch_size": 8})
    for name in layouts:
        num_ranks, settings = LAYOUTS[name]
        for lines in launch(f"{MODULE}:train", num_ranks, *run, str(tmp_path / name), settings):
            for line, single in zip(lines, expected):
                assert line == {
                    key: pytest.approx(value, rel=2e-4, abs=1e-6) for key, value in single.items()
                }, name


# --- invalid inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"height": 40}, "height must be a multiple of 16, got 40"),
        (
            {"transformer_version": "480p_t2v"},
            "480p_t2v belongs to the family hunyuan_video15.* of wan",
        ),
        (
            {"transformer_version": "wan2.1_t2v_1.3B"},
            "wan2.1_t2v_1.3B is not listed, .*; did you mean wan2.1_t2v_1.3b?",
        ),
    ],
)
def test_sizes_and_versions_of_another_model_are_rejected_before_loading(
    config, mesh, monkeypatch, settings, message
):
    monkeypatch.setattr(
        "hyvideo.training.model_setup.loading.load_vae", lambda *_, **__: pytest.fail("was loaded")
    )
    with pytest.raises(ValueError, match=message):
        Trainer(config.with_settings(**settings), mesh, CPU, scorers={"test": Redness()})


def test_an_image_is_rejected(config):
    with pytest.raises(ValueError, match="for text-to-video, got 1 reference images"):
        check_checkpoint(config, {"this call": [Request("a car", "car.png")]}, [(5, 48, 32)])


def test_a_wan_version_with_a_folder_of_another_family_is_rejected(config, tmp_path):
    other = config.with_settings(pretrained_model_root=str(write_original(tmp_path / "ckpts")))
    with pytest.raises(ValueError, match="version 'wan2.1_t2v_1.3b': .* available: ..480p_t2v"):
        check_checkpoint(other, {"this call": [Request("a car")]}, [(5, 48, 32)])
