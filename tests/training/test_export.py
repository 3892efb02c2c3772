"""scripts/export.py: the written files are the policy, and diffusers can read them."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyvideo.checkpoints.format import DIGESTS, digest_files
from hyvideo.loading.saved_policy import load_merged
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import save_lora
from scripts import export
from tests.models.test_lora import change_of
from tests.tiny_checkpoint import write_original

VERSION = "480p_i2v"
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_original(tmp_path_factory.mktemp("tiny") / "ckpts", (VERSION,))


@pytest.fixture
def policy(root, tmp_path):
    """A trained policy and its checkpoint."""
    transformer = load_transformer(root, VERSION)
    with torch.no_grad():
        transformer.proj_out.weight.mul_(0.5)
    transformer.save_pretrained(tmp_path / "checkpoint" / "transformer")
    return transformer, tmp_path / "checkpoint"


@pytest.fixture
def run(root, tmp_path, exit_code, capsys):
    def call(*flags, out="out"):
        given = [
            "--pretrained_model_root",
            root,
            "--output_dir",
            tmp_path / out,
            "--dtype",
            "fp32",
            *flags,
        ]
        code = exit_code(export.main, *given)
        return code, capsys.readouterr().err

    return call


def write_digests(checkpoint):
    (checkpoint / DIGESTS).write_text(json.dumps(digest_files(checkpoint)))


def assert_same(model, other):
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("form, folder", [("diffusers", "out"), ("original", "transformer/mine")])
def test_an_exported_policy_is_read_back_bit_for_bit(run, policy, tmp_path, form, folder):
    transformer, checkpoint = policy
    code, error = run("--checkpoint_path", checkpoint, "--form", form, out=folder)
    assert code == 0, error
    read = (
        load_transformer(tmp_path, "mine")
        if form == "original"
        else load_transformer(tmp_path / folder, None)
    )
    assert_same(read, transformer)
    assert read.config.task_type == "i2v"


@pytest.fixture
def umask():
    """New files have the mode 0640."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_exported_files_have_the_default_permissions(run, umask, tmp_path):
    """safetensors makes files private to their owner, so that a server of another user could not
    read the weights.
    """
    assert run("--transformer_version", VERSION)[0] == 0
    save_lora(
        {"transformer_blocks.0.attn.to_q": LoraPair(torch.ones(2, 32), torch.ones(32, 2), 2.0)},
        tmp_path / "out",
    )
    modes = {
        file.name: oct(file.stat().st_mode & 0o777)
        for file in (tmp_path / "out").rglob("*")
        if file.is_file()
    }
    assert FILE in modes and len(modes) >= 3
    assert set(modes.values()) == {"0o640"}, modes


def test_a_pipeline_of_diffusers_reads_an_exported_policy(run, policy, tmp_path):
    from diffusers import HunyuanVideo15Transformer3DModel

    transformer, checkpoint = policy
    assert run("--checkpoint_path", checkpoint)[0] == 0
    assert_same(
        HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path / "out" / "transformer"),
        transformer,
    )


def test_a_lora_is_converted_and_merged_into_the_weights(run, root, tmp_path):
    lora = {"transformer_blocks.0.attn.to_q": LoraPair(torch.randn(2, 32), torch.randn(32, 2), 4.0)}
    save_lora(lora, tmp_path / "lora")
    assert run("--lora_path", tmp_path / "lora", "--form", "peft", out="peft")[0] == 0
    (pair,) = read_lora(tmp_path / "peft").values()
    assert torch.equal(pair.a, lora["transformer_blocks.0.attn.to_q"].a)
    flags = ["--lora_path", tmp_path / "lora", "--merge", "--transformer_version", VERSION]
    assert run(*flags, out="merged")[0] == 0
    expected = load_transformer(root, VERSION, loras=[lora])
    assert_same(load_transformer(tmp_path / "merged", None), expected)


def test_the_call_in_the_docs_applies_the_lora_of_a_checkpoint(root, tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/generate.md").read_text()
    (call,) = re.findall(r"`pipeline\.transformer\.(load_lora_adapter\(.+\))`", text)
    lora = {"transformer_blocks.0.attn.to_q": LoraPair(torch.randn(2, 32), torch.randn(32, 2), 4.0)}
    save_lora(lora, tmp_path / "outputs/run/checkpoints/000030/lora")
    monkeypatch.chdir(tmp_path)
    loaded, expected = (
        load_transformer(root, VERSION),
        load_transformer(root, VERSION, loras=[lora]),
    )
    eval(f"loaded.{call}", {"loaded": loaded})
    loaded.fuse_lora()
    loaded.unload_lora()
    assert_same(loaded, expected)


def test_the_lora_of_an_image_to_video_run_is_exported_with_the_settings_of_its_run(
    run, root, tmp_path, monkeypatch, capsys
):
    pair = LoraPair(torch.randn(2, 32), torch.randn(32, 2), 4.0)
    lora = {f"transformer_blocks.0.attn.to_{name}": pair for name in "qkv"}
    checkpoint = tmp_path / "run" / "checkpoints" / "000001"
    (checkpoint / "tensors").mkdir(parents=True)
    save_lora(lora, checkpoint / "lora")
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": VERSION,
        "base_weight_dtype": "fp8",
    }
    (checkpoint / "state.json").write_text(json.dumps({"settings": settings}))
    (checkpoint / "tensors" / ".metadata").touch()
    write_digests(checkpoint)
    expected = load_transformer(root, VERSION, loras=[lora])
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "export.py",
            "--checkpoint_path",
            str(checkpoint),
            "--output_dir",
            str(tmp_path / "whole"),
        ],
    )
    export.main()
    assert (
        "the LoRA was trained on a base model in fp8; it is merged into" in capsys.readouterr().out
    )
    read = load_transformer(tmp_path / "whole", None)
    assert read.config.task_type == "i2v"
    assert_same(read, expected.bfloat16())
    for form in ("diffusers", "peft", "original", "comfyui"):
        code, error = run("--lora_path", checkpoint, "--form", form, out=form)
        assert code == 0, error
        assert read_lora(tmp_path / form).keys() == lora.keys()
        for name, again in read_lora(tmp_path / form).items():
            torch.testing.assert_close(change_of(again), change_of(lora[name]))


def test_the_lines_that_load_a_written_file_are_printed(policy, root, tmp_path, exit_code, capsys):
    lora = {"transformer_blocks.0.attn.to_q": LoraPair(torch.ones(2, 32), torch.ones(32, 2), 2.0)}
    save_lora(lora, tmp_path / "lora")

    def printed(out, *flags):
        words = ["--pretrained_model_root", root, "--output_dir", tmp_path / out, *flags]
        assert exit_code(export.main, *words) == 0
        return capsys.readouterr().out

    given = ("--lora_path", tmp_path / "lora")
    text = printed("a", *given)
    assert f'pipeline.transformer.load_lora_adapter("{tmp_path}/a", use_safetensors=True)' in text
    text = printed("b", *given, "--form", "original")
    assert f'load_lora_adapter("{tmp_path}/b", prefix=None' in text
    text = printed("e", *given, "--form", "comfyui")
    assert f"copy {tmp_path}/e/pytorch_lora_weights.safetensors to ComfyUI/models/loras" in text
    assert f'PeftModel.from_pretrained(pipeline.transformer, "{tmp_path}/c")' in printed(
        "c", *given, "--form", "peft"
    )
    assert (
        f'HunyuanVideo15Transformer3DModel.from_pretrained("{tmp_path}/d", subfolder="transformer"'
        in (printed("d", "--checkpoint_path", policy[1]))
    )
    text = printed("f", "--checkpoint_path", policy[1], "--form", "comfyui")
    assert f"copy {tmp_path}/f/{FILE} to ComfyUI/models/diffusion_models" in text


def test_a_whole_hunyuanvideo_for_comfyui_has_joined_queries_keys_and_values(run, policy, tmp_path):
    """ComfyUI 0.8.0 renames the original's names itself, but has one layer for the three."""
    transformer, checkpoint = policy
    assert run("--checkpoint_path", checkpoint, "--form", "comfyui", out="comfyui")[0] == 0
    assert run("--checkpoint_path", checkpoint, "--form", "original", out="original")[0] == 0
    written, original = (load_file(tmp_path / form / FILE) for form in ("comfyui", "original"))
    weights = transformer.state_dict()
    blocks = range(transformer.config.num_layers)
    streams = {"img": "to_{}", "txt": "add_{}_proj"}
    for number, stream, leaf in itertools.product(blocks, streams, ("weight", "bias")):
        joined = written.pop(f"double_blocks.{number}.{stream}_attn_qkv.{leaf}")
        ours = f"transformer_blocks.{number}.attn.{streams[stream]}.{leaf}"
        assert torch.equal(joined, torch.cat([weights[ours.format(part)] for part in "qkv"]))
        for part in "qkv":
            del original[f"double_blocks.{number}.{stream}_attn_{part}.{leaf}"]
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in written)


def test_a_small_lora_survives_the_rounding_to_bf16(root, tmp_path):
    """Merging it into bf16 weights would silently lose most of it."""
    name = "transformer_blocks.0.attn.to_q"
    weight = load_transformer(root, VERSION).get_submodule(name).weight.detach()
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, weight.shape[1], generator=generator)
    b = 0.5e-3 * weight.std() * torch.randn(len(weight), 4, generator=generator)
    save_lora({name: LoraPair(a, b, 4.0)}, tmp_path / "lora")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensors").mkdir()  # like a checkpoint of LoRA training
    (tmp_path / "run" / "tensors" / ".metadata").touch()
    (tmp_path / "run" / "state.json").write_text("{}")
    save_lora({name: LoraPair(a, b, 4.0)}, tmp_path / "run" / "lora")
    write_digests(tmp_path / "run")
    for checkpoint, lora in ((None, tmp_path / "lora"), (tmp_path / "run", None)):
        merged = load_merged(root, VERSION, checkpoint=checkpoint, lora=lora, dtype=torch.bfloat16)
        written = merged.get_submodule(name).weight.detach()
        assert written.dtype == torch.bfloat16
        assert torch.equal(written, (weight + b @ a).bfloat16())


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "nothing to export: give --checkpoint_path"),
        (["--checkpoint_path", "nowhere"], "nowhere does not exist"),
        (
            ["--transformer_version", VERSION, "--output_dir", "/proc/nothing"],
            "no file can be created in /proc",
        ),
    ],
)
def test_bad_input_ends_with_one_message(run, tmp_path, flags, message):
    code, error = run(*flags)
    assert code == 2 and message in error
    assert not (tmp_path / "out").exists()


def test_export_does_not_overwrite_files(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    code, error = run("--transformer_version", VERSION)
    assert code == 2 and "must be a new or empty folder" in error
    (tmp_path / "out" / "mine").unlink()
    assert run("--transformer_version", VERSION)[0] == 0


def test_a_full_disk_is_one_message(run, policy, tmp_path, limited_file_size):
    with limited_file_size(20_000):
        code, shown = run("--checkpoint_path", policy[1])
    assert code == 2 and shown.startswith("export.py: ") and "File too large" in shown
    assert not (tmp_path / "out").exists(), "a partial export must not look like a complete one"


def test_a_killed_export_leaves_only_partial_files_and_the_same_command_replaces_them(
    run, policy, tmp_path, monkeypatch
):
    def save(_, folder):
        folder.mkdir()
        (folder / "old").touch()
        assert not (tmp_path / "out").exists()
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(type(policy[0]), "save_pretrained", save)
        run("--checkpoint_path", policy[1])
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    code, error = run("--checkpoint_path", policy[1])
    assert code == 0, error
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "transformer"]
    assert not list(tmp_path.glob(".out.*"))
    assert sorted(os.listdir(tmp_path / "out" / "transformer")) == ["config.json", FILE]


# --- the model card, the license and the hub --------------------------------------------------------


def write_run(folder, root, **settings):
    """Write a run with a LoRA checkpoint of iteration 30 and validations at 0 and 20."""
    checkpoint = folder / "checkpoints" / "000030"
    (checkpoint / "tensors").mkdir(parents=True)
    (checkpoint / "tensors" / ".metadata").touch()
    lora = {"transformer_blocks.0.attn.to_q": LoraPair(torch.ones(2, 32), torch.ones(32, 2), 4.0)}
    save_lora(lora, checkpoint / "lora")
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": VERSION,
        "objective": "nft",
        "reward_model": ["videoalign"],
        "prompts_csv": "/home/me/secret/prompts.csv",
        "lora_rank": 2,
        "seed": 7,
        "validation_seed": 930,
        **settings,
    }
    (checkpoint / "state.json").write_text(json.dumps({"settings": settings}))
    write_digests(checkpoint)
    for iteration, reward in ((0, 1.25), (20, 1.5), (40, 9.0)):
        samples = folder / "samples" / f"{iteration:06d}"
        samples.mkdir(parents=True)
        measures = {"reward": reward, "reward_std": 0.5, "VQ": 0.1 + iteration, "missing": 0.0}
        (samples / "measures.json").write_text(
            json.dumps(measures | {"spreads": {"reward": [0.5, 64]}})
        )
    return checkpoint


def card_of(folder):
    from huggingface_hub import ModelCard

    return ModelCard.load(folder / "README.md")


def test_an_exported_lora_has_a_model_card_with_its_run(run, root, tmp_path):
    checkpoint = write_run(tmp_path / "run", root)
    code, error = run("--lora_path", checkpoint / "lora")
    assert code == 0, error
    card = card_of(tmp_path / "out")
    assert card.data.base_model == "tencent/HunyuanVideo-1.5"
    assert card.data.base_model_relation == "adapter" and "lora" in card.data.tags
    assert (card.data.license, card.data.license_name) == ("other", "tencent-hunyuan-community")
    assert card.data.pipeline_tag == "image-to-video"
    assert 'load_lora_adapter("out", use_safetensors=True)' in card.text
    for words in ("nft", "videoalign", "prompts.csv", "| iterations | 30 |", "| seed | 7 |",
                  "| reward | 1.250 ± 0.500 | 1.500 ± 0.500 |", "iteration 20", "64 validation",
                  "validation seed 930"):  # fmt: skip
        assert words in card.text
    assert "9.000" not in card.text  # of a later iteration
    assert "secret" not in card.text and str(tmp_path) not in card.text  # paths of this machine


def test_a_lora_of_another_program_has_a_card_without_a_run(run, tmp_path):
    lora = {"transformer_blocks.0.attn.to_q": LoraPair(torch.ones(2, 32), torch.ones(32, 2), 4.0)}
    save_lora(lora, tmp_path / "lora")
    assert run("--lora_path", tmp_path / "lora")[0] == 0
    card = card_of(tmp_path / "out")
    assert card.data.base_model is None and card.data.license is None
    assert "## Training" not in card.text and "## Use" in card.text


@pytest.mark.parametrize(
    "version, license, name",
    [
        ("480p_t2v", "other", "tencent-hunyuan-community"),
        ("miniature", "apache-2.0", None),
        ("wan2.1_t2v_1.3b_anyflow", "other", "NVIDIA One-Way Noncommercial License"),
    ],
)
def test_a_card_has_the_license_of_the_version(run, tmp_path, version, license, name):
    lora = {"transformer_blocks.0.attn.to_q": LoraPair(torch.ones(2, 32), torch.ones(32, 2), 4.0)}
    save_lora(lora, tmp_path / "lora")
    code, error = run("--lora_path", tmp_path / "lora", "--transformer_version", version)
    assert code == 0, error
    data = card_of(tmp_path / "out").data
    assert (data.license, data.license_name) == (license, name)


def test_the_license_of_the_base_model_lies_beside_the_weights(root, tmp_path, exit_code, capsys):
    checkpoint = write_run(tmp_path / "run", root)

    def printed(out, *flags):
        words = ["--lora_path", checkpoint / "lora", "--output_dir", tmp_path / out, *flags]
        assert exit_code(export.main, *words) == 0
        return capsys.readouterr().out

    assert "before you publish it" in printed("without")
    base = tmp_path / "base"
    base.mkdir()
    (base / "LICENSE.txt").write_text("text")
    (base / "Notice.txt").write_text("notice")
    (base / "licenses_of_others").mkdir()
    assert "before you publish it" not in printed("with", "--pretrained_model_root", base)
    assert (tmp_path / "with/LICENSE.txt").read_text() == "text"
    assert (tmp_path / "with/Notice.txt").read_text() == "notice"


@pytest.mark.parametrize(
    "repository, environment, message",
    [
        ("me/mine", {"HF_TOKEN": ""}, "hf auth login"),
        ("me/mine", {"HF_TOKEN": "hf_none"}, "me/mine cannot be published"),
    ],
)
def test_publishing_without_a_login_ends_before_anything_is_written(
    tmp_path, repository, environment, message
):
    """The address of the hub is one at which nothing listens."""
    save_lora({"a": LoraPair(torch.ones(2, 3), torch.ones(3, 2), 2.0)}, tmp_path / "lora")
    command = [sys.executable, "-m", "scripts.export", "--lora_path", tmp_path / "lora"]
    command += ["--output_dir", tmp_path / "out", "--push_to_hub", repository]
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*map(str, command)],
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.startswith("export.py: ") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "repository, message", [("me/mine/too", "me/mine/too"), ("mine", "OWNER/NAME")]
)
def test_the_name_of_a_repository_is_checked_before_anything_is_written(
    tmp_path, exit_code, capsys, repository, message
):
    save_lora({"a": LoraPair(torch.ones(2, 3), torch.ones(3, 2), 2.0)}, tmp_path / "lora")
    words = ["--lora_path", tmp_path / "lora", "--output_dir", tmp_path / "out"]
    assert exit_code(export.main, *words, "--push_to_hub", repository) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
