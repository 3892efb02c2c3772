#!/usr/bin/env bash
# Downloads wheels for a machine without network to the git-ignored folder .whl, for Python 3.12 on x86-64 Linux:
#   bash scripts/pack_for_gpu.sh             # what gpu_check needs beside a torch with transformers and pytest
#   bash scripts/pack_for_gpu.sh av plotly   # also av, which writes videos, and plotly, which writes report.html
# Copy .whl together with the working tree: 45 MB without av, 80 MB with it. PYTHON_VERSION selects another Python.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(command -v .venv/bin/python || command -v python3)"
packages=(diffusers peft ftfy torchao httpx-retries einops filelock pydantic "$@")

requirements=(wcwidth annotated-types typing-inspection) # of ftfy and pydantic
for package in "${packages[@]}"; do
    if ! pinned="$(grep -E "^${package}==" requirements.txt requirements-dev.txt -h)"; then
        echo "pack_for_gpu.sh: packages must be listed in requirements.txt or requirements-dev.txt, got ${package}" >&2
        exit 2
    fi
    requirements+=("$pinned")
done

# pydantic works with one version of its core only.
core='from importlib.metadata import requires; print(*(r for r in requires("pydantic") if r.startswith("pydantic-core")))'
requirements+=("$("$python" -c "$core")")

platforms=()
for glibc in 28 27 24 17 5; do
    platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
rm -rf .whl
"$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --dest .whl "${requirements[@]}"

echo "downloaded ${requirements[*]} to .whl. On the other machine:"
echo "  python3 -m pip install -q --no-index --no-deps --upgrade --target /tmp/site .whl/*.whl && export PYTHONPATH=/tmp/site"
for part in correct speed; do
    echo "  python3 -m scripts.gpu_check ${part} --output_dir RESULTS/${part}"
done
