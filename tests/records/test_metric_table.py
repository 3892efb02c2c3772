"""The table of metrics, and the plots that come from it."""

import pytest

from hyvideo.records.metric_table import METRICS, PLOTS, find, is_peak
from hyvideo.report.plots import plots_of


def test_each_metric_has_one_row_and_its_plot_exists():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert {metric.plot for metric in METRICS if metric.plot} == {plot.title for plot in PLOTS}


@pytest.mark.parametrize(
    "name, row, label",
    [
        ("kl/position", "kl/position", "to the anchor"),
        ("reward/VQ", "reward/<dimension>", "VQ"),
        ("reward/mean", "reward/mean", "reward/mean"),  # and not the form
        ("memory/rollout_gib", "memory/<stage>_gib", "rollout"),
        ("validation/held_out/judge/MQ", "validation/held_out/<scorer>/<dimension>", "judge MQ"),
    ],
)
def test_a_metric_has_its_own_row_or_that_of_its_form(name, row, label):
    found = find(name)
    assert (found.metric.name, found.label) == (row, label)


@pytest.mark.parametrize("name", ["mine/error", "reward/a/b", "memory/peak"])
def test_other_metrics_have_no_row(name):
    assert find(name) is None


def test_metrics_of_a_plot_share_it_and_unknown_ones_are_shown_among_the_others():
    plots = plots_of(
        ["iteration", "kl/velocity", "mine/error", "kl/position", "lr", "time/cpu", "by_step/mine"]
    )
    shown = {(plot["section"], plot["title"]): plot["lines"] for plot in plots}
    assert shown == {
        ("trust", "KL"): [
            ["kl/position", "to the anchor"],
            ["kl/velocity", "to the rollout policy"],
        ],
        ("others", "mine/error"): [["mine/error", "mine/error"]],
        ("others", "lr"): [["lr", "lr"]],
        ("steps", "by_step/mine"): [["by_step/mine", "by_step/mine"]],
    }
    assert plots[0]["unit"] == "per element" and plots[0]["isLog"]


def test_outliers_of_known_and_unknown_metrics_are_shown_by_their_maximum():
    assert is_peak("reward/missing") and is_peak("mine/distance_max")
    assert not is_peak("kl/position") and not is_peak("mine/error")
