"""post_train.py and generate.py, run as programs."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

import post_train
from tests.forked import LIGHT, ROOT, python
from tests.settings.test_reference_flags import LINE
from tests.shallow import SHALLOW

SMOKE = ["--config", "configs/smoke.yaml"]


@pytest.fixture
def program(tmp_path, monkeypatch, tiny_config):
    """A function that runs a program in a new process, with the imports of ``preload``."""

    def run(name, *arguments, preload="", cwd=None, **variables):
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        command = [python(preload), name, *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120
        )

    return run


def broken_checkpoint(tmp_path):
    root = tmp_path / "broken"
    shutil.copytree("assets/miniature", root)
    weights = root / "transformer/miniature/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return root


@pytest.mark.parametrize(
    "arguments, output",
    [
        (["--no_such_flag", "1"], "no_such_flag"),
        (
            ["--eta", "-1", "--grpo_sampling_steps", "0"],
            "eta: Input should be greater than or equal to 0",
        ),
    ],
)
def test_bad_input_exits_with_one_message_and_code_2(program, tmp_path, arguments, output):
    result = program("post_train.py", *SMOKE, "--output_dir", tmp_path / "out", *arguments)
    assert result.returncode == 2, result.stderr
    assert output in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


ALLOCATOR = """
import os, runpy, sys

class AtImportOfTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            names = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
            os.write(2, " ".join(str(os.environ.get(name)) for name in names).encode())
            os._exit(1)

sys.meta_path.insert(0, AtImportOfTorch())
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize(
    "name, given, found",
    [
        (
            "post_train.py",
            {},
            "None expandable_segments:True,pinned_max_round_threshold_mb:1",
        ),
        ("post_train.py", {"PYTORCH_ALLOC_CONF": "backend:native"}, "None backend:native"),
    ],
)
def test_the_allocator_is_configured_before_torch_is_imported(
    program, tmp_path, monkeypatch, name, given, found
):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    flags = {
        "post_train.py": [*SMOKE, "--output_dir", tmp_path / "out"],
        "generate.py": ["--prompt", "a red circle"],
    }
    result = program("-c", ALLOCATOR, name, *flags[name], preload=LIGHT, **given)
    assert result.stderr.splitlines()[-1] == found


def hostile(tmp_path, name):
    """Return flags with a hostile configuration, path or prompts file."""
    if name == "aliases":
        (tmp_path / "run.yaml").write_text("report_to: &a [none, *a]\n")
        return ["--config", tmp_path / "run.yaml"]
    if name == "loop":
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        return [*SMOKE, "--output_dir", tmp_path / "loop" / "out"]
    if name == "control":
        (tmp_path / "prompts.csv").write_bytes(
            b"\xef\xbb\xbfprompt\na red circle moves up\na red\x00circle\n"
        )
        return [*SMOKE, "--prompts_csv", tmp_path / "prompts.csv"]
    return [*SMOKE, "--device", "cuda"]


@pytest.mark.parametrize(
    "name, output",
    [
        ("loop", "output_dir must be a writable folder"),
        ("no gpu", "device cuda needs a GPU that torch can use, and none was found"),
    ],
)
def test_hostile_input_exits_with_one_message_and_writes_nothing(program, tmp_path, name, output):
    flags = ["--output_dir", tmp_path / "out", *hostile(tmp_path, name)]
    before = sorted(tmp_path.rglob("*"))
    result = program("post_train.py", *flags, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2 and output in result.stderr, result.stderr
    assert (
        result.stderr.count("post_train.py:") == 1
        and "Traceback" not in result.stderr
        and not result.stdout
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_corrupted_checkpoint_is_reported_before_loading(program, tmp_path):
    out, root = tmp_path / "out", broken_checkpoint(tmp_path)
    flags = ["--output_dir", out, "--pretrained_model_root", root, "--random_weights", "false"]
    result = program("post_train.py", *SMOKE, *flags)
    assert result.returncode == 2 and "diffusion_pytorch_model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr and not out.exists()


def test_a_storage_failure_at_the_start_is_no_error_of_the_user(tmp_path, monkeypatch, capsys):
    """NFS with ESTALE: an exception ends the program with 1, which launchers repeat; the same file
    without permission is an error of the user.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    flags = ["--output_dir", str(tmp_path / "out"), "--valid_video_csv=", "--prompts_csv"]
    (tmp_path / "train.csv").write_text("prompt\na red circle moves up\n")
    monkeypatch.setattr(sys, "argv", ["post_train.py", *SMOKE, *flags, str(tmp_path / "train.csv")])
    opened = open

    def failing(number):
        def fail(path, *arguments, **options):
            if str(path).endswith("train.csv"):
                raise OSError(number, os.strerror(number), str(path))
            return opened(path, *arguments, **options)

        return fail

    with monkeypatch.context() as patch:
        patch.setattr("io.open", failing(errno.ESTALE))
        with pytest.raises(OSError, match="train.csv"):
            post_train.main()
        patch.setattr("io.open", failing(errno.EACCES))
        assert post_train.main() == 2
    assert "train.csv" in capsys.readouterr().err


def test_a_prompt_that_the_reward_cannot_score_is_rejected(program, tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt\na purple circle moves up\n")
    flags = ["--output_dir", tmp_path / "out", "--prompts_csv", tmp_path / "prompts.csv"]
    result = program("post_train.py", *SMOKE, *flags)
    assert result.returncode == 2 and "purple" in result.stderr and "Traceback" not in result.stderr


def test_a_reward_that_exits_does_not_end_the_run_with_code_0(tmp_path, monkeypatch, capsys):
    (tmp_path / "rewards.py").write_text("import sys\nsys.exit(0)\n")
    flags = [
        "--reward_model",
        f"{tmp_path}/rewards.py:Reward",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["post_train.py", *SMOKE, *flags])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert post_train.main() == 2
    assert "rewards.py" in capsys.readouterr().err


@pytest.mark.system
def test_a_failed_on_policy_check_is_one_message_and_code_1(tmp_path, monkeypatch, capsys):
    flags = [
        "--objective",
        "nft",
        "--eta",
        "0",
        "--output_dir",
        str(tmp_path / "out"),
        "--dtype",
        "fp32",
    ]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["post_train.py", *SMOKE, *flags])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    # no difference is small enough
    monkeypatch.setattr("hyvideo.training.on_policy_check.EXACT_STEP", -1.0)
    assert post_train.main() == 1
    assert (
        "post_train.py: iteration 1, objective nft: the distance between a rollout's"
        in capsys.readouterr().err
    )


def test_print_config_prints_settings_and_plan_and_exits(program, tmp_path):
    result = program(
        "post_train.py", *SMOKE, "--output_dir", tmp_path / "out", "--eta", "0.3", "--print_config"
    )
    assert result.returncode == 0 and "eta: 0.3" in result.stdout
    assert (
        "rollouts per iteration 8 = 2 prompts x 4" in result.stdout
        and "missing on this host" not in result.stdout
    )
    assert (
        "whole run              3 iterations of 8 rollouts + 2 validations (8 videos each) = "
        in result.stdout
    )
    assert not (tmp_path / "out").exists()


def test_print_config_rejects_a_wrong_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    arguments = [*SMOKE, "--output_dir", str(tmp_path / "out"), "--height", "33", "--print_config"]
    monkeypatch.setattr(sys, "argv", ["post_train.py", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert post_train.main() == 2
    printed = capsys.readouterr()
    assert "height" in printed.err and "missing on this host" not in printed.out


def test_print_config_works_without_gpus_and_checkpoints(program, tmp_path):
    flags = [*LINE, "--print_config", "--world_size", "8"]
    result = program(ROOT / "post_train.py", *flags, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert (
        "rollouts per iteration 8 = 2 prompts x 4" in result.stdout
        and "- assets/prompts/train.csv" in result.stdout
    )
    names = "vae_dtype, negative_prompt, fps, shift, cfg_scale, validation_steps, validation_eta"
    assert f"\ndefaults of version    {names} (480p_t2v)\n" in result.stdout
    missing = result.stdout[result.stdout.index("missing on this host") :].splitlines()
    assert "got './ckpts': not found" in missing[0]
    assert (
        "each process needs a GPU: needed 8, found 0; device auto would use the CPU" in missing[1]
    )
    assert list(tmp_path.iterdir()) == []


def test_without_print_config_missing_checkpoints_are_an_error(program, tmp_path):
    result = program(ROOT / "post_train.py", *LINE, cwd=tmp_path, WORLD_SIZE="8", RANK="0")
    assert result.returncode == 2
    assert "\npost_train.py: pretrained_model_root must be a checkpoint folder" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_print_config_for_several_gpus_prints_the_launch_command(capsys, monkeypatch):
    file = "configs/paper/table2_b_64gpu.yaml"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["post_train.py", "--config", file, "--print_config"])
    assert post_train.main() == 0
    output = capsys.readouterr().out
    assert (
        f"planned for            torchrun --nnodes=8 --nproc_per_node=8 post_train.py --config {file}"
        in output
        and "--world_size N plans for N processes" in output
    )
    assert "replicas               64 (sp_size 1)" in output


def test_a_short_run_ends_with_a_summary(program, tmp_path):
    flags = [
        "--output_dir",
        tmp_path / "out",
        "--pretrained_model_root",
        SHALLOW,
        "--max_steps",
        "1",
        "--grpo_sampling_steps",
        "2",
        "--validation_steps",
        "1",
        "--cfg_scale",
        "1",
        "--num_threads",
        "1",
    ]
    result = program("post_train.py", *SMOKE, *flags)
    assert result.returncode == 0, result.stderr
    assert (
        "whole run              1 iteration of 8 rollouts + 2 validations (8 videos each) = "
        in result.stdout
    )
    assert "validation videos, same prompts and seeds, iteration 0 -> 1" in result.stdout
    assert (tmp_path / "out" / "before_after.png").is_file()
