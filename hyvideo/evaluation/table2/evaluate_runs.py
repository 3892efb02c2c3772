"""Evaluates the finished runs and the base model, and writes Table 2 and its comparisons from their scores.

<out>/cells/<run>/         runs of post_train.py         <out>/logs/<run>.log    their output
<out>/scores/<run>.json    evaluations; base.json        <out>/results.json, table2.md, .csv, .tex, comparisons.md
"""

from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from hyvideo.evaluation.contents import policy_identity, world_identity
from hyvideo.evaluation.generation import Source
from hyvideo.evaluation.policy_scores import Evaluator
from hyvideo.evaluation.scores_file import Evaluation, read_evaluation, write_evaluation
from hyvideo.evaluation.table2.comparisons import Comparison, as_markdown, compare
from hyvideo.evaluation.table2.runs import Study, TableRun, progress
from hyvideo.evaluation.table2.table import Table, make_table
from hyvideo.evaluation.table2.table_files import write_table
from hyvideo.records.run_files import write_json, write_text


def evaluate_runs(study: Study, runs: list[TableRun]) -> tuple[Evaluation, dict[TableRun, Evaluation]]:
    """Evaluations of the base and of the finished runs, read where they are there, made where not."""
    config = study.evaluation_config()
    checkpoints: dict[str, Path | None] = {"base": None}
    for run in runs:
        if checkpoint := progress(study.folder(run), study.config(run)).checkpoint:
            checkpoints[run.name] = checkpoint
    world = world_identity(config.flat(), config.reward)
    identities = {name: policy_identity(checkpoint=checkpoint) | world for name, checkpoint in checkpoints.items()}
    files = {name: study.out / "scores" / f"{name}.json" for name in checkpoints}
    evaluations = {name: read_evaluation(file, identities[name]) for name, file in files.items()}
    missing = [name for name, evaluation in evaluations.items() if evaluation is None]
    if missing:
        with closing(Evaluator(config)) as evaluator:
            for name in missing:
                evaluations[name] = evaluator.policy(Source(checkpoints[name]))
                write_evaluation(files[name], evaluations[name], identities[name])
                print(f"evaluated {name}: {files[name]}", flush=True)
    return evaluations["base"], {run: evaluations[run.name] for run in runs if run.name in evaluations}


def write_results(study: Study, runs: list[TableRun]) -> None:
    """Evaluates what is finished and writes the table, the comparisons and results.json."""
    base, evaluations = evaluate_runs(study, runs)
    table = make_table(base, runs, evaluations)
    comparisons = compare(runs, evaluations)
    write_table(table, study.out)
    write_text(study.out / "comparisons.md", as_markdown(comparisons))
    write_json(study.out / "results.json", _results(study, base, evaluations, table, comparisons))


def _results(
    study: Study,
    base: Evaluation,
    evaluations: dict[TableRun, Evaluation],
    table: Table,
    comparisons: list[Comparison],
) -> dict:
    """Content of results.json: numbers of the table and the comparisons, scores of every video; for programs."""
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
                **value.as_json(),
            }
            for (row, setting, column), value in table.values.items()
        ],
        "comparisons": [
            asdict(comparison)
            | {"differences": {name: value.as_json() for name, value in comparison.differences.items()}}
            | {"reading": comparison.reading}
            for comparison in comparisons
        ],
        "base": {"measures": base.measures, "videos": base.videos},
        "cells": {
            run.name: {**asdict(run), "measures": evaluation.measures, "videos": evaluation.videos}
            for run, evaluation in evaluations.items()
        },
        "unfinished": [run.name for run in table.unfinished],
    }
