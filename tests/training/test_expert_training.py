"""Training of one expert of a model of two: its steps and levels, its frozen partner, base LoRAs,
resumes, and the exports.
"""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

import generate
from hyvideo.checks.rules import check
from hyvideo.data.prompts import Request
from hyvideo.distributed.mesh import Mesh
from hyvideo.generation.generation import Source
from hyvideo.loading.model_setup import base_loras, load_encoder, load_pipeline
from hyvideo.models.guidance import OTHER_EXPERT, levels_of
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import pairs_of, with_lora
from hyvideo.models.lora_files import expert_of, read_lora
from hyvideo.models.wan import tiny
from hyvideo.models.wan.family import FAMILY
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from scripts import export
from tests.conftest import small_config
from tests.distributed.launch import launch
from tests.models.wan.test_lora import lightx2v_file
from tests.pipelines.test_wan_parity import relative_difference
from tests.test_trainer import CPU, Redness
from tests.tiny_checkpoint import write_image

PROMPTS = ["a red car turns left", "a car turns"]
VERSION = "wan2.2_t2v_a14b"
BOUNDARY = 0.875
STEPS = 4  # two of each expert at shift 5
SETTINGS = {
    "transformer_version": VERSION,
    "random_weights": False,
    "encoder_dtype": "fp32",
    "height": 32,
    "width": 32,
    "shift": 5.0,
    "grpo_sampling_steps": STEPS,
    "sde_type": "cps",
    "eta": 0.9,
    "sde_window": "fixed:0:2",
    "cfg_scale": 2.0,
    "low_noise_cfg_scale": 1.5,
    "batch_size": 4,
    "num_generations": 2,
    "mini_batch_size_per_update": 2,
    "reward_model": ["test"],
    "lora_rank": 2,
    "learning_rate": 1e-3,
    "kl_strategy": "fixed",
    "kl_weight": 0.1,
    "num_threads": 1,
}
MODULE = "tests.training.test_expert_training"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts") / "ckpts"
    tiny.write(root, VERSION, num_heads=2, prompts=PROMPTS)
    return root


def config_of(tiny_config, root, folder):
    csv = folder / "prompts.csv"
    csv.write_text("\n".join(["prompt", *PROMPTS]) + "\n")
    return tiny_config.with_settings(
        **SETTINGS, pretrained_model_root=str(root), prompts_csv=str(csv)
    )


@pytest.fixture
def config(tiny_config, root, tmp_path):
    return config_of(tiny_config, root, tmp_path)


@pytest.fixture(scope="module")
def shared_config(root, tmp_path_factory):
    """The settings of `config`, for runs that several tests only read."""
    folder = tmp_path_factory.mktemp("shared")
    return config_of(small_config(folder / "run"), root, folder)


@pytest.fixture(scope="module")
def two_iterations(shared_config):
    """Metrics of two iterations of a run whose partner stays on the device."""
    _, metrics = iterations(shared_config, Mesh.single(), 2)
    return metrics


LOW = {"expert": "low", "sde_window": "fixed:2:1"}


def iterations(config, mesh, count=1):
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    metrics = []
    for _ in range(count):
        trainer.iteration += 1
        metrics.append(trainer.run_iteration())
    return trainer, metrics


@pytest.mark.parametrize("settings", [{}, LOW], ids=["high", "low"])
def test_one_expert_is_trained_and_its_partner_stays_frozen(config, mesh, settings):
    config = config.with_settings(**settings)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    partner = trainer.run.pipeline.partner
    assert partner.expert == OTHER_EXPERT[config.model.expert]
    before = {name: weight.clone() for name, weight in partner.transformer.state_dict().items()}
    trainer.iteration = 1
    metrics = trainer.run_iteration()
    assert metrics["policy/ratio_first_deviation"] == 0.0 and metrics["grad/norm"] > 0
    first = trainer.run.pipeline.first_own_step(config.sampling.schedule())
    assert first == (2 if config.model.expert == "low" else 0)
    after = partner.transformer.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert not any(parameter.requires_grad for parameter in partner.transformer.parameters())
    assert not any("partner" in name for name in trainer.run.policy.tensors())


@pytest.mark.parametrize("expert", ["high", "low"])
def test_the_on_policy_check_of_nft_replays_a_step_of_the_policy(config, mesh, expert):
    """A disturbed policy fails the check, which a replay of its partner's step would not see."""
    nft = {"objective": "nft", "nft_levels": 2, "gate_interval": 1, "eta": 0.0}
    config = config.with_settings(**nft, expert=expert, random_weights=True)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    objective = trainer.run.objective
    trainer.iteration = 1
    trainer.run_iteration()
    collected = {}
    original = objective.prepare

    def prepare(rollouts):
        collected["rollouts"] = rollouts
        return original(rollouts)

    objective.prepare = prepare
    trainer.iteration = 2
    trainer.run_iteration()
    with torch.no_grad():
        distance = objective._replay_distance(collected["rollouts"], 0).item()
    assert distance > 0  # the updates of this iteration have changed the policy


@pytest.mark.parametrize("expert", ["high", "low"])
def test_levels_are_drawn_in_the_interval_of_the_expert_one_from_each_part(config, mesh, expert):
    config = config.with_settings(objective="nft", nft_levels=4, expert=expert)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    indices = trainer.run.source.choose(1).indices
    levels = torch.cat(
        [
            trainer.run.objective.draw(config.sampling.schedule(), iteration, indices, 4)
            for iteration in range(40)
        ]
    )
    low, high = levels_of(expert, BOUNDARY)
    assert levels.min() >= low and levels.max() <= high
    assert all(config.trains(level) for level in levels.flatten().tolist())
    # equal parts before the shift
    uniform = levels / (levels + 5 * (1 - levels))
    start, end = low / (low + 5 * (1 - low)), high / (high + 5 * (1 - high))
    parts = ((uniform - start) / (end - start) * 4).clamp(0, 3.999).floor()
    clipped = (levels <= 0.0201) | (levels >= 0.9989)
    rows = ~clipped.any(1)
    assert rows.sum() > 40
    assert (parts[rows].sort(1).values == torch.arange(4.0)).all()


@pytest.mark.parametrize(
    "settings, fix",
    [
        ({"sde_window": "fixed:1:2"}, "sde_window fixed:0:2"),
        ({"sde_window": "random:2"}, "sde_window fixed:0:2"),
        ({"sde_window": ""}, "sde_window fixed:0:2"),
        ({"sde_window": "fixed:0:2", "expert": "low"}, "sde_window fixed:2:1"),
        ({"sde_window": "fixed:0:1", "expert": "low", "shift": 100.0}, "grpo_sampling_steps"),
    ],
)
def test_a_window_with_steps_of_the_other_expert_is_refused(config, settings, fix):
    with pytest.raises(ValueError, match=fix) as error:
        check(config.with_settings(**settings))
    assert settings["sde_window"] or "all steps" in str(error.value)


def test_a_window_inside_the_interval_is_allowed(config):
    for window in ("fixed:0:1", "fixed:1:1", "fixed:0:2"):
        check(config.with_settings(sde_window=window, reward_model="miniature"))


def test_objectives_on_the_whole_path_and_reward_gradients_of_early_steps_are_refused(config):
    student = {"objective": "distill", "eta": 0.0, "cfg_scale": 1.0, "low_noise_cfg_scale": 1.0}
    with pytest.raises(ValueError, match="objective distill trains all steps"):
        check(config.with_settings(**student))
    with pytest.raises(ValueError, match="reward gradient .* expert high"):
        check(config.with_settings(objective="draft", kl_weight=0.0))


def test_image_to_video_trains_with_the_first_frame_of_each_prompt(config, mesh, tmp_path):
    root = tmp_path / "i2v"
    tiny.write(root, "wan2.2_i2v_a14b", num_heads=2, prompts=PROMPTS)
    image = write_image(tmp_path / "image.png")
    csv = tmp_path / "images.csv"
    csv.write_text("prompt,ref_image_path\n" + "".join(f"{text},{image}\n" for text in PROMPTS))
    config = config.with_settings(
        pretrained_model_root=str(root),
        transformer_version="wan2.2_i2v_a14b",
        prompts_csv=str(csv),
        precompute_conditions=True,
    )
    trainer, (metrics,) = iterations(config, mesh)
    assert metrics["policy/ratio_first_deviation"] == 0.0 and metrics["grad/norm"] > 0
    # the mask of the given frames, and the latents of the whole given video
    condition = trainer.run.encoder(
        [Request(PROMPTS[0], str(image))], config.sampling.size
    ).samples[0]
    channels, *size = trainer.run.pipeline.latent_shape(*config.sampling.size)
    assert condition.image.latents.shape == (4 + channels, *size)
    without = config.with_settings(prompts_csv=str(tmp_path / "prompts.csv"))
    with pytest.raises(ValueError, match="image"):
        Trainer(without, mesh, CPU, scorers={"test": Redness()})


# --- places of the partner ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"offload": ["partner"]}, {"offload": ["policy", "reward"]}],
    ids=["streamed", "policy away while scoring"],
)
def test_offloading_changes_no_bit(config, mesh, settings, two_iterations):
    _, found = iterations(config.with_settings(**settings), mesh, 2)
    for name in ("reward/mean", "loss/total", "grad/norm", "policy/log_prob"):
        assert [line[name] for line in found] == [line[name] for line in two_iterations]


def test_a_partner_in_fp8_has_rounded_matrices_and_other_videos(config, mesh, two_iterations):
    pytest.importorskip("torchao")
    trainer, (found,) = iterations(config.with_settings(partner_weight_dtype="fp8"), mesh)
    assert found["policy/ratio_first_deviation"] == 0.0
    assert found["reward/mean"] != two_iterations[0]["reward/mean"]
    name = "blocks.0.attn1.to_q.weight"
    stored = trainer.run.pipeline.partner.transformer.get_parameter(name).dequantize().float()
    weight = load_transformer(config.model.pretrained_model_root, None, expert="low")
    weight = weight.get_parameter(name)
    assert 0 < (stored - weight).norm() < 0.05 * weight.norm()


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"offload": ["partner"], "enable_fsdp": True}, "offload partner"),
        ({"partner_weight_dtype": "fp8", "enable_fsdp": True}, "partner_weight_dtype"),
        ({"offload": ["policy"]}, "offload reward"),
        ({"offload": ["policy", "reward"], "lora_rank": 0}, "lora_rank"),
    ],
)
def test_places_that_exclude_each_other_are_refused(config, settings, named):
    with pytest.raises(ValueError, match=named):
        check(config.with_settings(**settings), 2 if "enable_fsdp" in settings else 1)


def train(root, csv, folder, settings):
    """Return the metrics of two iterations on this rank."""
    from hyvideo.distributed import mesh as ranks

    common = SETTINGS | {
        "pretrained_model_root": root,
        "prompts_csv": csv,
        "output_dir": folder,
        "valid_video_csv": "",
        "num_updates_per_rollout": 1,
        "log_video_interval": 0,
        "adam_epsilon": 1e-2,
    }
    config = load_config("configs/smoke.yaml", **common | settings)
    mesh = ranks.start(config.distributed.sp_size, CPU)
    _, metrics = iterations(config, mesh, 2)
    names = ("reward/mean", "loss/total", "grad/norm", "policy/log_prob")
    return [{name: line[name] for name in names} for line in metrics]


@pytest.mark.system
def test_a_sharded_partner_gives_the_rewards_and_gradients_of_one_process(root, tmp_path):
    (tmp_path / "prompts.csv").write_text("\n".join(["prompt", *PROMPTS]) + "\n")
    run = str(root), str(tmp_path / "prompts.csv")
    (expected,) = launch(f"{MODULE}:train", 1, *run, str(tmp_path / "one"), {"batch_size": 8})
    settings = {"batch_size": 4, "enable_fsdp": True}
    for lines in launch(f"{MODULE}:train", 2, *run, str(tmp_path / "two"), settings):
        for line, single in zip(lines, expected):
            assert line == {
                key: pytest.approx(value, rel=2e-4, abs=1e-6) for key, value in single.items()
            }


# --- resuming -------------------------------------------------------------------------------------


def test_a_resumed_run_continues_and_another_partner_is_refused(config, mesh, root, tmp_path):
    steps = config.with_settings(max_steps=2, save_interval=1)
    whole = Trainer(steps.with_settings(output_dir=str(tmp_path / "whole")), mesh, CPU,
                    scorers={"test": Redness()})  # fmt: skip
    whole.train()
    first = str(tmp_path / "whole" / "checkpoints" / "000001")
    resumed = Trainer(steps.with_settings(resume_from_checkpoint=first), mesh, CPU,
                      scorers={"test": Redness()})  # fmt: skip
    assert resumed.iteration == 1
    resumed.train()
    for name, tensor in whole.run.policy.tensors().items():
        assert torch.equal(resumed.run.policy.tensors()[name], tensor), name
    other = tmp_path / "other"
    tiny.write(other, VERSION, num_heads=2, prompts=PROMPTS)
    weights = other / "transformer_2" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file({name: 1.01 * tensor for name, tensor in tensors.items()}, weights)
    moved = steps.with_settings(max_steps=3, pretrained_model_root=str(other))
    with pytest.raises(ValueError, match="pretrained_model_root/partner"):
        Trainer(moved, mesh, CPU, scorers={"test": Redness()}).train()
    trained_low = steps.with_settings(max_steps=3, **LOW)
    with pytest.raises(ValueError, match="expert is 'low' and was 'high'"):
        Trainer(trained_low, mesh, CPU, scorers={"test": Redness()}).train()


# --- base LoRAs -----------------------------------------------------------------------------------


def test_each_expert_is_trained_sampled_and_exported_with_its_own_base_lora(
    config, mesh, root, tmp_path, monkeypatch
):
    """The file of the low-noise expert also has modules of CLIP, as published: a warning names them."""
    config = config.with_settings(max_steps=1)
    settings, expected = {}, {}
    for expert, name in (("high", "base_lora_path"), ("low", "low_noise_base_lora_path")):
        file = tmp_path / f"{expert}_noise_model.safetensors"
        model = load_transformer(root, None, expert=expert)
        expected[expert] = FAMILY.transformer.to_diffusers(lightx2v_file(file, model, scale=0.02))
        settings[name] = str(file)
    assert not torch.equal(*(each["blocks.0.attn1.to_q.weight"] for each in expected.values()))
    tensors = load_file(file)
    foreign = "diffusion_model.blocks.0.cross_attn.k_img"
    tensors |= {
        f"{foreign}.lora_down.weight": torch.ones(2, 4),
        f"{foreign}.lora_up.weight": torch.ones(4, 2),
    }
    tensors["diffusion_model.blocks.0.cross_attn.norm_k_img.diff"] = torch.ones(4)
    tensors["diffusion_model.img_emb.proj.0.diff_b"] = torch.ones(4)
    save_file(tensors, file)
    with pytest.warns(UserWarning, match="3 modules .* left out: .*image_embedder"):
        trainer = Trainer(config.with_settings(**settings), mesh, CPU, scorers={"test": Redness()})
    pipeline = trainer.run.pipeline
    for expert, transformer in (
        ("high", pipeline.transformer),
        ("low", pipeline.partner.transformer),
    ):
        state = {
            name.replace(".base_layer.", "."): weight
            for name, weight in transformer.state_dict().items()
            if ".lora_" not in name
        }
        for name, weight in expected[expert].items():
            torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-5)
    trainer.train()
    checkpoint = trainer.output_dir / "checkpoints" / "000001"
    out = tmp_path / "exported"
    with pytest.warns(UserWarning, match="left out"):
        run_export(
            monkeypatch, "--checkpoint_path", checkpoint, "--dtype", "fp32", "--output_dir", out
        )
    trained = read_lora(checkpoint)
    frozen = expected["low"]
    expected["high"] = dict(with_lora(expected["high"].items(), trained))
    for expert, weights in expected.items():
        state = load_transformer(out, None, expert=expert).state_dict()
        for name, weight in weights.items():
            torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-5)
    # a file that is named takes the place of the run's
    other = tmp_path / "other_low_noise_model.safetensors"
    model = load_transformer(root, None, expert="low")
    weights = FAMILY.transformer.to_diffusers(lightx2v_file(other, model, scale=0.02))
    name = "blocks.0.attn1.to_q.weight"
    assert (weights[name] - frozen[name]).norm() > 1e-2
    named = "--checkpoint_path", checkpoint, "--low_noise_base_lora_path", other
    run_export(monkeypatch, *named, "--dtype", "fp32", "--output_dir", tmp_path / "named")
    found = load_transformer(tmp_path / "named", None, expert="low").state_dict()[name]
    torch.testing.assert_close(found, weights[name], rtol=1e-5, atol=1e-5)


# --- exports --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["high", "low"])
def trained(request, shared_config, tmp_path_factory):
    """The trained expert and the checkpoint of a run of one iteration."""
    settings = LOW if request.param == "low" else {}
    folder = tmp_path_factory.mktemp(request.param)
    config = shared_config.with_settings(max_steps=1, output_dir=str(folder / "run"), **settings)
    mesh = Mesh.single()
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.train()
    return request.param, max((trainer.output_dir / "checkpoints").glob("0*"))


def run_export(monkeypatch, *flags):
    monkeypatch.setattr("sys.argv", ["export.py", *map(str, flags)])
    export.main()


def test_exported_loras_load_into_their_expert_in_diffusers_and_here(
    trained, root, config, tmp_path, monkeypatch, capsys
):
    expert, checkpoint = trained
    lora = read_lora(checkpoint)
    assert expert_of(checkpoint) == expert
    out = tmp_path / "comfyui"
    run_export(monkeypatch, "--lora_path", checkpoint / "lora", "--form", "original", "--output_dir", out)  # fmt: skip
    printed = capsys.readouterr().out
    assert ("load_into_transformer_2=True" in printed) == (expert == "low")
    (file,) = out.glob("*.safetensors")
    assert f"{expert}_noise" in file.name
    assert all(name.startswith("diffusion_model.") for name in load_file(file))
    assert expert_of(out) == expert
    again = pairs_of(read_lora(out))
    for name, pair in pairs_of(lora).items():
        change, kept = pair.b @ pair.a, again[name].b @ again[name].a
        torch.testing.assert_close(
            kept * again[name].alpha / again[name].rank, change * pair.alpha / pair.rank
        )
    stock = WanPipeline.from_pretrained(root, local_files_only=True)
    stock.load_lora_weights(out, weight_name=file.name, load_into_transformer_2=expert == "low")
    theirs = stock.transformer_2 if expert == "low" else stock.transformer
    ours = load_transformer(root, None, expert=expert, loras=[lora])
    name = "blocks.1.ffn.net.2"
    layer, inputs = theirs.get_submodule(name), torch.randn(3, 64)
    torch.testing.assert_close(
        layer(inputs), ours.get_submodule(name)(inputs), rtol=1e-4, atol=1e-5
    )
    # the other expert refuses the file
    other = config.with_settings(expert=OTHER_EXPERT[expert], pretrained_lora_path=str(file))
    from hyvideo.loading.model_setup import check_adapter

    with pytest.raises(ValueError, match=f"the {expert}-noise expert"):
        check_adapter(other.model, other.optimizer)
    setting = "base_lora_path" if expert == "low" else "low_noise_base_lora_path"
    other = config.with_settings(**{setting: str(file)})
    with pytest.raises(ValueError, match=f"correct {setting}"):
        check_adapter(other.model, other.optimizer)
    other = other.with_settings(ignore_lora_expert=True)
    (given,) = base_loras(other.model, OTHER_EXPERT[expert])
    assert given.keys() == lora.keys()


def test_both_experts_take_their_halves_of_one_file(config, root, tmp_path):
    """As diffusers saves the LoRAs of a pipeline with two transformers."""
    name = "blocks.1.attn1.to_q"
    out, into = load_transformer(root, None, expert="low").get_submodule(name).weight.shape
    tensors, header = {}, {}
    for number, component in enumerate(("transformer", "transformer_2"), start=1):
        tensors[f"{component}.{name}.lora_A.weight"] = torch.randn(2, into)
        tensors[f"{component}.{name}.lora_B.weight"] = torch.randn(out, 2)
        header |= {f"{component}.r": 2, f"{component}.lora_alpha": 4 * number}
    file = tmp_path / "both.safetensors"
    save_file(tensors, file, metadata={"lora_adapter_metadata": json.dumps(header)})
    settings = {"base_lora_path": str(file), "low_noise_base_lora_path": str(file)}
    model = config.with_settings(**settings).model
    for expert, component, factor in (("high", "transformer", 2), ("low", "transformer_2", 4)):
        (lora,) = base_loras(model, expert)
        a, b = (tensors[f"{component}.{name}.lora_{side}.weight"] for side in "AB")
        plain = load_transformer(root, None, expert=expert).state_dict()
        merged = load_transformer(root, None, expert=expert, loras=[lora]).state_dict()
        changed = [each for each in plain if not torch.equal(plain[each], merged[each])]
        assert changed == [f"{name}.weight"]
        torch.testing.assert_close(merged[changed[0]] - plain[changed[0]], factor * b @ a)


def test_an_exported_model_has_both_experts_and_runs_in_wan_pipeline(
    trained, root, config, tmp_path, monkeypatch
):
    from diffusers import WanTransformer3DModel

    from tests.stock_pipeline import GivenSigmas

    expert, checkpoint = trained
    out = tmp_path / "exported"
    run_export(monkeypatch, "--checkpoint_path", checkpoint, "--dtype", "fp32", "--output_dir", out)
    stock = WanPipeline.from_pretrained(
        root,
        local_files_only=True,
        **{
            name: WanTransformer3DModel.from_pretrained(out / name)
            for name in ("transformer", "transformer_2")
        },
    )
    stock.set_progress_bar_config(disable=True)
    schedule = Schedule.ode(STEPS, 5.0)
    stock.scheduler = GivenSigmas(schedule)
    config = config.with_settings(
        expert=expert, dtype="fp32", vae_dtype="fp32", negative_prompt="a"
    ).resolved()
    encoder, vae = load_encoder(config, CPU)
    pipeline = load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=frozenset({"text"}))
    from hyvideo.loading import saved_policy

    saved_policy.load_into(pipeline.transformer, checkpoint)
    noise = torch.randn(1, *pipeline.latent_shape(*config.sampling.size))
    ours = pipeline.sample_ode(encoder([Request(PROMPTS[0])]), noise, schedule)
    frames, height, width = config.sampling.size
    theirs = stock(
        prompt=PROMPTS[0], negative_prompt="a", latents=noise.clone(), num_frames=frames, height=height,
        width=width, num_inference_steps=STEPS, guidance_scale=2.0, guidance_scale_2=1.5,
        output_type="latent",
    ).frames  # fmt: skip
    assert relative_difference(ours, theirs) <= 2e-6
    # generate.py loads both experts of the folder, whichever --expert names
    source = Source(checkpoint=out)
    source.check(config.model)
    exported = source.load(config, CPU, encoder, vae, frozenset({"text"}))
    again = exported.sample_ode(encoder([Request(PROMPTS[0])]), noise, schedule)
    assert relative_difference(ours, again) <= 2e-6


def test_all_weights_of_one_expert_are_exported_in_its_folder_only(
    config, mesh, root, tmp_path, monkeypatch, capsys
):
    full = config.with_settings(lora_rank=0, max_steps=1, **LOW)
    trainer = Trainer(full, mesh, CPU, scorers={"test": Redness()})
    trainer.train()
    (checkpoint,) = (trainer.output_dir / "checkpoints").glob("0*")
    out = tmp_path / "exported"
    run_export(monkeypatch, "--checkpoint_path", checkpoint, "--dtype", "fp32", "--output_dir", out)
    exported = {
        expert: load_transformer(out, VERSION, expert=expert).state_dict()
        for expert in ("high", "low")
    }
    before = load_transformer(root, VERSION, expert="high").state_dict()
    assert all(torch.equal(exported["high"][name], weight) for name, weight in before.items())
    for name, weight in trainer.run.policy.transformer.state_dict().items():
        assert torch.equal(exported["low"][name], weight.float()), name
    # in the place of the other expert, the weights would fit as well
    refused = "--checkpoint_path", checkpoint, "--expert", "high", "--output_dir", tmp_path / "no"
    with pytest.raises(SystemExit):
        run_export(monkeypatch, *refused)
    assert "low-noise expert" in capsys.readouterr().err
    other = config.with_settings(lora_rank=0, anchor_path=str(checkpoint), output_dir=str(out))
    with pytest.raises(ValueError, match="low-noise expert"):
        Trainer(other, mesh, CPU, scorers={"test": Redness()})


def test_a_video_is_made_again_with_another_base_lora(root, config, mesh, tmp_path, monkeypatch):
    model = load_transformer(root, None, expert="high")
    hashes, videos = [], []
    flags = ["--prompt", PROMPTS[0], "--num_inference_steps", "2", "--video_length", "5"]
    flags += ["--height", "32", "--width", "32", "--pretrained_model_root", str(root)]
    flags += ["--transformer_version", VERSION, "--guidance_scale", "1", "--dtype", "fp32"]
    flags += ["--low_noise_guidance_scale", "1", "--device", "cpu", "--vae_dtype", "fp32"]
    flags += ["--output_path", str(tmp_path / "videos"), "--keep_latents"]
    file = tmp_path / "base.safetensors"
    for scale in (0.02, 0.1, 0.1):
        torch.manual_seed(0)
        lightx2v_file(file, model, scale=scale)
        monkeypatch.setattr("sys.argv", ["generate.py", *flags, "--base_lora_path", str(file)])
        assert generate.main() == 0
        (record,) = (tmp_path / "videos").glob("*.json")
        hashes.append(json.loads(record.read_text())["settings_hash"])
        videos.append(load_file(record.with_suffix(".safetensors"))["latents"])
    assert hashes[0] != hashes[1] == hashes[2]
    assert not torch.equal(videos[0], videos[1]) and torch.equal(videos[1], videos[2])


def test_the_original_layout_is_read_and_written(
    trained, root, config, mesh, tmp_path, monkeypatch
):
    """`high_noise_model/` and `low_noise_model/`; with the other parts beside them, a run reads it."""
    _, checkpoint = trained
    out = tmp_path / "original"
    run_export(
        monkeypatch,
        "--checkpoint_path",
        checkpoint,
        "--form",
        "original",
        "--dtype",
        "fp32",
        "--output_dir",
        out,
    )
    assert sorted(path.name for path in Path(out).iterdir()) == [
        "README.md",
        "high_noise_model",
        "low_noise_model",
    ]
    again = tmp_path / "diffusers"
    run_export(monkeypatch, "--checkpoint_path", checkpoint, "--dtype", "fp32", "--output_dir", again)  # fmt: skip
    for expert in ("high", "low"):
        found = load_transformer(out, VERSION, expert=expert).state_dict()
        expected = load_transformer(again, VERSION, expert=expert).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    for part in ("vae", "text_encoder", "tokenizer"):
        (out / part).symlink_to(root / part)
    moved = config.with_settings(pretrained_model_root=str(out), output_dir=str(tmp_path / "moved"))
    iterations(moved, mesh)
