"""Runs that the figures 3, 7 and 8 of the paper are drawn from."""

from collections.abc import Iterable
from dataclasses import dataclass

from hyvideo.evaluation.table2.runs import METHODS, TableRun, grid


@dataclass(frozen=True)
class TrainedFigure:
    """Runs of a figure but for reward settings and seeds."""

    methods: tuple[str, ...] = ("sage_grpo",)
    kls: tuple[str, ...] = ("dual_moving",)
    no_equalizer: bool = False
    schedules: tuple[str, ...] = ("",)


TRAINED_FIGURES = {
    3: TrainedFigure(methods=tuple(METHODS), kls=("none",), no_equalizer=True),
    7: TrainedFigure(schedules=("constant", "two_stage", "milder")),
    8: TrainedFigure(kls=("none", "fixed", "stepwise", "moving", "dual_moving")),
}


def runs_of(
    figure: int,
    settings: Iterable[str],
    seeds: Iterable[int],
    *,
    methods: Iterable[str] | None = None,
    kls: Iterable[str] | None = None,
    schedules: Iterable[str] | None = None,
) -> list[TableRun]:
    """Runs of a figure, with other methods, trust regions or, in figure 7, schedules than its own where given.

    Raises: ValueError for what the figure does not compare.
    """
    own = TRAINED_FIGURES[figure]
    if schedules and figure != 7:
        raise ValueError(f"--schedules are what figure 7 compares, and --figures has {figure}; leave one of them out")
    if figure == 7 and "none" in (kls or ()):
        raise ValueError("figure 7 compares schedules of the KL coefficient, and --kl none has none; name another")
    return grid(
        settings,
        methods or own.methods,
        kls or own.kls,
        seeds,
        no_equalizer=own.no_equalizer,
        schedules=schedules or own.schedules,
    )
