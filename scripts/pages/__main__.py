"""Write the parts of pages that follow from the code:

    python -m scripts.pages           # write them
    python -m scripts.pages --check   # exit with 1, and name the files, if any is outdated

A part of a page stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Read what was
written before you commit it.
"""

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hyvideo.files.files import ROOT
from hyvideo.records.metric_table import GROUPS, table_of
from scripts.pages import settings_schema, settings_tables

SCHEMA = ROOT / "configs/settings.schema.json"
# by page and name of the part
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/settings.md": {
        "settings": settings_tables.all_settings,
        "defaults by version": settings_tables.defaults_by_version,
    },
    "docs/monitoring.md": {
        f"metrics: {name}": partial(table_of, metrics) for name, metrics in GROUPS.items()
    },
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args(argv)
    outdated = {path: text for path, text in written().items() if path.read_text("utf-8") != text}
    for path, text in outdated.items():
        if not options.check:
            path.write_text(text, encoding="utf-8")
        print(f"{'outdated' if options.check else 'written'}: {path.relative_to(ROOT)}")
    if options.check and outdated:
        sys.exit("python -m scripts.pages writes them")


def written() -> dict[Path, str]:
    """Return the text of each file with its parts as the code has them now."""
    texts = {SCHEMA: settings_schema.text()}
    for page, parts in PARTS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, make in parts.items():
            text = with_part(text, name, make())
        texts[ROOT / page] = text
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
