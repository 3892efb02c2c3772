"""Runs that the figures 3, 7 and 8 of the paper are drawn from."""

from collections.abc import Iterable

from hyvideo.evaluation.studies.cells import METHODS, grid
from hyvideo.evaluation.studies.runs import Run

# What a figure compares; the rest is SAGE-GRPO with a dual moving trust region.
TRAINED_FIGURES = {
    3: {"methods": list(METHODS), "kls": ["none"], "no_equalizer": True},
    7: {"schedules": ["constant", "two_stage", "milder"]},
    8: {"kls": ["none", "fixed", "stepwise", "moving", "dual_moving"]},
}


def runs_of(figure: int, settings: Iterable[str], seeds: Iterable[int], **others: list[str] | None) -> list[Run]:
    """Runs of a figure, with the given ``methods``, ``kls`` or, in figure 7, ``schedules`` in place of its own.

    Raises: ValueError for what the figure does not compare.
    """
    others = {name: values for name, values in others.items() if values}
    if "schedules" in others and figure != 7:
        raise ValueError(f"--schedules are what figure 7 compares, and --figures has {figure}; leave one of them out")
    if figure == 7 and "none" in others.get("kls", ()):
        raise ValueError("figure 7 compares schedules of the KL coefficient, and --kl none has none; name another")
    chosen = {"methods": ["sage_grpo"], "kls": ["dual_moving"]} | TRAINED_FIGURES[figure] | others
    return grid(settings, seeds=seeds, **chosen)
