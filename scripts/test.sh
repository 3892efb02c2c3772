#!/usr/bin/env bash
# Sets up the environment with the tools of requirements-dev.txt, checks style and runs all tests:
#   bash scripts/test.sh [pytest arguments]
# TEST_WORKERS sets the number of test processes (3 for two cores, because some tests wait); 0 runs the tests in this one.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
has_installed requirements-dev.txt || install_packages requirements-dev.txt
mapfile -t sources < <(git ls-files '*.py' 2> /dev/null || true) # not the user's own files; without git, all files
ruff check "${sources[@]:-.}"
ruff format --check "${sources[@]:-.}"
unset PYTHONDONTWRITEBYTECODE # otherwise every test process compiles all tests again
# The matrices are too small to profit from more threads, and three workers share two cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python -m pytest -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@"
