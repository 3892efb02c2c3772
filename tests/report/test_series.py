"""Thinned curves and totals of a run, from the lines of its metrics."""

from hyvideo.report.series import read_series


def lines_of(count, **metrics):
    """Lines of ``count`` iterations of 2 s each, with values by metric; a function gets the
    iteration.
    """
    return [
        {"iteration": k, "time/iteration": 2.0, "time/since_start": 3.0 * k}
        | {name.replace("__", "/"): value(k) for name, value in metrics.items()}
        for k in range(1, count + 1)
    ]


def test_a_point_is_the_mean_of_its_iterations_and_the_maximum_for_outliers():
    found = read_series(lines_of(7, reward__mean=float, grad__norm=float), 3)
    assert found.per_point == 3 and found.points["iteration"] == [3, 6, 7]
    assert found.points["reward/mean"] == [2, 5, 7]
    assert found.points["grad/norm"] == [3, 6, 7]


def test_values_that_are_not_known_are_left_out_of_means_and_totals():
    values = {1: 1.0, 2: None, 3: 5.0, 4: None}
    found = read_series(lines_of(4, kl__position=values.get), 2)
    assert found.points["kl/position"] == [1, 5]
    assert found.totals["kl/position"].sum == 6 and found.totals["kl/position"].mean == 3
    assert read_series(lines_of(2, kl__position=lambda k: None), 2).total("kl/position") == 0


def test_totals_use_every_iteration_of_a_long_run():
    lines = lines_of(
        1000, reward__missing=lambda k: float(k == 501), grad__spike=lambda k: 20.0 * (k == 7)
    )
    found = read_series(lines, 10)
    assert found.total("reward/missing") == 1 and found.spikes == [7] and found.seconds == 2000


def test_a_restart_is_found_by_the_time_since_the_start_of_the_process():
    lines = lines_of(50)
    assert read_series(lines, 500).restarts == []
    for line in lines[40:]:
        line["time/since_start"] = 10.0 * (line["iteration"] - 40)
    assert read_series(lines, 500).restarts == [41]
