"""gpu_check with tiny models on the CPU, so that every check has run before it runs on a GPU."""

import json
import re
import subprocess
import sys

import pytest
import torch

from hyvideo.distributed.parallelize import PRECISION_CASTS
from hyvideo.models.family import prepare
from hyvideo.models.fit_checks import check_checkpoint
from hyvideo.models.loading import load_vae
from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.planning.flops import count_parameters
from scripts.gpu_check import NUMBERS, PARTS, WITHOUT_AV, main
from tests.conftest import ROOT
from tests.cuda import full_width, workload
from tests.cuda.recipes import config_files
from tests.cuda.speed import Workload

LIMIT_OF_A_PART, LIMIT_OF_ALL = 570, 40 * 60  # seconds
MIB = 2**20
# what may be copied to a rented machine; wheels of scripts/pack_for_gpu.sh
COPIED_MIB, WHEELS_MIB = 64, 11


@pytest.mark.slow
def test_every_check_passes_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = ["--output_dir", str(tmp_path / "out"), "--work_dir", str(tmp_path / "work")]
    code = main(["all", "weights", "--tiny", "--device", "cpu", *folders])
    results = json.loads((tmp_path / "out" / "gpu.json").read_text())
    failed = [result for result in results if not result["ok"]]
    assert not failed and code == 0
    rows = {result["check"]: result["rows"] for result in results}
    assert list(rows) == [*(name for checks in PARTS.values() for name in checks), "parity"]
    assert all(rows.values())
    assert len(rows["profile"][0].keys() - {"what", "ok", "seconds"}) == 20
    assert [row["counted GB"] for row in rows["counts"]] == [5.95, 11.41, 153.7, 228.6]
    for how in ("eager", "compiled"):
        assert [row["grad"] for row in rows[f"on_policy_{how}"] if "grad" in row] == [0]
    assert [(row["deterministic"], row["bit for bit"]) for row in rows["resume"]] == [(True, True)]
    pilots = rows["pilot_wan"] + rows["pilot_hunyuanvideo"]
    assert all(row["iteration 1, s"] > 0 and row["time/update"] > 0 for row in pilots)
    found = {(check, name) for check, each in rows.items() for row in each for name in row}
    named = {(number.check, number.value) for number in NUMBERS}
    assert named <= found  # the summary names values that the checks record
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.system
def test_the_first_checks_pass_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    chosen = ["machine", "attention", "on_policy_eager", "copies"]
    folders = ["--output_dir", str(tmp_path / "out"), "--work_dir", str(tmp_path / "work")]
    code = main(["eager", "--only", *chosen, "--tiny", "--device", "cpu", *folders])
    results = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert code == 0 and [(result["check"], result["ok"]) for result in results] == [
        (name, True) for name in chosen
    ]
    assert [row["grad"] for row in results[2]["rows"] if "grad" in row] == [0]


def test_the_limits_of_each_part_fit_ten_minutes_and_leave_time():
    for checks in PARTS.values():
        assert sum(check.seconds for check in checks.values()) <= LIMIT_OF_A_PART
        for name, check in checks.items():
            assert check.seconds >= 1.5 * check.expected, name
    assert (
        sum(check.seconds for checks in PARTS.values() for check in checks.values()) <= LIMIT_OF_ALL
    )


def test_every_config_is_named_by_a_check_and_every_named_config_exists():
    named = {
        name for checks in PARTS.values() for check in checks.values() for name in check.configs
    }
    assert named == set(config_files()) - {"miniature_dpo"}  # it needs rated pairs


def test_a_check_of_compiled_blocks_runs_after_their_compilation():
    names = [name for checks in PARTS.values() for name in checks]
    for name in ("on_policy_compiled", "speed", "fp8", "pilot_wan", "fsdp"):
        assert names.index("compile") < names.index(name)


def test_a_number_of_the_summary_names_a_check_and_a_test_of_it():
    checks = {name: check for part in PARTS.values() for name, check in part.items()}
    for number in NUMBERS:
        source = (ROOT / checks[number.check].arguments[0].partition("::")[0]).read_text()
        test = re.match(r"(test_\w+)", number.row)
        assert number.low <= number.high and (test is None or f"def {test[1]}(" in source), (
            number.title
        )


@pytest.mark.parametrize("version", ["480p_t2v_distilled", "wan2.1_t2v_1.3b"])
def test_the_checkpoints_of_the_pilots_have_the_released_sizes(tmp_path, version):
    full_width.write(tmp_path / "checkpoints", version, ["a cat"], is_tiny=False)
    released = released_sizes(version)
    written = read_architecture(tmp_path / "checkpoints", version)
    assert count_parameters(written) == count_parameters(released)
    assert written.image_tokens(81, 480, 832) == released.image_tokens(81, 480, 832)
    assert check_checkpoint(tmp_path / "checkpoints", version, [], weights_needed=False) == []


@pytest.mark.parametrize("version", ["480p_t2v_distilled", "wan2.1_t2v_1.3b"])
def test_a_vae_that_is_loaded_to_a_gpu_with_random_weights_is_channels_last(
    tmp_path, monkeypatch, version
):
    """The check `decode` loads its VAE in this way.

    Its device is replaced, because here is no GPU.
    """
    full_width.write(tmp_path / "checkpoints", version, ["a cat"], is_tiny=True)
    monkeypatch.setattr(
        "hyvideo.models.loading._load_weights", on_cpu("hyvideo.models.loading", "_load_weights", 3)
    )
    monkeypatch.setattr(
        "hyvideo.models.loading._stream", on_cpu("hyvideo.models.loading", "_stream", 3)
    )
    vae = load_vae(tmp_path / "checkpoints", device="cuda", random_weights_seed=0)
    weights = [module.weight for module in vae.modules() if isinstance(module, torch.nn.Conv3d)]
    assert weights and all(
        weight.is_contiguous(memory_format=torch.channels_last_3d) for weight in weights
    )
    assert "load_vae(root," in (ROOT / "tests/cuda/test_decode.py").read_text()


def on_cpu(module, name, position):
    """Return a function of a module with its argument ``device``, at a position, replaced by the
    CPU.
    """
    original = getattr(sys.modules[module], name)
    return lambda *arguments: original(*arguments[:position], "cpu", *arguments[position + 1 :])


def test_the_working_tree_and_the_wheels_can_be_copied_to_a_rented_machine():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs git")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    assert (
        sum(file.stat().st_size for file in files if file.is_file()) / MIB + WHEELS_MIB < COPIED_MIB
    )


@pytest.mark.slow
def test_hyvideo_can_be_imported_with_the_replacement_of_av():
    code = "import av, hyvideo.data.videos; assert 'without_av' in av.__file__; av.open('x')"
    environment = {"PYTHONPATH": f"{WITHOUT_AV}:{ROOT}", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "this check needs the package av" in done.stderr.splitlines()[-1]


def test_blocks_run_eagerly_after_a_failed_compilation(tmp_path, monkeypatch):
    monkeypatch.setattr(workload, "DEVICE", torch.device("cpu"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    work = Workload(torch.device("cpu"), sizes=workload.TINY_MODEL, grid=(1, 2, 2), text_tokens=4)
    model = work.transformer()
    prepare(model, {"text"})
    workload.arrange(model, compile=True)
    assert (
        workload.compile_problem() == ""
        and model.transformer_blocks[0]._compiled_call_impl is not None
    )
    (tmp_path / workload.COMPILE_FAILED).write_text("RuntimeError: PassManager::run failed")
    workload.arrange(model, compile=True)
    assert (
        "PassManager" in workload.compile_problem()
        and model.transformer_blocks[0]._compiled_call_impl is None
    )


@pytest.mark.parametrize("value, is_rounded", [(None, True), ("true", True), ("false", False)])
def test_a_variable_compiles_without_rounding_between_fused_operations(
    monkeypatch, value, is_rounded
):
    monkeypatch.setattr(workload, "DEVICE", torch.device("cpu"))
    monkeypatch.delenv(PRECISION_CASTS, raising=False)
    if value:
        monkeypatch.setenv(PRECISION_CASTS, value)
    work = Workload(torch.device("cpu"), sizes=workload.TINY_MODEL, grid=(1, 2, 2), text_tokens=4)
    model = work.transformer()
    prepare(model, {"text"})
    with torch._inductor.config.patch(emulate_precision_casts=not is_rounded):
        workload.arrange(model, compile=True)
        assert torch._inductor.config.emulate_precision_casts is is_rounded


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["eager", "--device", "cpu", "--tiny", "--only", "speed"],
            "--only must name checks among machine, attention",
        ),
        (["weights", "--device", "cpu"], "weights needs --pretrained_model_root, the folder"),
        (["eager", "--out", "/proc/no/folder"], "the output must be a folder that can be created"),
    ],
)
def test_a_usage_error_exits_with_2_and_a_message(
    capsys, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_missing_gpu_is_reported(capsys, tmp_path):
    if torch.cuda.is_available():
        return
    with pytest.raises(SystemExit) as ended:
        main(["eager", "--out", str(tmp_path / "out"), "--work_dir", str(tmp_path / "work")])
    assert ended.value.code == 2 and "device cuda needs a GPU" in capsys.readouterr().err
