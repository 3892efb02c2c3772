"""Memory of the programs that follow a run on its card."""

from pathlib import Path

import pytest

from hyvideo.models.sizes import released_sizes
from hyvideo.planning.chain import chain, chain_rows
from hyvideo.planning.hardware import hardware_of
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import parse

ROOT = Path(__file__).parents[2]
# by config, the card that its name or its first line says, other than one of 24 GB
CARDS = {
    "wan22_a14b_1gpu_48gb": "L40S",
    "wan22_a14b_1gpu_i2v": "L40S",
    "wan21_4gpu_hpsv3": "L40S",
    "wan22_a14b_1gpu_80gb": "H100",
    "wan22_a14b_8gpu": "H100",
    "wan21_i2v_14b_1gpu_80gb": "H100",
}
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "gpu" in path.stem)


def planned(name, card, **settings):
    config = parse(["--config", str(ROOT / "configs" / f"{name}.yaml")]).config
    config = config.with_settings(device="cuda", **settings)
    architecture = released_sizes(config.model.transformer_version)
    num_gpus = int(name.partition("gpu")[0].rpartition("_")[2])
    return PlannedRun(config, num_gpus, architecture, hardware=hardware_of(card))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_what_trains_on_a_card_is_validated_sampled_and_evaluated_there(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    is_small = path.stem.startswith("wan") or path.stem.endswith("24gb")
    card = CARDS.get(path.stem, "RTX 4090" if is_small else "H100")
    run = planned(path.stem, card)
    needs = {need.program: need for need in chain(run)}
    assert {"training", "validation", "generate.py", "scripts.evaluate"} <= needs.keys()
    assert ("scripts.improve" in needs) == (run.config.objective.name == "sft")
    for need in needs.values():
        assert need.gpu_gib <= run.hardware.gpu_memory, need
        if "24gb" in path.stem or path.stem == "wan22_a14b_1gpu_sft":
            assert need.host_gib < 60, "of the 64 GB in the header of the config"


def test_a_program_that_does_not_fit_is_named_with_what_to_set(monkeypatch):
    monkeypatch.chdir(ROOT)
    size = {"validation_height": 720, "validation_width": 1280, "validation_num_frames": 81}
    run = planned("wan21_1gpu_nft", "RTX 4090", validation_batch_size=8, **size)
    rows = [text for _, text in chain_rows(run)]
    too_large = {row.partition(":")[0]: row for row in rows if "TOO LARGE" in row}
    assert too_large.keys() == {"validation", "scripts.evaluate"}
    assert too_large["scripts.evaluate"].endswith("lower validation_batch_size")
