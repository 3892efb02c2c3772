"""Stands for the package where a program is started as a file, ``python scripts/report.py``, whose
folder Python then searches instead of the repository's.
"""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.modules[__name__]
importlib.import_module("hyvideo")
