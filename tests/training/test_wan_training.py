"""Training of a small Wan model: ratios of 1, every training method, several ranks, and
resuming.
"""

import pytest
import torch
from torch import nn

from hyvideo.data.prompts import Request
from hyvideo.data.videos import read_video
from hyvideo.loading import saved_policy
from hyvideo.loading.model_setup import check_checkpoint
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import Difference, differences_of, pairs_of
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import save_lora
from hyvideo.models.versions import version_defaults
from hyvideo.models.wan.family import FAMILY
from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from hyvideo.training.policy import Policy
from scripts import export
from tests.distributed.launch import launch
from tests.models.wan.test_lora import lightx2v_file
from tests.test_trainer import CPU, Redness
from tests.tiny_checkpoint import write_original
from tests.tiny_wan import write_wan

MODULE = "tests.training.test_wan_training"
PROMPTS = ["a red car turns left", "a car turns"]
SETTINGS = {
    "transformer_version": "wan2.1_t2v_1.3b",
    "random_weights": False,
    "encoder_dtype": "fp32",
    "height": 48,
    "width": 32,
    "cfg_scale": 2.0,
    "shift": 3.0,
    "batch_size": 4,
    "num_generations": 2,
    "mini_batch_size_per_update": 2,
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


def test_the_ratio_is_exactly_1_before_the_first_update(config, mesh):
    _, (metrics,) = iterations(config, mesh)
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
    "mini_batch_size_per_update": 4,  # the rows of a rollout, so that ratios are exactly 1
}
FASTWAN = {"sigmas": "1,0.757,0.522", "grpo_sampling_steps": 3, "eta": 1.0, "sde_window": ""}


@pytest.mark.parametrize(
    "version, settings, ends",
    [
        ("wan2.1_t2v_1.3b_anyflow", {}, [937.5, 833.3333, 625.0, 0.0]),
        ("wan2.2_ti2v_5b_fastwan", FASTWAN, [None] * 3),
    ],
    ids=["AnyFlow", "FastWan"],
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
        torch.bfloat16
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


@pytest.mark.slow
def test_several_ranks_give_the_rewards_and_gradients_of_one_process(root, tmp_path):
    (tmp_path / "prompts.csv").write_text("\n".join(["prompt", *PROMPTS]) + "\n")
    run = str(root), str(tmp_path / "prompts.csv")
    (expected,) = launch(f"{MODULE}:train", 1, *run, str(tmp_path / "one"), {"batch_size": 8})
    settings = {"batch_size": 8, "sp_size": 2, "enable_fsdp": True}
    for lines in launch(f"{MODULE}:train", 2, *run, str(tmp_path / "two"), settings):
        for line, single in zip(lines, expected):
            assert line == {
                key: pytest.approx(value, rel=2e-4, abs=1e-6) for key, value in single.items()
            }


# --- invalid inputs -------------------------------------------------------------------------------


def test_sizes_and_versions_of_another_model_are_rejected_before_loading(config, mesh, monkeypatch):
    monkeypatch.setattr(
        "hyvideo.loading.model_setup.loading.load_vae", lambda *_, **__: pytest.fail("was loaded")
    )
    with pytest.raises(ValueError, match="height must be a multiple of 16, got 40"):
        Trainer(config.with_settings(height=40), mesh, CPU, scorers={"test": Redness()})


def test_a_wan_version_with_a_folder_of_another_family_is_rejected(config, tmp_path):
    other = config.with_settings(pretrained_model_root=str(write_original(tmp_path / "ckpts")))
    with pytest.raises(ValueError, match="version 'wan2.1_t2v_1.3b': .* available: ..480p_t2v"):
        check_checkpoint(other, {"this call": [Request("a car")]}, [(5, 48, 32)])


# --- a LoRA that also changes norms, biases and modulation ---------------------------------------


@pytest.fixture(scope="module")
def lightx2v(root, tmp_path_factory):
    """A LoRA file with the names of lightx2v, and the weights of the model with its changes."""
    file = tmp_path_factory.mktemp("lightx2v") / "lora.safetensors"
    expected = lightx2v_file(file, load_transformer(root, None), scale=0.02)
    return file, FAMILY.transformer.to_diffusers(expected)


def assert_weights(transformer: nn.Module, expected):
    state = transformer.state_dict()
    assert state.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-5)


@pytest.fixture
def lora_config(config, lightx2v):
    return config.with_settings(
        pretrained_lora_path=str(lightx2v[0]), lora_rank=2, lora_alpha=2.0, learning_rate=1e-3
    )


@pytest.mark.system
def test_a_run_from_a_lightx2v_file_saves_checkpoints_and_exports_with_its_changes(
    lora_config, mesh, lightx2v, root, tmp_path, exit_code, capsys
):
    file, expected = lightx2v
    trainer = Trainer(lora_config, mesh, CPU, scorers={"test": Redness()})
    # before training: the frozen base has the differences, the adapter the pairs
    for name in differences_of(read_lora(file)):
        module, _, parameter = name.rpartition(".")
        owner = trainer.run.policy.transformer.get_submodule(module)
        base = getattr(owner, "base_layer", owner)
        torch.testing.assert_close(getattr(base, parameter).detach(), expected[name])
    trainer.train()
    checkpoint = max((trainer.output_dir / "checkpoints").glob("0*"))
    saved = saved_policy.read_saved_lora(checkpoint)
    differences = differences_of(read_lora(file))
    assert differences_of(saved).keys() == differences.keys()
    # in the merged export, what is not trained is the base model with the file's differences
    arguments = ("--checkpoint_path", checkpoint, "--dtype", "fp32")
    assert exit_code(export.main, *arguments, "--output_dir", tmp_path / "merged") == 0
    merged = load_transformer(tmp_path / "merged", None)
    trained = {f"{module}.weight" for module in pairs_of(saved)}
    state = merged.state_dict()
    moved = {
        name for name in expected if not torch.allclose(state[name], expected[name], atol=1e-5)
    }
    assert moved and moved <= trained
    # generate.py adds the same LoRA to the base model
    added = load_transformer(root, None)
    saved_policy.load_into(added, checkpoint)
    for name in differences:
        module, _, parameter = name.rpartition(".")
        owner = added.get_submodule(module)
        found = getattr(getattr(owner, "base_layer", owner), parameter).detach()
        torch.testing.assert_close(found, state[name])
    capsys.readouterr()
    only_lora = ("--lora_path", checkpoint / "lora", "--output_dir")
    assert exit_code(export.main, *only_lora, tmp_path / "diffusers") == 2
    message = capsys.readouterr().err
    assert "no place for the changes of 43 whole parameters" in message and "--merge" in message
    assert exit_code(export.main, *only_lora, tmp_path / "original", "--form", "original") == 0
    assert differences_of(read_lora(tmp_path / "original")).keys() == differences.keys()


def test_with_lora_rank_0_all_changes_of_a_lightx2v_file_are_merged(config, mesh, lightx2v):
    settings = {"pretrained_lora_path": str(lightx2v[0])}
    policy = Policy(config.with_settings(**settings), mesh, CPU, [Request(PROMPTS[0])])
    assert_weights(policy.transformer, lightx2v[1])


def test_an_anchor_without_the_changes_of_the_initial_lora_is_an_error(
    lora_config, mesh, lightx2v, tmp_path
):
    lora = read_lora(lightx2v[0])
    for name, given in (("same", lora), ("without", pairs_of(lora))):
        save_lora(given, tmp_path / name)
    config = lora_config.with_settings(kl_strategy="fixed", anchor_path=str(tmp_path / "same"))
    assert Policy(config, mesh, CPU, [Request(PROMPTS[0])]).anchor.is_given
    config = config.with_settings(anchor_path=str(tmp_path / "without"))
    with pytest.raises(ValueError, match="it changes 0 norms, biases .* this run 43, got"):
        Policy(config, mesh, CPU, [Request(PROMPTS[0])])


def test_the_base_weights_are_rounded_to_fp8_after_the_changes_of_a_lora(
    lora_config, mesh, lightx2v, root, tmp_path
):
    """A difference of a whole matrix, larger than its weights, is in the rounded matrix."""
    pytest.importorskip("torchao")
    name = "blocks.0.attn1.to_q.weight"
    weight = load_transformer(root, None).state_dict()[name]
    lora = read_lora(lightx2v[0]) | {name: Difference(3 * weight)}
    save_lora(lora, tmp_path)
    config = lora_config.with_settings(pretrained_lora_path=str(tmp_path), base_weight_dtype="fp8")
    transformer = Policy(config, mesh, CPU, [Request(PROMPTS[0])]).transformer
    stored = transformer.get_submodule("blocks.0.attn1.to_q").base_layer.weight.dequantize()
    assert (stored.float() - 4 * weight).norm() < 0.05 * (4 * weight).norm()
