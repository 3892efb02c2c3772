import sys
from importlib.util import find_spec

# Every program imports this package before any other one that is not Python's own.
if find_spec("pydantic") is None:
    print(
        f"{sys.executable} does not have the packages of this project: run `source "
        ".venv/bin/activate` in the repository, or first `bash scripts/setup.sh`, which creates it",
        file=sys.stderr,
    )
    raise SystemExit(2)
