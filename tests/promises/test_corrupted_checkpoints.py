"""Promise 5: an incomplete or corrupted checkpoint is never loaded, exported or sampled; it is kept,
and the next older one is used.
"""

import subprocess

import pytest

from tests.forked import ROOT, python
from tests.promises.runs import flip_a_byte
from tests.shallow import SHALLOW


def tensors_of(checkpoint):
    return max((checkpoint / "tensors").glob("*.distcp"), key=lambda path: path.stat().st_size)


FAULTS = {
    "changed": lambda folder: flip_a_byte(tensors_of(folder)),
    "cut": lambda folder: tensors_of(folder).write_bytes(b"the beginning"),
    "without digests": lambda folder: (folder / "digests.json").unlink(),
}


@pytest.mark.parametrize(
    "fault",
    [
        name if name == "changed" else pytest.param(name, marks=pytest.mark.system)
        for name in FAULTS
    ],
)
def test_the_next_older_checkpoint_is_used_and_the_corrupted_one_is_kept(copy, finished, fault):
    newest = copy.checkpoint(3)
    FAULTS[fault](newest)
    kept = sorted(path.read_bytes() for path in newest.rglob("*") if path.is_file())
    result = copy.start(max_steps=3)
    assert result.code == 0 and "resuming from iteration 2" in result.output, result.output
    assert str(newest) in result.output
    assert copy.names() == ["000001", "000002", "000003", "000003.corrupted"]
    renamed = newest.with_name("000003.corrupted")
    assert sorted(path.read_bytes() for path in renamed.rglob("*") if path.is_file()) == kept
    assert copy.saved(3) == finished.saved(3)


def test_a_run_whose_checkpoints_are_all_corrupted_keeps_everything_and_stops(copy):
    for iteration in (1, 2, 3):
        flip_a_byte(tensors_of(copy.checkpoint(iteration)))
    before = copy.files()
    result = copy.start()
    assert result.code == 2 and "Traceback" not in result.output
    assert all(str(copy.checkpoint(iteration)) in result.output for iteration in (1, 2, 3))
    assert copy.files() == before


def test_a_checkpoint_that_is_named_is_not_replaced_by_another_one(copy):
    flip_a_byte(tensors_of(copy.checkpoint(2)))
    result = copy.start(resume_from_checkpoint=str(copy.checkpoint(2)))
    assert result.code == 2 and str(copy.checkpoint(2)) in result.output
    assert copy.names() == ["000001", "000002", "000003"]


@pytest.mark.system
@pytest.mark.parametrize("program", ["scripts/export.py", "generate.py"])
def test_a_corrupted_checkpoint_is_neither_exported_nor_sampled(copy, tmp_path, program):
    checkpoint = copy.checkpoint(3)
    flip_a_byte(tensors_of(checkpoint))
    command = [python(), program, "--checkpoint_path", checkpoint, "--output_dir", tmp_path / "out"]
    if program == "generate.py":
        command[-2:] = ["--output_path", tmp_path / "out", "--prompt", "a red circle moves up"]
    else:
        command += [
            "--merge",
            "--lora_path",
            checkpoint / "lora",
            "--pretrained_model_root",
            ROOT / SHALLOW,
        ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 2 and str(checkpoint) in result.stderr, result.stderr
    assert not [*(tmp_path / "out").glob("*")]
