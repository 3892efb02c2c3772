"""The plan of a run on rated pairs counts no sampling, decoding or scoring, except in
validation.
"""

import pytest

from hyvideo.models.sizes import read_architecture
from hyvideo.planning.hardware import hardware_of
from hyvideo.planning.hours import (
    forwards_per_rollout,
    stage_seconds,
    training_forwards,
    validation_seconds,
)
from hyvideo.planning.memory import memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config
from tests.forked import ROOT
from tests.rated_pairs import PROMPTS, write_pairs


@pytest.fixture
def planned(monkeypatch):
    """A function from a config to its plan on one GPU."""
    monkeypatch.chdir(ROOT)

    def plan(name, **settings):
        config = load_config(f"configs/{name}.yaml", **settings).resolved()
        architecture = read_architecture("nowhere", config.model.transformer_version)
        return PlannedRun(config, 1, architecture, hardware=hardware_of("H100"))

    return plan


def test_a_pair_costs_the_base_model_the_update_and_with_single_videos_one_more_pass(planned):
    whole = planned("wan21_1gpu_dpo")
    assert forwards_per_rollout(whole) == pytest.approx(1 + training_forwards(whole))
    single = whole.with_settings(mini_batch_size_per_update=1)
    assert forwards_per_rollout(single) == pytest.approx(2 + training_forwards(single))
    assert forwards_per_rollout(whole.with_settings(nft_levels=3)) == pytest.approx(
        3 * (1 + training_forwards(whole))
    )


def test_an_iteration_samples_decodes_and_scores_nothing_but_a_validation_does(planned):
    run = planned("hunyuanvideo15_1gpu_dpo")
    stages = stage_seconds(run)
    assert stages["rollout"] == stages["decode"] == 0 < stages["anchor"] < stages["update"]
    as_nft = run.with_settings(objective="nft", kl_strategy="fixed")
    assert validation_seconds(run, 64) == pytest.approx(validation_seconds(as_nft, 64))
    assert validation_seconds(run, 64) > 0
    phases = memory(run).phases
    assert (
        "rollout" not in phases
        and "encode videos" in phases
        and "reward models" not in phases["anchor"]
    )
    without = run.with_settings(valid_video_csv=[])
    assert without.reward_bytes == 0 < run.reward_bytes


def test_pairs_are_not_read_as_prompts(planned, tmp_path, capfd):
    """Pairs of pictures would be refused, and a line would name the videos as columns not read."""
    path = write_pairs(tmp_path / "rated")
    settings = {"valid_video_csv": [], "pair_weights": {}}
    run = planned("wan21_1gpu_dpo", pairs_csv=[str(path)], **settings)
    assert run.num_prompts == len(PROMPTS)
    missing = planned("wan21_1gpu_dpo", pairs_csv=[str(tmp_path / "later.csv")], **settings)
    assert missing.num_prompts == 0
    assert not capfd.readouterr().err
