"""Compare training recipes at equal cost: train each with several seeds and compare the results at
one budget.

    python -m scripts.compare_recipes configs/recipes/miniature.yaml --seeds 5 --budget forwards=28000 --jobs 2
    python -m scripts.compare_recipes ... --dry_run                     the runs and their predicted cost
    python -m scripts.compare_recipes ... --only_table                  the table of the finished runs

The file has a line NAME: CONFIG.yaml for each recipe, or base, common and recipes with settings.
Interrupted runs resume and finished runs are skipped. Writes to --output_dir: cells/, logs/,
recipes.md, .csv and .tex, seeds.csv (the results of each run, for scripts.seed_tables), verdicts.md
(each recipe against the first and against its control, paired by seed, with costs and the settings
in which they differ), curves over rollouts, forward passes and seconds, and pareto.png, whose
panels cut intervals that are much longer than the range of the means. A verdict needs at least two
seeds; use five or more. It is refused if only one recipe has a guided anchor and no control. The
exit code is 1 if a run failed.
"""

import sys

from hyvideo.files.cli import Parser, exit_on_error
from studies.recipes.recipes import Budget, limit_to_budget, read_recipes
from studies.recipes.runs import RecipeStudy, runs_of
from studies.tables.study_command import add_study_flags, plan_and_train


@exit_on_error("compare_recipes.py")
def main() -> int:
    parser = Parser(__doc__)
    add_study_flags(parser, out="outputs/recipes", makes="table")
    parser.add_argument(
        "recipes", help="YAML file: NAME: CONFIG.yaml for each recipe, or base, common and recipes"
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of training seeds")
    parser.add_argument("--first_seed", type=int, default=0, help="first training seed")
    parser.add_argument(
        "--budget", required=True, help="budget of each run: rollouts=N, forwards=N or seconds=N"
    )
    parser.add_argument(
        "--guided_base",
        type=float,
        metavar="SCALE",
        help="also evaluate the base model with this guidance scale",
    )
    options = parser.parse_args()
    if options.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {options.seeds}")
    budget = Budget.of(options.budget)
    base, common, recipes = read_recipes(options.recipes)
    study = RecipeStudy(base, options.output_dir, common, options.num_gpus)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = runs_of(limit_to_budget(budget, study, recipes), seeds)
    if study.out.is_dir():  # before hours of training that could not be compared
        from studies.recipes.recipe_results import check_validations  # slow to import

        check_validations(study, runs)
    code = plan_and_train(study, runs, options)
    if options.dry_run or options.only_cell:
        return code

    from studies.recipes.recipe_results import write_results  # slow to import

    write_results(study, runs, budget, options.guided_base)
    for name in ("recipes.md", "verdicts.md"):
        print((study.out / name).read_text(encoding="utf-8"))
    return code


if __name__ == "__main__":
    sys.exit(main())
