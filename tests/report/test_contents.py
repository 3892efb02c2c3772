"""Content of a report read from a run's files: verdict, gains, reasons of missing rewards."""

import shutil

import pytest

from hyvideo.report.contents import read_run
from hyvideo.report.page import write_report
from hyvideo.validation.intervals import t_quantile
from tests.report.recorded_runs import PROMPTS, record_run


def test_the_gain_is_paired_by_video_with_an_interval_over_prompts(tmp_path):
    run = read_run(record_run(tmp_path / "run", gains=(0.2, 0.4)))
    assert run.gain.mean == pytest.approx(0.3)
    half_width = t_quantile(len(PROMPTS) - 1) * 0.1 / (len(PROMPTS) - 1) ** 0.5
    assert run.gain.high - run.gain.mean == pytest.approx(half_width)
    assert run.gains == pytest.approx({k: 0.4 if k % 2 else 0.2 for k in range(len(PROMPTS))})
    assert run.series.seconds == pytest.approx(27)


def test_the_gain_on_unseen_prompts_is_over_prompts_that_are_not_in_prompts_csv(tmp_path):
    (tmp_path / "train.csv").write_text("prompt\nprompt 0\nPROMPT 2\nprompt 4\n")
    run = read_run(
        record_run(tmp_path / "run", gains=(0.2, 0.4), prompts_csv=str(tmp_path / "train.csv"))
    )
    assert run.unseen == [0, 2, 4, 6, 7]  # prompt k is video k + 1
    assert run.gain_over(run.unseen).mean == pytest.approx((4 * 0.2 + 0.4) / 5)
    (tmp_path / "train.csv").unlink()
    assert not read_run(tmp_path / "run").unseen


def test_the_seen_prompts_of_a_run_on_given_videos_are_those_it_trained_on(tmp_path):
    """Those of held-out pairs are unseen, and prompts_csv is not a setting of the run."""
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_text(name)
    rows = "".join(f"prompt {number},a.mp4,b.mp4,first\n" for number in range(4))
    (tmp_path / "pairs.csv").write_text(f"prompt,first,second,answer\n{rows}")
    pairs = [str(tmp_path / "pairs.csv")]
    run = read_run(record_run(tmp_path / "run", objective="dpo", pairs_csv=pairs))
    seen = {
        request.prompt
        for request in run.config.objective.read_videos(run.config.data.seed).requests
    }
    prompts = {number: run.after[number]["prompt"] for number in run.gains}
    assert len(seen) == 3 and {prompts[number] for number in run.unseen} == {*PROMPTS} - seen
    write_report([tmp_path / "run"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "(not in <code>pairs_csv</code>)" in text and "<code>prompts_csv" not in text


@pytest.mark.parametrize(
    "verdict, records",
    [
        ("better", {"gains": (0.2, 0.3)}),
        ("worse", {"gains": (-0.2, -0.3)}),
        ("unclear", {"gains": (0.3, -0.3)}),
        ("suspect", {"gains": (0.2, 0.3), "sharpness": 3.0}),
    ],
)
def test_the_verdict_follows_from_the_interval_and_the_reward_hacking_rule(
    tmp_path, verdict, records
):
    run = read_run(record_run(tmp_path / "run", **records))
    assert run.verdict == verdict
    assert ("held_out/sharpness" in run.hacking) == (verdict == "suspect")
    assert run.shifts[-1][0].is_bad == ("sharpness" in records)


def test_a_run_without_a_later_validation_has_no_verdict(tmp_path):
    folder = record_run(tmp_path / "run")
    (folder / "samples" / "000003" / "measures.json").unlink()
    assert read_run(folder).verdict == "none"


def test_a_folder_without_a_run_raises_value_error(tmp_path):
    with pytest.raises(ValueError, match="config"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        read_run(tmp_path / "nowhere")


def test_folders_of_other_names_are_ignored(tmp_path):
    folder = record_run(tmp_path / "run")
    history = read_run(folder).history
    shutil.copytree(folder / "samples/000000", folder / "samples/0\u00b2")  # a digit, but no number
    assert read_run(folder).history == history
