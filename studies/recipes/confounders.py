"""What two recipes differ in, and why a difference of their results may not be due to the method."""

from hyvideo.settings.config import Config
from hyvideo.settings.identity import experiment_settings

DECIDED_BY_STUDY = ("max_steps", "seed")  # by the budget, and equal in each pair of runs


def differing_settings(first: Config, second: Config) -> dict[str, tuple[object, object]]:
    """Return both values of each setting that affects learning and differs, in the order of the
    settings; None where an objective lacks a setting.
    """
    mine, other = experiment_settings(first), experiment_settings(second)
    return {
        name: (mine.get(name), other.get(name))
        for name in {**mine, **other}
        if name not in DECIDED_BY_STUDY and (mine.get(name) or None) != (other.get(name) or None)
    }


def describe_differences(differing: dict[str, tuple[object, object]]) -> str:
    """Return the settings with both values in words, such as ``eta 0.7 and 0``."""

    def text(value: object) -> str:
        return "none" if value in (None, "", []) else str(value)

    return ", ".join(f"{name} {text(a)} and {text(b)}" for name, (a, b) in differing.items())


def has_guided_anchor(config: Config) -> bool:
    """Return whether the policy is pulled towards more guidance than it samples with, which raises
    the reward without a reward.
    """
    return config.anchor_has_own_guidance and config.anchor_cfg_scale > config.policy_cfg_scale


def confounder(names: tuple[str, str], configs: tuple[Config, Config], controls: set[str]) -> str:
    """Return why the difference of two recipes says nothing about their methods, with the repair;
    empty if nothing is known.

    ``controls`` has the names of the finished controls and of the recipes that they repeat.
    """
    guided = [name for name, config in zip(names, configs) if has_guided_anchor(config)]
    if len(guided) != 1 or guided[0] in controls:
        return ""
    scale = configs[names.index(guided[0])].anchor_cfg_scale
    return (
        f"only {guided[0]} has a guided anchor (anchor_cfg_scale {scale:g}), which raises the "
        f"reward without a reward; set control: true for {guided[0]}, or give both the same anchor"
    )
