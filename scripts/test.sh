#!/usr/bin/env bash
# Sets up the environment, checks style and runs all tests:  bash scripts/test.sh [pytest arguments]
# TEST_WORKERS sets the number of test processes (2); 0 runs the tests in this process.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
ruff check .
ruff format --check .
unset PYTHONDONTWRITEBYTECODE # otherwise every test process compiles all tests again
# The matrices are too small to profit from more threads.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
