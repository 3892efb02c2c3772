"""Shipped configs: legal on the number of GPUs that they name, within their memory, and with the
paper's settings.
"""

import functools
import itertools
import re
from pathlib import Path

import pytest

from hyvideo.checks.rules import check
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.disk import disk_bytes
from hyvideo.planning.hardware import Hardware, hardware_of
from hyvideo.planning.hours import whole_run
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import parse
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.settings.reward_settings import reward_weights

ROOT = Path(__file__).parents[2]
LARGE = sorted((ROOT / "configs").rglob("hunyuanvideo15*.yaml")) + sorted(
    (ROOT / "configs" / "paper").glob("*.yaml")
)
PAPER = [path for path in LARGE if path.parent.name == "paper"]
STUDENTS = sorted((ROOT / "configs").glob("*_student.yaml"))
RECIPES = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if path.stem != "smoke" and path not in STUDENTS
]
PREDICTED = [path for path in [*RECIPES, *STUDENTS] if not path.stem.startswith("miniature")]


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def first_line(path: Path) -> str:
    """Return the first line below that of the schema."""
    return path.read_text().splitlines()[1]


def num_gpus(path: Path) -> int:
    """Return the number of GPUs in the first line of a file."""
    return (
        1 if "one GPU" in first_line(path) else int(re.search(r"(\d+) GPUs", first_line(path))[1])
    )


def hardware_for(path: Path) -> Hardware:
    """Return the smallest GPU of the first line of a file, by default of 80 GB."""
    found = re.search(r"(\d+) GB", first_line(path))
    return hardware_of({"24": "RTX 4090", "48": "L40S", "80": "H100"}[found[1] if found else "80"])


@functools.cache
def config_of(path: Path) -> Config:
    return parse(["--config", str(path)]).config


@named(LARGE)
def test_a_large_config_is_legal_and_fits_its_gpus(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, hardware = config_of(path), hardware_for(path)
    check(config, num_gpus(path), on_this_machine=False)
    run = PlannedRun(config, num_gpus(path), released_sizes("480p_t2v"), hardware=hardware)
    assert memory(run).fits(hardware.gpu_memory)


@named(PAPER)
def test_a_paper_config_has_the_batches_and_updates_of_the_paper(path):
    config, gpus = config_of(path), num_gpus(path)
    plan = make_plan(config, gpus)
    assert (plan.replicas, plan.rollouts, plan.groups) == {8: (8, 32, 8), 64: (64, 256, 64)}[gpus]
    assert f"{plan.groups} prompts, {plan.rollouts} rollouts" in first_line(path)
    assert config.num_updates == 100 and plan.num_trained_steps == 20
    assert config.objective.strategy == "dual_moving"


@named(PAPER)
def test_a_paper_config_has_the_settings_of_the_paper(path):
    config, setting = config_of(path), path.stem[7]
    weights = {"a": (1.0, 1.0, 1.0), "b": (0.5, 0.5, 1.0)}[setting]
    assert reward_weights(config.reward) == dict(zip(("VQ", "MQ", "TA"), weights))
    assert config.record.output_dir == f"outputs/paper/{path.stem}"
    values = config.flat()
    constants = {
        "sample_n_frames": 81, "height": 352, "width": 624, "fps": 24, "grpo_sampling_steps": 20, "shift": 5,
        "cfg_scale": 6, "eta": 0.5, "sde_type": "sage_grpo", "last_step": "stochastic", "clip_range": 1e-4,
        "learning_rate": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1, "optimizer": "muon_all", "kl_weight": 1e-5,
        "kl_coef": 1e-7, "update_ref_model_step": 10, "validation_interval": 10,
        "validation_steps": 40, "validation_num_frames": 121, "validation_shift": 5, "validation_height": 480,
        "validation_width": 864, "validation_seed": 930, "validate_at_step0": True,
    }  # fmt: skip
    assert {name: values[name] for name in constants} == constants


def test_paper_configs_differ_only_in_reward_sharding_and_folder():
    def differing(path: Path, other: Path) -> set[str]:
        first, second = config_of(path).flat(), config_of(other).flat()
        return {name for name in first if first[name] != second[name]} - {"output_dir"}

    a64, a8, b64, b8 = PAPER
    assert differing(a8, b8) == differing(a64, b64) == {"reward_weights"}
    assert differing(a8, a64) == {"dp_replicate"}


# --- headers --------------------------------------------------------------------------------------


def header(path: Path) -> dict[str, str]:
    """Return the labelled parts of the comment at the start of a file, without line breaks."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.lstrip("# ") for line in lines)
    words = re.split(r"(?:^| )(Learns|Control|Measured|Predicted): ", text)
    return dict(zip(words[1::2], words[2::2]))


def planned(path: Path, world_size: int, hardware: Hardware) -> PlannedRun:
    config = config_of(path)
    architecture = released_sizes(config.model.transformer_version)
    return PlannedRun(config, world_size, architecture, hardware=hardware)


def has_control(path: Path) -> bool:
    """Return whether training without rewards changes the weights."""
    objective = config_of(path).objective
    return not objective.videos_from and (objective.strategy != "none" or objective.kl_weight > 0)


@named(RECIPES)
def test_the_control_that_a_header_names_ignores_the_rewards_and_is_legal(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = header(path)["Control"].removeprefix("the same command with ")
    if "--ignore_rewards" not in command:
        assert not has_control(path)
        return
    control = parse(["--config", str(path), *command.split()]).config
    assert control.reward.ignore_rewards
    assert control.record.output_dir == f"{config_of(path).record.output_dir}_control"
    check(control, num_gpus(path) if path in PREDICTED else 1, on_this_machine=False)


@pytest.mark.slow
@named(PREDICTED)
def test_the_predictions_in_a_header_are_those_of_the_plan(path, monkeypatch, check_generated):
    monkeypatch.chdir(ROOT)
    gpus = re.findall(
        r"([\d.]+) h on (an|\d+) (H100|A100|L40S|RTX 4090)", header(path)["Predicted"]
    )
    assert gpus
    text = path.read_text()
    needed = []
    for hours, number, name in gpus:
        run = planned(path, 1 if number == "an" else int(number), hardware_of(name))
        needed.append(memory(run).needed_gib)
        now = f"{whole_run(run).seconds / 3600:.1f}"
        text = text.replace(f" {hours} h on {number} {name}", f" {now} h on {number} {name}")
    gib, disk = f"{min(needed):.1f}", f"{sum(disk_bytes(run).values()) / GIB:.0f}"
    text = re.sub(
        r"; [\d.]+ GiB( per GPU)?, \d+ GiB of disk", rf"; {gib} GiB\1, {disk} GiB of disk", text
    )
    check_generated(path, text)


def test_one_config_fits_gpus_with_48_and_80_gb():
    path = ROOT / "configs" / "hunyuanvideo15_1gpu.yaml"
    for hardware in map(hardware_of, ("L40S", "H100")):
        assert memory(planned(path, 1, hardware)).fits(hardware.gpu_memory)


@named(sorted((ROOT / "configs").glob("wan*.yaml")))
def test_a_wan_config_is_legal_and_fits_its_gpus(path, monkeypatch):
    """All fit cards of 24 GB, except those of Wan2.2 A14B that name others, and HPSv3 for all frames."""
    monkeypatch.chdir(ROOT)
    config = config_of(path)
    # where download_weights.sh puts it
    root = config.model.pretrained_model_root
    assert config.model.transformer_version.removesuffix("_4step") in root
    sizes = {"a14b_1gpu_48gb": "L40S", "a14b_1gpu_i2v": "L40S", "wan21_4gpu_hpsv3": "L40S"}
    sizes["wan21_i2v_14b_1gpu_80gb"] = "H100"
    sizes |= {"a14b_1gpu_80gb": "H100", "a14b_8gpu": "H100"}
    card = sizes.get(path.stem.removeprefix("wan22_"), "RTX 4090")
    architecture = released_sizes(config.model.transformer_version)
    run = PlannedRun(config, num_gpus(path), architecture, hardware=hardware_of(card))
    check(config, num_gpus(path), on_this_machine=False)
    assert not run.problems and memory(run).fits(run.hardware.gpu_memory)
