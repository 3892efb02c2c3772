"""Check a run: recompute what its files say by independent arithmetic.

    python -m scripts.audit outputs/miniature

Each row is a statement, the files that it compares, and whether it agrees, differs or cannot be
checked. The exit code is 1 if a statement differs. The rows are also written to audit.json in RUN,
and scripts.report shows them. docs/check_a_run.md says what an audit does not check.
"""

import argparse
import json
import sys
from pathlib import Path

from scripts.audit.files import audit_files
from scripts.audit.improvement import PLAN, audit_improvement
from scripts.audit.outputs import audit_samples, audit_scores
from scripts.audit.pages import audit_report
from scripts.audit.recipes import SEEDS, audit_recipes
from scripts.audit.rewards import audit_advantages, audit_rewards
from scripts.audit.rollouts import audit_rollouts
from scripts.audit.run import Run
from scripts.audit.statements import Audit
from scripts.audit.updates import audit_updates
from scripts.audit.videos import audit_videos
from scripts.audit.weights import audit_checkpoints

AUDIT_FILE = "audit.json"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="output_dir of a run, or folder of scripts.improve or compare_recipes",
    )
    parser.add_argument(
        "--score",
        action="store_true",
        help="score saved videos again, by the reward models of the run",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="sample the newest validation again, from its checkpoint and from an export of it",
    )
    options = parser.parse_args(argv)
    try:
        audit = audit_of(options.run, score=options.score, sample=options.sample)
    except ValueError as error:
        parser.error(str(error))
    print(audit.as_text())
    text = json.dumps({"statements": audit.as_rows()}, indent=1) + "\n"
    (options.run / AUDIT_FILE).write_text(text, encoding="utf-8")
    return int(audit.differs)


def audit_of(folder: Path, *, score: bool = False, sample: bool = False) -> Audit:
    """Return the statements about the run in a folder, or about a folder of scripts.improve or
    scripts.compare_recipes and its runs. Raises ValueError if there is none.
    """
    audit = Audit()
    runs = [folder]
    if (folder / PLAN).is_file():
        runs = audit_improvement(folder, audit)
    elif (folder / SEEDS).is_file():
        runs = audit_recipes(folder, audit)
    for path in runs:
        found = audit_run(Run(path), score=score, sample=sample)
        where = f"{path.relative_to(folder)}: " if path != folder else ""
        audit.add(found, where)
    return audit


def audit_run(run: Run, *, score: bool = False, sample: bool = False) -> Audit:
    """Return the statements about a run."""
    audit = Audit()
    audit_files(run, audit)
    audit_rewards(run, audit)
    audit_advantages(run, audit)
    audit_rollouts(run, audit)
    audit_videos(run, audit)
    audit_updates(run, audit)
    audit_checkpoints(run, audit)
    audit_report(run, audit)
    if score:
        audit_scores(run, audit)
    if sample:
        audit_samples(run, audit)
    return audit


if __name__ == "__main__":
    sys.exit(main())
