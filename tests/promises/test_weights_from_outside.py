"""Promise 6: weights from outside that are missing, cut, zero-filled in larger parts, not finite or
of another model are refused while they are loaded, before rollouts.
"""

import shutil
import subprocess

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.forked import ROOT, python
from tests.promises.runs import Run

TRANSFORMER = "transformer/miniature/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
ENCODER = "text_encoder/llm/model.safetensors"
REWARD = "VideoReward/checkpoint-1/model.pth"


@pytest.fixture
def root(tmp_path):
    return shutil.copytree(ROOT / "assets" / "miniature", tmp_path / "root")


@pytest.fixture
def run(root, tmp_path):
    """A run of one iteration with weights from files."""
    return Run(
        tmp_path,
        max_steps=1,
        pretrained_model_root=str(root),
        random_weights="false",
        reward_model="miniature_videoalign",
        reward_weights="alignment",
    )


def check_refused(run, *names):
    """Check that a run ends with one sentence that has these names, before rollouts."""
    result = run.start()
    assert result.code == 2 and "Traceback" not in result.output, result.output
    message = result.output.strip().splitlines()[-1]
    assert all(str(name) in message for name in names), result.output
    assert not run.sampled() and not (run.out / "checkpoints").exists()


def zero(path, start, end):
    """Replace a part of a file by zeros; ``start`` and ``end`` are shares of its size."""
    content = bytearray(path.read_bytes())
    places = slice(int(start * len(content)), int(end * len(content)))
    content[places] = bytes(places.stop - places.start)
    path.write_bytes(content)


def test_a_file_whose_second_half_is_zero_is_refused_and_the_whole_one_is_not(run, root):
    result = run.start()
    assert result.code == 0, result.output
    shutil.rmtree(run.out)
    run.log.write_text("")
    zero(root / TRANSFORMER, 0.5, 1)
    check_refused(run, root / TRANSFORMER, "double_blocks.2.txt_attn_q.weight")


@pytest.mark.system
@pytest.mark.parametrize("name", [ENCODER, REWARD])
def test_parts_of_zeros_are_found_in_every_file_of_weights(run, root, name):
    zero(root / name, 0.25, 0.75)
    check_refused(run, (root / name).parent)


def set_nan(path):
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] = torch.nan
    path.unlink()  # the tensors map the file
    save_file(tensors, path)


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "NaN": set_nan,
    "of another model": lambda path: shutil.copyfile(path.parents[2] / VAE, path),
    "unfinished": lambda path: path.with_name(f"{path.name}.aria2").touch(),
}


@pytest.mark.system
@pytest.mark.parametrize("kind", DAMAGE)
def test_other_damage_is_refused(run, root, kind):
    DAMAGE[kind](root / TRANSFORMER)
    result = run.start()
    assert result.code == 2 and "Traceback" not in result.output, result.output
    assert str((root / TRANSFORMER).parent) in result.output and not run.sampled()


@pytest.mark.system
def test_a_damaged_lora_is_refused_and_a_new_one_is_not(finished, tmp_path):
    shutil.copytree(finished.checkpoint(3) / "lora", tmp_path / "lora")
    (file,) = (tmp_path / "lora").glob("*.safetensors")
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        header = opened.metadata()  # it has the strength
    new = {name: 0 * tensor if ".lora_B" in name else tensor for name, tensor in tensors.items()}
    run = Run(tmp_path, max_steps=1, pretrained_lora_path=str(tmp_path / "lora"))
    for content, code in ((tensors, 0), (new, 0), ({k: 0 * v for k, v in tensors.items()}, 2)):
        file.unlink()
        save_file({name: tensor.clone() for name, tensor in content.items()}, file, header)
        result = run.start()
        assert result.code == code, result.output
        assert (str(file) in result.output) == (code == 2)
        shutil.rmtree(run.out, ignore_errors=True)


@pytest.mark.system
def test_generate_makes_no_video_with_damaged_weights(root, tmp_path):
    command = [python(), "generate.py", "--config", "configs/miniature.yaml", "--prompt", "a"]
    command += ["--pretrained_model_root", str(root), "--output_path", str(tmp_path / "videos")]
    zero(root / VAE, 0.5, 1)
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 2 and str(root / VAE) in result.stderr, result.stderr
    assert not [*tmp_path.rglob("*.mp4")]
