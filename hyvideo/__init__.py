import logging
import sys
from importlib.util import find_spec

from hyvideo.files import clock  # noqa: F401  starts the clock of the log before other imports

if find_spec("pydantic") is None:
    print(
        f"{sys.executable} does not have the packages of this project: run `source "
        ".venv/bin/activate` in the repository, or first `bash scripts/setup.sh`, which creates it",
        file=sys.stderr,
    )
    raise SystemExit(2)

# diffusers and peft import torchao wherever it is installed, and it logs warnings that do not
# concern this project.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
