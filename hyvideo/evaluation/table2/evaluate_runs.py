"""Evaluates the finished runs and the base model, and writes Table 2 from their scores.

<out>/cells/<run>/         runs of post_train.py         <out>/logs/<run>.log    their output
<out>/scores/<run>.json    evaluations; base.json        <out>/results.json, table2.md, table2.csv, table2.tex
"""

import math
from dataclasses import asdict
from pathlib import Path

from hyvideo.config.identity import evaluation_settings
from hyvideo.evaluation.generation import Source
from hyvideo.evaluation.policy_scores import Evaluator
from hyvideo.evaluation.scores_file import Evaluation, read_evaluation, write_evaluation
from hyvideo.evaluation.table2.runs import Study, TableRun, progress
from hyvideo.evaluation.table2.table import Table, make_table
from hyvideo.evaluation.table2.table_files import write_table
from hyvideo.records.run_files import write_json


class Evaluations:
    """Evaluations of a study's policies: read where they are there, made where not. Models are loaded at first need."""

    def __init__(self, study: Study):
        self.study = study
        self.config = study.evaluation_config()
        self._evaluator: Evaluator | None = None

    def base(self) -> Evaluation:
        return self._of("base", None)

    def run(self, run: TableRun) -> Evaluation | None:
        """Evaluation of a run's last checkpoint; None for a run that is not finished."""
        checkpoint = progress(self.study.folder(run), self.study.config(run)).checkpoint
        return self._of(run.name, checkpoint) if checkpoint else None

    def _of(self, name: str, checkpoint: Path | None) -> Evaluation:
        path = self.study.out / "scores" / f"{name}.json"
        identity = {
            "policy": name,
            # A run that was trained anew is evaluated anew.
            "written": (checkpoint / "state.json").stat().st_mtime_ns if checkpoint else None,
            "settings": evaluation_settings(self.config.flat()),
        }
        evaluation = read_evaluation(path, identity)
        if evaluation is None:
            if self._evaluator is None:
                self._evaluator = Evaluator(self.config)
            evaluation = self._evaluator.policy(Source(checkpoint))
            write_evaluation(path, evaluation, identity)
            print(f"evaluated {name}: {path}", flush=True)
        return evaluation

    def close(self) -> None:
        if self._evaluator:
            self._evaluator.close()


def evaluate_runs(study: Study, runs: list[TableRun]) -> tuple[Evaluation, dict[TableRun, Evaluation]]:
    """Evaluations of the base and of the finished runs."""
    evaluations = Evaluations(study)
    try:
        base = evaluations.base()
        of_runs = {run: evaluations.run(run) for run in runs}
    finally:
        evaluations.close()
    return base, {run: evaluation for run, evaluation in of_runs.items() if evaluation is not None}


def write_results(study: Study, runs: list[TableRun]) -> Table:
    """Evaluates what is finished and writes the table and results.json."""
    base, evaluations = evaluate_runs(study, runs)
    table = make_table(base, runs, evaluations)
    write_table(table, study.out)
    write_json(study.out / "results.json", results(study, base, evaluations, table))
    return table


def results(study: Study, base: Evaluation, evaluations: dict[TableRun, Evaluation], table: Table) -> dict:
    """Content of results.json: the table's numbers and the scores of every video, for programs."""
    return {
        "config": study.config_file,
        "extra": study.extra,
        "match_noise": study.match_noise,
        "rows": [
            {
                "method": row.method,
                "kl": row.kl,
                "equalizer": row.has_equalizer,
                "setting": setting,
                "measure": column,
                "seeds": table.num_seeds[row, setting],
                **{name: number if math.isfinite(number) else None for name, number in asdict(value).items()},
            }
            for (row, setting, column), value in table.values.items()
        ],
        "base": {"measures": base.measures, "videos": base.videos},
        "cells": {
            run.name: {**asdict(run), "measures": evaluation.measures, "videos": evaluation.videos}
            for run, evaluation in evaluations.items()
        },
        "unfinished": [run.name for run in table.unfinished],
    }
