"""Recipes of training compared at equal cost: trains each with some seeds, and says what it reached with the budget.

    python -m scripts.compare_recipes configs/recipes/miniature.yaml --seeds 5 --budget forwards=46000 --jobs 2
    python -m scripts.compare_recipes ... --dry_run                     the runs and what they cost
    python -m scripts.compare_recipes ... --only_table                  of what is finished by now

A run that has begun goes on where it stopped; a finished one is not run again. Leaves cells/, logs/, recipes.md, .csv
and .tex, verdicts.md (each recipe against the first, paired by seed), curves over rollouts, forwards and seconds, and
pareto.png in --out. A verdict takes two seeds at least, and five to be worth much. Ends with 1 when a run failed.
"""

import sys

from hyvideo.data.outside import refusals
from hyvideo.evaluation.studies.recipes import Budget, read_recipes, within
from hyvideo.evaluation.studies.runs import Study, runs_of
from hyvideo.evaluation.studies.study_command import plan_and_train, study_parser


@refusals("compare_recipes.py")
def main() -> int:
    parser = study_parser(__doc__, out="outputs/recipes", makes="table")
    parser.add_argument("recipes", help="YAML file: base, common and recipes")
    parser.add_argument("--seeds", type=int, default=5, help="number of training seeds")
    parser.add_argument("--budget", required=True, help="rollouts=N, forwards=N or seconds=N of each run")
    options = parser.parse_args()
    budget = Budget.of(options.budget)
    base, common, recipes = read_recipes(options.recipes)
    study = Study(base, options.out, common, options.num_gpus)
    runs = runs_of(within(budget, study, recipes), range(options.seeds))
    code = plan_and_train(study, runs, options)
    if options.dry_run or options.only_cell:
        return code

    from hyvideo.evaluation.studies.recipe_results import write_results  # what is heavy, only now

    write_results(study, runs, budget)
    for name in ("recipes.md", "verdicts.md"):
        print((study.out / name).read_text(encoding="utf-8"))
    return code


if __name__ == "__main__":
    sys.exit(main())
