"""Recompute the tables of pages from the results of each seed in docs/data.

    python -m scripts.seed_tables docs/data/improve.csv                           means and 95 % intervals over seeds
    python -m scripts.seed_tables docs/data/improve.csv --against "all guided"    differences, paired by seed
    python -m scripts.seed_tables                                                 all files of docs/data

A file has columns of labels, then `seed`, then metrics. Several labels of --against are joined with
commas.
"""

from pathlib import Path

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import ROOT


@exit_on_error("seed_tables.py", (ValueError, OSError))
def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="CSV", help="files with seeds")
    parser.add_argument("--against", help="labels of the rows that the others are compared with")
    options = parser.parse_args(argv)

    from studies.tables.seed_table import as_markdown, read_seed_table  # slow to import

    against = tuple(options.against.split(",")) if options.against is not None else None
    for path in options.files or sorted((ROOT / "docs/data").glob("*.csv")):
        print(f"\n{path.name}\n\n{as_markdown(read_seed_table(path), against)}")


if __name__ == "__main__":
    main()
