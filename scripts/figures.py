"""Draw figures: of runs, of the paper from runs that are trained for them, or a gallery.

    python -m scripts.figures runs outputs/miniature --output_dir outputs/figures       the learning curve of a run
    python -m scripts.figures runs outputs/table2/cells --output_dir outputs/figures    figures 3, 7 and 8 from all runs
    python -m scripts.figures paper --figures 7 --world miniature --jobs 2              trains the runs, draws figure 7
    python -m scripts.figures paper --figures 3 7 8 --world miniature --dry_run         the predicted cost
    python -m scripts.figures paper --figures 8 --config configs/paper/table2_b_8gpu.yaml --num_gpus 8 \\
        --only_cell B-sage_grpo-moving-eq-seed0                                         one job on a cluster
    python -m scripts.figures gallery --pictures docs/pictures                          the pictures of docs/gallery.md
    python -m scripts.figures gallery --config configs/wan21_1gpu_nft.yaml --output_dir outputs/wan_gallery \\
        --policies base base@5 nft=outputs/run --prompt "a cat jumps" "a red kite over a beach"

runs: Runs are grouped by the settings in their config.yaml. Curves are means over seeds, with a band
of one standard deviation. A figure for which the runs are missing is skipped, with the reason.
examples.sampler_figures draws figures 4 and 9, which need no run.

paper: Figure 3 compares every sampler without a KL term, with and without the equalizer; figure 7
SAGE-GRPO dual moving under three schedules of the KL coefficient (constant, two-stage, milder);
figure 8 SAGE-GRPO under five trust regions (none, fixed, stepwise, moving, dual moving). --methods
and --kl select others. The runs are cells of Table 2 or similar ones; finished ones are not trained
again. Writes cells/, logs/ and figures/ to --output_dir. The exit code is 1 if a cell failed.

gallery: Moving pictures of several policies, of the same prompts and noise, on a page gallery.md.
Without --policies, it first trains the runs of docs/gallery.md on the miniature, which takes about
half an hour on a CPU; finished runs are kept. A policy is a word of scripts.compare_policies, and
all flags of that program are accepted.
"""

import argparse
import itertools
import sys
from pathlib import Path

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.settings.command_line import parse
from studies.recipes.runs import finished, reject_flags
from studies.tables.cells import FIGURES, KL_FLAGS, runs_of_figure
from studies.tables.study_command import add_grid_flags, grid_study, plan_and_train


def draw_runs(options: argparse.Namespace) -> int:
    from studies.figures.curves import find_runs  # slow to import
    from studies.figures.figures import draw

    runs = find_runs(options.runs)
    for number in options.figures:
        print(draw(number, runs, options.output_dir, window=options.window))
    return 0


def draw_paper(options: argparse.Namespace) -> int:
    study = grid_study(options)
    if 7 in options.figures:
        reject_flags(study.extra, ["kl_schedule"])
    runs = {
        number: runs_of_figure(
            number, options.settings, options.seeds, methods=options.methods, kls=options.kl
        )
        for number in options.figures
    }
    code = plan_and_train(study, list(dict.fromkeys(itertools.chain(*runs.values()))), options)
    if options.dry_run or options.only_cell:
        return code

    from studies.figures.curves import find_runs  # slow to import
    from studies.figures.figures import draw

    for number, figure_runs in runs.items():
        trained = find_runs(map(study.folder, finished(study, figure_runs)))
        print(draw(number, trained, study.out / "figures", window=options.window))
    return code


def draw_gallery(options: argparse.Namespace, flags: list[str]) -> int:
    out = options.output_dir
    policies = options.policies
    prompts = options.prompt
    if not policies:
        flags = ["--config", "configs/miniature.yaml", *flags]
    parse(flags)  # stops at wrong flags before hours of training

    from studies.figures import gallery  # slow to import

    if not policies:
        policies, code = gallery.train_miniatures(out)
        if code:
            return code
        prompts = prompts or gallery.PROMPTS
    return gallery.make_gallery(policies, prompts, flags, out, options.pictures or out)


def make_parser() -> Parser:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    of_runs = commands.add_parser("runs", help="curves of runs")
    of_runs.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of one run or of several"
    )
    of_runs.add_argument("--output_dir", type=Path, required=True, help="output folder")
    numbers = [0, 3, 7, 8]
    of_runs.add_argument(
        "--figures",
        nargs="+",
        type=int,
        choices=numbers,
        default=numbers,
        help="figures of the paper; 0 is the learning curve of one run or of the seeds of one "
        "setting",
    )

    paper = commands.add_parser("paper", help="figures of the paper, with their runs")
    add_grid_flags(paper, makes="figure")
    paper.set_defaults(settings=["B"])
    numbers = list(FIGURES)
    paper.add_argument(
        "--figures", nargs="+", type=int, choices=numbers, default=numbers, help="figures to draw"
    )
    paper.add_argument(
        "--kl", nargs="+", choices=list(KL_FLAGS), help="trust regions instead of the figure's"
    )
    for command in (of_runs, paper):
        command.add_argument(
            "--window", type=int, default=5, help="smooth curves over this many iterations"
        )

    gallery = commands.add_parser("gallery", help="moving pictures of policies")
    gallery.add_argument(
        "--policies", nargs="+", metavar="NAME=PATH", help="policies: base or NAME=PATH"
    )
    gallery.add_argument("--prompt", nargs="+", default=[], help="prompts of the videos")
    gallery.add_argument(
        "--output_dir", type=Path, default=Path("outputs/gallery"), help="output folder"
    )
    gallery.add_argument(
        "--pictures", type=Path, help="folder of the pictures (default: the output folder)"
    )
    return parser


@exit_on_error("figures.py")
def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    options, flags = parser.parse_known_args(argv)
    if options.name == "gallery":
        return draw_gallery(options, flags)
    options = parser.parse_args(argv)  # no other flags
    return draw_runs(options) if options.name == "runs" else draw_paper(options)


if __name__ == "__main__":
    sys.exit(main())
