"""Table 2: evaluate the finished cells and the base model, and write the table from what was measured.

<out>/cells/<cell>/         runs of post_train.py         <out>/logs/<cell>.log    what they said
<out>/scores/<cell>.json    evaluations; base.json        <out>/results.json, table2.md, table2.csv, table2.tex
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

    def cell(self, cell: TableRun) -> Evaluation | None:
        """Of a cell's last checkpoint; None for a cell that is not finished."""
        checkpoint = progress(self.study.folder(cell), self.study.config(cell)).checkpoint
        return self._of(cell.name, checkpoint) if checkpoint else None

    def _of(self, name: str, checkpoint: Path | None) -> Evaluation:
        path = self.study.out / "scores" / f"{name}.json"
        identity = {
            "policy": name,
            # Of the file, so that a cell that was trained anew is evaluated anew.
            "written": (checkpoint / "state.json").stat().st_mtime_ns if checkpoint else None,
            "settings": evaluation_settings(self.config.flat()),
        }
        found = read_evaluation(path, identity)
        if found is None:
            if self._evaluator is None:
                self._evaluator = Evaluator(self.config)
            found = self._evaluator.policy(Source(checkpoint))
            write_evaluation(path, found, identity)
            print(f"evaluated {name}: {path}", flush=True)
        return found

    def close(self) -> None:
        if self._evaluator:
            self._evaluator.close()


def evaluate_cells(study: Study, cells: list[TableRun]) -> tuple[Evaluation, dict[TableRun, Evaluation]]:
    """Evaluations of the base and of the finished cells."""
    evaluations = Evaluations(study)
    try:
        base = evaluations.base()
        found = {cell: evaluations.cell(cell) for cell in cells}
    finally:
        evaluations.close()
    return base, {cell: evaluation for cell, evaluation in found.items() if evaluation is not None}


def write_results(study: Study, cells: list[TableRun]) -> Table:
    """Evaluates what is finished and writes the table and results.json."""
    base, found = evaluate_cells(study, cells)
    table = make_table(base, cells, found)
    write_table(table, study.out)
    write_json(study.out / "results.json", results(study, base, found, table))
    return table


def results(study: Study, base: Evaluation, found: dict[TableRun, Evaluation], table: Table) -> dict:
    """The table's numbers and the scores of every video, for programs."""
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
            cell.name: {**asdict(cell), "measures": evaluation.measures, "videos": evaluation.videos}
            for cell, evaluation in found.items()
        },
        "unfinished": [cell.name for cell in table.unfinished],
    }
