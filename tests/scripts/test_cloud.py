"""The tasks of configs/cloud: a person with rented machines types one line. tests/test_docs.py checks
their commands and flags.
"""

import subprocess

import pytest
import yaml

from hyvideo.settings.command_line import load_config
from hyvideo.settings.processes import FINAL_CODES, STOPPED_CODE
from tests.forked import ROOT

TASK = yaml.safe_load((ROOT / "configs/cloud/skypilot.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", ["setup", "run"])
def test_a_script_is_valid_bash(part):
    subprocess.run(["bash", "-n"], input=TASK[part], text=True, check=True)


def test_the_weights_are_those_of_the_config():
    envs = TASK["envs"]
    config = load_config(ROOT / "configs" / f"{envs['CONFIG']}.yaml")
    command = ["bash", "download_weights.sh", "--version", envs["VERSION"]]
    done = subprocess.run(
        [*command, "--with", envs["PARTS"], "--dry_run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"--local-dir {config.model.pretrained_model_root}\n" in done.stdout
    assert config.model.transformer_version.startswith(envs["VERSION"])
    for reward in config.reward.reward_model:
        assert {"videoalign": "VideoReward"}[reward] in done.stdout


def test_a_machine_is_replaced_only_if_the_run_wants_to_be_repeated():
    recovery = TASK["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [STOPPED_CODE]
    # this counts restarts after any code, of which 2 and 3 must not be repeated
    assert recovery["max_restarts_on_errors"] == 0
    assert set(FINAL_CODES) - {STOPPED_CODE} == {2, 3}


def test_results_go_to_the_bucket():
    (folder,) = TASK["file_mounts"]
    assert TASK["file_mounts"][folder]["name"] == "${BUCKET}"
    lines = [line for line in TASK["run"].splitlines() if "--output_dir" in line]
    assert len(lines) == 2 and all(f'--output_dir "{folder}/$CONFIG' in line for line in lines)
