"""Whether a folder holds another run, asked before a run writes there."""

from pathlib import Path

from hyvideo.data.outside import shown
from hyvideo.records.metrics_file import whole_lines


def check_run_folder(output_dir: str | Path, *, resumes: bool, end_marker: str | None) -> None:
    """Raises ValueError where ``output_dir`` holds a run that this one does not resume, or that ended for good.

    It did with the file ``end_marker``, which is None where this one would not end for it again.
    """
    path = Path(output_dir) / "metrics.jsonl"
    if not path.exists() or path.stat().st_size == 0:
        return
    if not resumes:
        raise ValueError(
            f"output_dir {shown(output_dir)} already holds a run; go on with it by --resume_from_checkpoint latest, or "
            "name another output_dir"
        )
    whole_lines(path)
    marker = path.with_name(end_marker) if end_marker else None
    if marker and marker.is_file():
        raise ValueError(
            f"the run in output_dir {shown(output_dir)} ended for reward hacking and would do so again; "
            f"docs/reward_hacking.md says what to change; to go on, delete {marker} or take on_reward_hacking warn"
        )
