"""Counts of and messages about skipped updates."""

import pytest

from hyvideo.distributed.mesh import Mesh
from hyvideo.training.nonfinite_updates import NonFiniteUpdates


def test_a_divergence_is_reported_with_the_iteration_of_the_first_outlier():
    monitor = NonFiniteUpdates(Mesh.single(), max_bad_updates=9)
    for iteration in (1, 2, 3):
        monitor.spike(1.0, iteration)
    assert monitor.divergence(1) == ""
    assert (
        "suddenly, in the update of iteration 3: loss and gradient were in" in monitor.divergence(4)
    )
    monitor.spike(100.0, 4)
    resumed = NonFiniteUpdates(Mesh.single(), max_bad_updates=9)
    resumed.load_state_dict(monitor.state_dict())
    assert "left the usual range in iteration 4." in resumed.divergence(6)
    for iteration in (7, 8):
        resumed.record_skipped(ranks=[0], iteration=iteration)
    assert "left the usual range in iteration 7." in resumed.divergence(9)


def test_only_skipped_updates_in_a_row_end_the_run():
    monitor = NonFiniteUpdates(Mesh.single(), max_bad_updates=2)
    for _ in range(3):
        monitor.record_skipped(ranks=[0], iteration=1)
        monitor.record_finite(1.0, 1)
    monitor.record_skipped(ranks=[0], iteration=1)
    with pytest.raises(
        FloatingPointError, match="the last of max_bad_updates=2 skipped updates in a row"
    ):
        monitor.record_skipped(ranks=[0], iteration=1)


def test_a_spike_is_relative_to_the_median_of_the_norms_before_it():
    monitor = NonFiniteUpdates(Mesh.single(), max_bad_updates=2)
    assert [monitor.spike(norm, 1) for norm in (2.0, 4.0, 9.0, 8.0)] == [1, 2, 3, 2]
    for _ in range(60):
        monitor.spike(5.0, 2)
    # a ratio of 10 is not reported, 10.2 is
    assert monitor.spike(50.0, 3) == 10 and monitor.last_outlier == 0
    assert monitor.spike(51.0, 4) == 10.2 and monitor.last_outlier == 4
    assert len(monitor.norms) == 50
