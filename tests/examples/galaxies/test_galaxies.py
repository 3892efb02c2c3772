"""A family without text, attention or a class in diffusers, through training, LoRA and the plan.

With the package galaxygrad, the pretrained network is trained, otherwise a small one with random weights.
"""

import copy
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from PIL import Image

import generate
import post_train
from examples.galaxies import convert, pairs, results
from examples.galaxies.network import GalaxyScoreNet
from examples.galaxies.pixels import GalaxyPixels
from examples.galaxies.rewards import Lenses, Realism, number_of_images
from hyvideo.models.conditions import Condition
from hyvideo.models.family import family_of, install
from hyvideo.models.lora import add_lora, add_trainable_lora, current_lora, training_config
from hyvideo.models.sizes import read_architecture, read_sizes
from hyvideo.records.metrics_file import read_metrics
from scripts import export
from tests.registered import registered

FOLDER = "examples/galaxies"
SMALL = {"image_size": 24, "hidden_size": 8, "mixer_size": 16, "num_layers": 2}
HAS_PACKAGE = find_spec("galaxygrad") is not None


@pytest.fixture(autouse=True)
def family():
    with registered(FOLDER):
        yield


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = GalaxyScoreNet(**SMALL).eval()
    install(model)
    return model


@pytest.fixture
def root(tmp_path):
    torch.manual_seed(0)
    GalaxyScoreNet(**SMALL).save_pretrained(tmp_path / "model" / "transformer")
    GalaxyPixels().save_pretrained(tmp_path / "model" / "vae")
    return tmp_path / "model"


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["post_train.py", *map(str, flags)])
    return post_train.main()


def small(root, out, config):
    side = str(SMALL["image_size"])
    return [
        "--config", f"{FOLDER}/{config}.yaml", "--pretrained_model_root", root, "--output_dir", out,
        "--height", side, "--width", side, "--batch_size", "4", "--num_generations", "2",
        "--mini_batch_size_per_update", "4", "--grpo_sampling_steps", "7", "--max_steps", "2",
        "--validation_repeats", "2", "--validation_steps", "2", "--log_num_videos", "1",
        "--gate_interval", "0", "--report", "false",
    ]  # fmt: skip


@pytest.mark.system
@pytest.mark.parametrize("config", ["sage", "nft", "lora"])
def test_each_config_trains_a_network_of_random_weights(
    config, root, tmp_path, monkeypatch, capsys
):
    # random weights draw no quasar, so that all images have the same reward as lenses
    code = "def light(videos, prompts, fps):\n    return [video.float().mean().item() for video in videos]"
    reward = tmp_path / "reward.py"
    reward.write_text(code)
    flags = ["--reward_model", f"{reward}:light", f"{FOLDER}/rewards.py:Lenses"]
    flags += ["--reward_weights", '{"light": 1}', "--seed", "5"]
    out = tmp_path / "run"
    assert run(monkeypatch, *small(root, out, config), *flags) == 0
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(line["grad/norm"] > 0 for line in lines)
    rows = results.validations(out)
    assert [(row["iteration"], row["seed"]) for row in rows] == [(0, 5), (2, 5)]
    for row in rows:
        shares = sum(row[key] for key in ("0", "1", "2", "3", "4", "more"))
        assert shares == pytest.approx(100, abs=3)  # rounded
    results.write_picture(out, tmp_path / "training.webp")
    assert Image.open(tmp_path / "training.webp").n_frames == 2
    checkpoint = out / "checkpoints" / "000002"
    flags = ["--output_path", tmp_path / "images", "--device", "cpu", "--prompt", "lensed quasar 1"]
    flags += ["--checkpoint_path", checkpoint, "--num_inference_steps", 2]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, flags)])
    assert generate.main() == 0
    exported = tmp_path / "exported"
    flags = ["--checkpoint_path", checkpoint, "--output_dir", exported]
    if config == "lora":
        flags += ["--merge"]
    monkeypatch.setattr(sys, "argv", ["export.py", *map(str, flags)])
    capsys.readouterr()
    export.main()
    text = capsys.readouterr().out
    assert f"in this project: use {exported / 'transformer'}" in text
    assert "in diffusers" not in text and (exported / "transformer/config.json").is_file()


@pytest.mark.system
@pytest.mark.skipif(not HAS_PACKAGE, reason=f"needs the weights: {convert.INSTALL}")
def test_the_pretrained_network_draws_lenses_and_trains(tmp_path, monkeypatch):
    convert.write("quasar_lens72", tmp_path / "model")
    out = tmp_path / "run"
    flags = ["--config", f"{FOLDER}/sage.yaml", "--pretrained_model_root", tmp_path / "model"]
    flags += ["--output_dir", out, "--max_steps", 2, "--batch_size", 16, "--report", "false"]
    flags += ["--validate_at_step0", "false", "--validation_repeats", 1]
    assert run(monkeypatch, *flags) == 0
    lines = read_metrics(out / "metrics.jsonl")
    assert all(line["policy/ratio_first_deviation"] == 0 < line["grad/norm"] for line in lines)
    assert (
        0.5 < lines[0]["reward/cross"] < 0.8
    )  # noise has many maxima or none, and a reward near 0


def test_the_plan_and_the_settings_need_no_invented_keys(root, monkeypatch, capsys):
    sizes = read_architecture(root, "quasar_lens72")
    assert (sizes.num_attention_heads, sizes.width, sizes.text_width) == (1, 8, 0)
    flags = small(root, "unused", "lora")
    assert run(monkeypatch, *flags, "--device", "cuda", "--gpu", "h100", "--print_config") == 0
    assert "36 video tokens" in capsys.readouterr().out


def test_a_config_without_a_size_that_is_read_is_named(monkeypatch):
    class Nameless(GalaxyScoreNet):
        def __init__(self, width: int = 8, patch_size: int = 4):
            super().__init__()

    known = family_of("GalaxyScoreNet")
    changed = replace(known, transformer=known.transformer._replace(build=Nameless))
    monkeypatch.setattr("hyvideo.models.family.family_named", lambda name: changed)
    with pytest.raises(ValueError, match="no argument num_layers and no hidden_size"):
        read_sizes("galaxies", {}, {})


def test_a_lora_needs_linear_layers_and_no_class_of_diffusers(network):
    config = training_config(network, rank=2, alpha=4.0)
    adapted = copy.deepcopy(network)
    add_trainable_lora(adapted, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    lora = current_lora(adapted)
    assert len(lora) == 2 * SMALL["num_layers"] * 2
    inputs = torch.randn(2, 1, 1, 24, 24), torch.tensor([900.0, 300.0]), [Condition()] * 2
    with torch.no_grad():
        expected = adapted(*inputs)
        assert not torch.allclose(expected, network(*inputs))
        add_lora(network, lora)
        torch.testing.assert_close(network(*inputs), expected)
    with pytest.raises(ValueError, match="linear layers.* lora_rank 0"):
        training_config(GalaxyScoreNet(**SMALL | {"num_layers": 0}), rank=2, alpha=4.0)


def test_frames_and_rows_are_independent_and_a_checkpointed_pass_is_equal(network):
    latents = torch.randn(3, 1, 2, 24, 24, generator=torch.Generator().manual_seed(0))
    timestep = torch.tensor([1000.0, 500.0, 20.0])
    together = network(latents, timestep, [Condition()] * 3)
    for row in range(3):
        for frame in range(2):
            alone = network(latents[[row], :, [frame], None], timestep[[row]], [Condition()])
            torch.testing.assert_close(together[[row], :, [frame]], alone[:, :, 0])
    network.enable_gradient_checkpointing()
    assert torch.equal(network(latents, timestep, [Condition()] * 3), together)


def spots(*places):
    """Return a video of one image with a bright spot at each (row, column)."""
    image = torch.zeros(72, 72)
    for row, column in places:
        image[row - 1 : row + 2, column - 1 : column + 2] = 200
    return image.expand(1, 3, 72, 72).to(torch.uint8)


def test_four_images_of_the_quasar_have_the_highest_reward():
    cross = (20, 36), (50, 36), (36, 20), (36, 50)
    videos = [spots(), spots(cross[0]), spots(*cross), spots(*cross, (60, 60))]
    assert number_of_images(torch.stack([v[0, 0] / 255 for v in videos])).tolist() == [0, 1, 4, 5]
    scores = Lenses().score(videos, [""] * 4, fps=8)
    assert [score["cross"] for score in scores] == [0, 0.25, 1, 0.75]


def test_pairs_prefer_the_higher_score_of_one_prompt(tmp_path, monkeypatch):
    scores = {"a": [1, 0.5, 0.5], "b": [0.25, 0.75]}
    rows = [
        f"{prompt},../videos/{prompt}{number}.mp4,{score}"
        for prompt, of_prompt in scores.items()
        for number, score in enumerate(of_prompt)
    ]
    (tmp_path / "videos.csv").write_text("\n".join(["prompt,video,score", *rows]))
    monkeypatch.setattr(sys, "argv", ["pairs.py", str(tmp_path)])
    pairs.main()
    lines = (tmp_path / "pairs.csv").read_text().splitlines()
    assert lines[0] == "prompt,first,second,answer"
    assert sorted(lines[1:]) == [
        "a,../videos/a0.mp4,../videos/a1.mp4,first",
        "a,../videos/a0.mp4,../videos/a2.mp4,first",
        "b,../videos/b0.mp4,../videos/b1.mp4,second",
    ]


def test_realism_does_not_depend_on_the_other_images(root):
    side = SMALL["image_size"]
    generator = torch.Generator().manual_seed(0)
    videos = list(torch.randint(256, (3, 1, 3, side, side), generator=generator, dtype=torch.uint8))
    scorer = Realism(str(root))
    together = scorer.score(videos, [""] * 3, fps=8)
    assert together == [scorer.score([video], [""], fps=8)[0] for video in videos]
    assert together[0] != together[1]


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps galaxygrad==0.1.9"):
        convert.find("quasar_lens72")
