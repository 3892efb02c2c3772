#!/usr/bin/env bash
# Sets up the environment, checks style and runs all tests:  bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
ruff check .
ruff format --check .
# Small matrices gain nothing from more threads.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
python -m pytest "$@"
