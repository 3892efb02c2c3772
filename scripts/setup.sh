#!/usr/bin/env bash
# Creates .venv in the repository from requirements.txt if it is missing or out of date, and puts it on PATH. Sourced by
# the other scripts:  source scripts/setup.sh
set -euo pipefail

repository="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
venv="$repository/.venv"

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup.sh: Python 3.11 or newer is required but was not found; install it or set PYTHON" >&2
    return 1
}

has_installed() { # has_installed FILE: whether the packages of FILE are those that were installed last
    [ "$(cat "$venv/.$1.sha256" 2>/dev/null)" = "$(sha256sum < "$repository/$1")" ]
}

install_packages() { # install_packages FILE
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement="$repository/$1" || {
        echo "setup.sh: pip did not install the packages of $1; see its message above, then repeat the command" >&2
        exit 1
    }
    sha256sum < "$repository/$1" > "$venv/.$1.sha256"
    echo "setup.sh: the packages of $1 are installed" >&2
}

if [ ! -x "$venv/bin/python" ] || ! has_installed requirements.txt; then
    python="$(find_python)"
    echo "setup.sh: creating .venv from requirements.txt with $("$python" --version)." >&2
    echo "setup.sh: On Linux, torch comes with CUDA, also for machines without a GPU: .venv needs 5.5 GB of disk." >&2
    echo "setup.sh: The download takes a few minutes." >&2
    free_gb="$(($(df -Pk "$repository" | awk 'NR == 2 { print $4 }') * 1024 / 1000000000))"
    if [ ! -x "$venv/bin/python" ] && [ "$free_gb" -lt 6 ]; then
        echo "setup.sh: WARNING: .venv may need 6 GB of disk while it is created, got $free_gb GB free in $repository" >&2
    fi
    "$python" -m venv "$venv"
    install_packages requirements.txt
fi
PATH="$venv/bin:$PATH"
export PATH
