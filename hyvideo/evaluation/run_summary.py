"""Summary that a run prints at its end."""

from pathlib import Path

from hyvideo.data.templates import fill
from hyvideo.evaluation.report.page import REPORT_FILE
from hyvideo.evaluation.validation import Validation
from hyvideo.records.metrics_file import read_metrics
from hyvideo.records.run_files import warn_if_unwritable


def print_summary(output_dir: Path, iteration: int, validation: Validation | None) -> None:
    """Print rewards before and after training, and the paths of the report, the videos and a picture of both."""
    values: dict = {"before": {}, "after": {}, "rewards": [], "report": output_dir / REPORT_FILE}
    if validation:
        values["before"], values["after"] = (validation.measures(k) for k in (0, iteration))
        values["seen"], values["folders"] = validation.seen, [validation.folder(k) for k in (0, iteration)]
        values["size"], values["weights"] = validation.size, validation.scorer.weights
    if values["before"] and values["after"]:
        values["picture"] = None
        with warn_if_unwritable("before_after.png", (OSError, ValueError, LookupError, TypeError)):
            values["picture"] = validation.picture(iteration)
    else:
        rewards = [line["reward/mean"] for line in read_metrics(output_dir / "metrics.jsonl")]
        values["rewards"] = [reward for reward in rewards if reward is not None]
    template = Path(__file__).with_name("summary.txt.jinja")
    print(fill(template, output_dir=output_dir, iteration=iteration, **values))
