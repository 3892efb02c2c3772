"""Counts of skipped updates, and spikes of the gradient norm."""

import pytest

from hyvideo.distributed.mesh import Mesh
from hyvideo.training.nonfinite_updates import NonFiniteUpdates


def test_only_skipped_updates_in_a_row_end_the_run():
    monitor = NonFiniteUpdates(Mesh.single(), max_bad_updates=2)
    for _ in range(3):
        monitor.record_skipped(ranks=[0], iteration=1)
        monitor.record_finite()
    monitor.record_skipped(ranks=[0], iteration=1)
    with pytest.raises(
        FloatingPointError, match="the last of max_bad_updates=2 skipped updates in a row"
    ):
        monitor.record_skipped(ranks=[0], iteration=1)


def test_a_spike_is_relative_to_the_median_of_the_norms_before_it():
    monitor = NonFiniteUpdates(Mesh.single(), max_bad_updates=2)
    # the second norm of a run is often many times the first, and the run learns well
    assert [monitor.spike(norm) for norm in (2.0, 400.0, 9.0, 8.0, 5.0)] == [1] * 5
    assert [monitor.spike(norm) for norm in (32.0, 17.0)] == [4, 2]
    for _ in range(60):
        monitor.spike(5.0)
    assert monitor.spike(50.0) == 10
    assert len(monitor.norms) == 50
