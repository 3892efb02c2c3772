"""Write the parts of pages that follow from the code:

    python -m scripts.pages           # write them
    python -m scripts.pages docs/sde.md
    python -m scripts.pages --check   # exit with 1, and name the files, if any is outdated

A part of a page stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Read what was
written before you commit it.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from hyvideo.files.files import ROOT
from hyvideo.records.metric_table import GROUPS, table_of
from scripts.pages import (
    galaxies_table,
    plan_tables,
    result_tables,
    sampler_tables,
    settings_schema,
    settings_tables,
)

SCHEMA_NAME = "configs/settings.schema.json"
SCHEMA = ROOT / SCHEMA_NAME
# by page and name of the part
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "GPUs": plan_tables.readme_rows,
        "what training buys": result_tables.what_training_buys,
    },
    "docs/cost.md": {
        "recipes": plan_tables.costs,
        "stopwatch": plan_tables.beside_a_stopwatch,
    },
    "docs/methods.md": {
        "samplers": result_tables.samplers,
        "sampler differences": result_tables.sampler_differences,
    },
    "docs/monitoring.md": {
        f"metrics: {name}": partial(table_of, metrics) for name, metrics in GROUPS.items()
    },
    "docs/ratings.md": {"fine-tuning": result_tables.fine_tuning},
    "docs/results.md": {
        "gain": result_tables.gain,
        "gain over control": result_tables.gain_over_control,
    },
    "docs/sde.md": sampler_tables.PARTS,
    "docs/settings.md": {
        "settings": settings_tables.all_settings,
        "defaults by version": settings_tables.defaults_by_version,
    },
    "docs/train_wan.md": {
        "video sizes": plan_tables.wan_sizes,
        "versions": plan_tables.wan_versions,
        "experts": result_tables.experts,
    },
    "examples/galaxies/README.md": {"results": galaxies_table.results},
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="pages; default: all")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args(argv)
    unknown = set(options.pages) - PARTS.keys()
    if unknown:
        parser.error(f"PAGE must be one of {', '.join(PARTS)}, got {' '.join(sorted(unknown))}")
    texts = written(options.pages or [*PARTS, SCHEMA_NAME])
    outdated = {path: text for path, text in texts.items() if path.read_text("utf-8") != text}
    for path, text in outdated.items():
        if not options.check:
            path.write_text(text, encoding="utf-8")
        print(f"{'outdated' if options.check else 'written'}: {path.relative_to(ROOT)}")
    if options.check and outdated:
        sys.exit("python -m scripts.pages writes them")


def written(names: Iterable[str]) -> dict[Path, str]:
    """Return the text of each file with its parts as the code has them now."""
    texts = {}
    for name in names:
        if name == SCHEMA_NAME:
            texts[SCHEMA] = settings_schema.text()
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        for part, make in PARTS[name].items():
            text = with_part(text, part, make())
        texts[ROOT / name] = text
    return texts


def with_part(page: str, name: str, content: str) -> str:
    """Return a page with ``content`` between the two comments of a part.

    Raises ValueError if the page does not have them once.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"a page must have {begin} and {end} once")
    pattern = f"(?<={re.escape(begin)}).*(?={re.escape(end)})"
    return re.sub(pattern, lambda _: f"\n\n{content.strip()}\n\n", page, flags=re.DOTALL)


if __name__ == "__main__":
    main()
