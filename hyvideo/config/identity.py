"""What the settings make the same: a run that goes on, an experiment, an evaluation. All follows from their traits."""

from collections.abc import Mapping
from typing import NamedTuple

from hyvideo.config.sections import TrustRegionSettings
from hyvideo.config.settings import TRAITS, Config


class Changes(NamedTuple):
    """Sentences on the settings that are not those of the checkpoint which a run goes on from."""

    free: list[str]
    of_the_method: list[str]


def changed_settings(saved: Mapping[str, object], now: Mapping[str, object], *, same_rollouts: bool) -> Changes:
    """Settings of a checkpoint against those of now, both by name; the saved ones as JSON gives them back.

    Args:
        same_rollouts: An iteration has as many rollouts as it had, so that their layout is free.
    """
    free: list[str] = []
    of_the_method: list[str] = []
    for name, value in now.items():
        decides = TRAITS[name].decides
        if decides == "start" or name not in saved or saved[name] == value:
            continue
        if isinstance(value, list) and [word for word in [saved[name]] if word] == value:
            continue  # a list that was one text in an earlier version
        is_free = decides in ("machine", "records") or (decides == "layout" and same_rollouts)
        (free if is_free else of_the_method).append(f"{name} is {value!r} and was {saved[name]!r}")
    return Changes(free, of_the_method)


def experiment_settings(config: Config) -> dict[str, object]:
    """The settings that change what is learned; runs that have them equal, but the seed, are seeds of one experiment.

    The trust region has its strategy by name, and nothing else where there is none.
    """
    settings = {name: value for name, value in config.flat().items() if TRAITS[name].decides in ("learning", "layout")}
    unused = {"use_moving_KL", "use_dual_kl"}
    if config.kl_strategy == "none":
        unused |= TrustRegionSettings.__dataclass_fields__.keys()
    kept = {name: value for name, value in settings.items() if name not in unused}
    return kept | {"kl_strategy": config.kl_strategy}


def evaluation_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings that decide an evaluation beside the policy: evaluations are comparable where they agree."""
    return {name: value for name, value in settings.items() if TRAITS[name].measured}
