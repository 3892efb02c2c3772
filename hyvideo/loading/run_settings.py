"""Settings of the run that wrote a checkpoint. Imports no torch."""

from pathlib import Path

from hyvideo.checkpoints.format import STATE, has_state, read_state, run_of
from hyvideo.models.guidance import Expert
from hyvideo.settings.command_line import read_settings
from hyvideo.settings.config import LEAVES


def check_trained_expert(folder: Path, expert: Expert | None) -> None:
    """Raise ValueError if the run of a checkpoint trained the other expert of a model of two."""
    saved = (_settings(folder) or {}).get("expert", expert)
    if expert and saved != expert:
        raise ValueError(
            f"checkpoint {folder} has the {saved}-noise expert, got expert {expert}; set expert "
            f"{saved}"
        )


def settings_of_run(folder: Path) -> tuple[dict, Path | None]:
    """Return the settings of the run that wrote a checkpoint, and their file; ({}, None) if no run
    wrote it.

    The file is the run's config.yaml or, if the checkpoint was moved out of the run's folder, its
    state.json.
    """
    saved = _settings(folder)
    if saved is None:
        return {}, None
    run = run_of(folder)
    if run and (run / "config.yaml").is_file():
        return read_settings(run / "config.yaml"), run / "config.yaml"
    known = {name: value for name, value in saved.items() if name in LEAVES}
    return known, folder / STATE


def _settings(folder: Path) -> dict | None:
    return read_state(folder).get("settings", {}) if has_state(folder) else None
