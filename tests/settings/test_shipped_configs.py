"""Shipped configs: legal on the number of GPUs that they name, within their memory, and with the
paper's settings.
"""

import itertools
import re
from pathlib import Path

import pytest

import post_train
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
from hyvideo.settings.rules import check

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


def config_of(path: Path) -> Config:
    return parse(["--config", str(path)]).config


@named(LARGE)
def test_a_large_config_is_printed_with_its_length_and_fits_its_gpus(
    path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(num_gpus(path)))
    flags = [
        "--config",
        str(path),
        "--pretrained_model_root",
        str(tmp_path),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr("sys.argv", ["post_train.py", *flags, "--print_config"])
    code, printed = post_train.main(), capsys.readouterr().out
    assert code == 0, printed
    assert re.search(rf"on {num_gpus(path)} GPUs?, .* GPU-hours", printed)
    assert "longer than a week" not in printed
    hardware = hardware_for(path)
    run = PlannedRun(config_of(path), num_gpus(path), released_sizes("480p_t2v"), hardware=hardware)
    assert memory(run).fits(hardware.gpu_memory)


def test_both_settings_of_the_paper_have_configs_for_8_and_64_gpus():
    assert [path.stem for path in PAPER] == [f"table2_{x}_{n}gpu" for x in "ab" for n in (64, 8)]


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
        "learning_rate": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1, "use_muon": True, "kl_weight": 1e-5,
        "kl_coef": 1e-7, "kl_min_coef": 1e-7, "update_ref_model_step": 10, "validation_interval": 10,
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


@named(STUDENTS)
def test_the_header_of_a_student_says_what_it_learns_and_its_results(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = header(path)
    is_predicted = path in PREDICTED
    assert found.keys() == {"Learns", "Measured"} | ({"Predicted"} if is_predicted else set())
    assert found["Learns"].startswith("few steps")
    assert found["Measured"].startswith("nothing at this size. On the miniature") == is_predicted
    config = config_of(path)
    check(config, num_gpus(path) if is_predicted else 1, on_this_machine=False)
    assert config.objective.name == "distill" and config.anchor_has_own_guidance
    page = (ROOT / "docs" / "few_steps.md").read_text()
    numbers = re.findall(r"(?<![\d.])\d\.\d{2,3}(?!\d)", found["Measured"])
    assert numbers and all(number in page for number in numbers)


@named(RECIPES)
def test_a_header_says_what_a_recipe_learns_with_its_control_and_its_results(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = header(path)
    assert found.keys() == {"Learns", "Control", "Measured"} | (
        {"Predicted"} if path in PREDICTED else set()
    )
    config = config_of(path)
    is_guided = config.anchor_has_own_guidance
    learned = "the reward"
    if config.objective.videos_from:
        learned = "the preferences"
    elif config.objective.name == "draft":
        learned = "the reward and guidance"
    elif is_guided:
        learned = "guidance"
    assert found["Learns"].startswith(learned)
    assert is_guided == path.stem.endswith(("_guidance", "_draft"))
    if config.objective.videos_from:
        assert found["Control"].startswith("none. The base model is the reference")
        check(config, 1, on_this_machine=False)
    else:
        command = found["Control"].removeprefix("the same command with ")
        control = parse(["--config", str(path), *command.split()]).config
        assert (
            control.reward.ignore_rewards
            and control.record.output_dir == f"{config.record.output_dir}_control"
        )
        check(control, num_gpus(path) if path in PREDICTED else 1, on_this_machine=False)
    assert found["Measured"].startswith("nothing at this size. On the miniature") == (
        path in PREDICTED
    )
    studies = " ".join(
        (ROOT / "docs" / f"{page}.md").read_text()
        for page in ("study_recipes", "recipes", "quickstart", "ratings")
    )
    for number in re.findall(r"(?<![\d.])\d\.\d{2,3}(?!\d)", found["Measured"]):
        assert number in studies, number


@named(PREDICTED)
def test_the_predictions_in_a_header_are_those_of_the_plan(path, monkeypatch, check_generated):
    monkeypatch.chdir(ROOT)
    gpus = re.findall(
        r"([\d.]+) h on (an|\d+) (H100|A100|L40S|RTX 4090)", header(path)["Predicted"]
    )
    assert gpus
    text = path.read_text()
    for hours, number, name in gpus:
        run = planned(path, 1 if number == "an" else int(number), hardware_of(name))
        now = f"{whole_run(run).seconds / 3600:.1f}"
        text = text.replace(f" {hours} h on {number} {name}", f" {now} h on {number} {name}")
    gib, disk = f"{memory(run).needed_gib:.1f}", f"{sum(disk_bytes(run).values()) / GIB:.0f}"
    text = re.sub(
        r"; [\d.]+ GiB( per GPU)?, \d+ GiB of disk", rf"; {gib} GiB\1, {disk} GiB of disk", text
    )
    check_generated(path, text)


@named(PREDICTED)
def test_a_recipe_ends_saves_every_hour_and_spends_at_most_15_percent_on_validation(
    path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    config = config_of(path)
    assert config.optimizer.max_steps <= 300 and config.record.save_minutes == 60
    assert config.validation_sampling.size == config.sampling.size
    length = whole_run(planned(path, num_gpus(path), hardware_for(path)))
    assert length.validations >= 3 and length.validation_share <= 0.15


@named(PAPER)
def test_a_paper_config_saves_every_hour(path):
    assert config_of(path).record.save_minutes == 60


def test_one_config_fits_gpus_with_48_and_80_gb():
    path = ROOT / "configs" / "hunyuanvideo15_1gpu.yaml"
    for hardware in map(hardware_of, ("L40S", "H100")):
        assert memory(planned(path, 1, hardware)).fits(hardware.gpu_memory)


@pytest.mark.parametrize(
    "name, world_size, words",
    [
        ("wan21_1gpu_nft", 1, "24 GB"),
        ("wan21_1gpu_guidance", 1, "24 GB"),
        ("wan21_1gpu_dpo", 1, "24 GB"),
        ("wan21_1gpu_student", 1, "24 GB"),
        ("wan21_1gpu_4step", 1, "24 GB"),
        ("wan22_1gpu_i2v_nft", 1, "24 GB"),
        ("wan21_8gpu_nft", 8, "8 GPUs"),
        ("wan21_8gpu_guidance", 8, "8 GPUs"),
    ],
)
def test_a_wan_config_is_legal_and_fits_its_gpus_and_cards_of_24_gb(
    name, world_size, words, monkeypatch
):
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs" / f"{name}.yaml"
    assert words in first_line(path)
    config = config_of(path)
    # where download_weights.sh puts it
    assert config.model.transformer_version in config.model.pretrained_model_root
    architecture = released_sizes(config.model.transformer_version)
    run = PlannedRun(config, world_size, architecture, hardware=hardware_of("RTX 4090"))
    check(config, world_size, on_this_machine=False)
    assert not run.problems and memory(run).fits(run.hardware.gpu_memory)
