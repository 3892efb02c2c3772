"""The comparison page, from records and from short runs of the commands, in a browser."""

import json

import pytest

from hyvideo.report.comparison import (
    differing_settings,
    read_comparison,
    reward_of,
    with_runs_below,
)
from hyvideo.settings.command_line import load_config
from hyvideo.validation.scores_file import Evaluation, write_evaluation
from scripts import preference_study, report
from studies.benchmarks.results import read_results
from studies.benchmarks.table import make_table, write_tables
from studies.preference.rating import Study
from tests.report.recorded_runs import record_run
from tests.studies.benchmarks.test_results import result_file
from tests.studies.preference.conftest import add, write_folder

PROMPTS = ["a red circle moves left", "a blue square moves up", "a green triangle moves down"]
POLICIES = {"base": 0.5, "guided": 0.55, "sage": 0.7}  # scores in the benchmark


@pytest.fixture
def recorded(tmp_path):
    """Records of two runs, and an evaluation of the guided base model."""
    record_run(tmp_path / "sage", gains=(0.2, 0.3))
    record_run(tmp_path / "other", gains=(-0.1, 0.3))
    videos = [
        {"number": k, "prompt": str(k), "group": k, "reward": 0.6, "VQ": 0.1 * k} for k in range(4)
    ]
    write_evaluation(
        tmp_path / "guided base" / "scores.json", Evaluation(videos, {"true/VQ": 0.4}), {}
    )


@pytest.fixture
def others(tmp_path, exit_code):
    """A benchmark read back from result files, an analysed preference study, and folders of
    videos.
    """
    for name, score in POLICIES.items():
        scores = {prompt: [score + 0.01 * number] for number, prompt in enumerate(PROMPTS)}
        result_file(tmp_path / "results" / name / "x_eval_results.json", scene=scores, color=scores)
        write_folder(tmp_path / "videos" / name, PROMPTS)
    (tmp_path / "vbench").mkdir()
    ((suite, policies),) = read_results([f"{name}={tmp_path}/results/{name}" for name in POLICIES])
    write_tables(tmp_path / "vbench", [make_table(suite, policies)])
    methods = [f"{name}={tmp_path}/videos/{name}" for name in POLICIES]
    sizes = ["--raters", 3, "--pairs", 3, "--checks", 1, "--valid_video_csv", ""]
    assert (
        exit_code(preference_study.main, "make", tmp_path / "study", "--methods", *methods, *sizes)
        == 0
    )
    study = Study(tmp_path / "study")
    for token, rater in study.raters.items():
        for pair in rater["pairs"]:
            add(study, token, pair, "tie")
    assert exit_code(preference_study.main, "analyse", tmp_path / "study") == 0


def check_page(browser, folder, exit_code):
    names = [
        "sage",
        "other",
        "guided base",
        "vbench",
        "study",
        *(f"videos/{name}" for name in POLICIES),
    ]
    assert (
        exit_code(
            report.main, *(folder / name for name in names), "--output_path", folder / "page.html"
        )
        == 0
    )
    page, messages = browser.new_page(viewport={"width": 390, "height": 844}), []
    page.set_default_timeout(60_000)
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on(
        "request",
        lambda sent: sent.url.startswith(("file:", "data:", "blob:")) or messages.append(sent.url),
    )
    page.goto((folder / "page.html").as_uri())
    page.evaluate("plotly.then(renderAll)")
    # runs, guided, front
    page.wait_for_function("document.querySelectorAll('#pareto .plot .trace').length == 4")

    def cells(row):
        return [
            text.split("\n")[0]
            for text in page.locator(row).first.locator("th, td").all_inner_texts()
        ]

    assert cells("#scores tr") == [
        "Score",
        "base model",
        f"{folder.name}/sage",
        "other",
        "guided base",
    ]
    reward = [
        each["reward"]["mean"]
        for each in read_comparison([folder / name for name in names]).scores.values()
    ]
    assert cells("#scores tr:has-text('reward') >> nth=1")[1:] == [
        f"{value:.3f}" for value in reward
    ]
    assert cells("#benchmarks tr:has-text('scene')")[1:] == [
        "51.00",
        "56.00",
        "71.00",
        "+5.00",
        "+20.00",
    ]
    assert (
        page.locator("#benchmarks .up").count() == 4
        and page.locator("#benchmarks .down").count() == 0
    )
    assert cells("#study tbody tr")[:3] == ["base", "guided", "50.0 %"]
    captions = page.locator("#matched article").first.locator("figcaption").all_inner_texts()
    assert (
        captions == ["base", "guided", "videos/\u200bsage"]
        and page.locator("#matched video").count() == 9
    )
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()
    assert not messages


@pytest.mark.slow
def test_the_page_shows_scores_benchmarks_studies_and_clips_together(
    recorded, others, browser, tmp_path, exit_code
):
    check_page(browser, tmp_path, exit_code)


def test_runs_of_one_base_model_share_its_column_and_others_have_their_own(recorded, tmp_path):
    folders = [tmp_path / name for name in ("sage", "other", "guided base")]
    scores = read_comparison(folders).scores
    assert [*scores] == ["base model", "sage", "other", "guided base"]
    assert scores["sage"]["reward"]["mean"] == pytest.approx(0.35 + 0.25)
    assert scores["sage"]["reward"]["low"] < 0.6 < scores["sage"]["reward"]["high"]
    assert scores["sage"]["true/VQ"] == {"mean": pytest.approx(0.4), "low": None, "high": None}
    assert scores["guided base"]["VQ"]["mean"] == pytest.approx(0.15)
    path = tmp_path / "other/samples/000000/scores.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps([entry | {"reward": 0.0} for entry in entries]))
    assert [*read_comparison(folders).scores][2] == "base model of other"


def test_a_file_that_cannot_be_read_is_named(tmp_path, exit_code, capsys):
    for content, message in (
        ("[]", "must contain a JSON object, got list"),
        ("{", "is not valid JSON"),
        ("{}", ""),
    ):
        (tmp_path / "scores.json").write_text(content)
        assert exit_code(report.main, tmp_path, "--output_path", tmp_path / "page.html") == 2
        printed = capsys.readouterr().err
        assert str(tmp_path) in printed and message in printed


def test_a_folder_of_no_kind_stands_for_the_runs_below_it(recorded, tmp_path):
    record_run(tmp_path / "more" / "deep" / "third")
    runs = [tmp_path / "more/deep/third", tmp_path / "other", tmp_path / "sage"]
    assert with_runs_below([tmp_path]) == runs
    assert with_runs_below([tmp_path / "sage", tmp_path / "guided base"]) == [
        tmp_path / "sage",
        tmp_path / "guided base",
    ]
    assert with_runs_below([tmp_path / "empty"]) == [tmp_path / "empty"]


def configs_of(**settings_by_name):
    return {
        name: load_config("configs/miniature.yaml", **settings)
        for name, settings in settings_by_name.items()
    }


@pytest.mark.parametrize(
    "change",
    [{"reward_model": "miniature"}, {"reward_normalization": "group"}],
)
def test_rewards_with_other_scorers_weights_or_normalization_differ(change):
    configs = configs_of(first={}, second=change, third={"eta": 0.1})
    assert reward_of(configs["first"].reward) != reward_of(configs["second"].reward)
    assert reward_of(configs["first"].reward) == reward_of(configs["third"].reward)


def test_only_settings_with_several_values_are_compared():
    first = {"output_dir": "a", "eta": 0.5, "num_threads": 1}
    configs = configs_of(first=first, second={"output_dir": "b", "seed": 3})
    assert differing_settings(configs) == ["seed", "eta", "num_threads"]  # the machine's are last
    assert differing_settings({}) == []
