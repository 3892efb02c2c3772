#!/usr/bin/env bash
# Packs what a machine without network lacks into the git-ignored folder .whl, for Python 3.12 on x86-64 Linux:
#   bash scripts/pack_for_gpu.sh          # diffusers and peft
#   bash scripts/pack_for_gpu.sh av       # and av, for runs that write videos
# Take .whl along with the working tree; together they stay below 64 MiB. PYTHON_VERSION sets another Python.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(diffusers peft "$@")

wanted=()
for package in "${packages[@]}"; do
    if ! pinned="$(grep -E "^${package}==" requirements.txt)"; then
        echo "pack_for_gpu.sh: only packages of requirements.txt can be packed, got ${package}" >&2
        exit 2
    fi
    wanted+=("$pinned")
done

platforms=()
for glibc in 28 27 24 17 5; do
    platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
python="$(command -v .venv/bin/python || command -v python3)"
rm -rf .whl
"$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --dest .whl "${wanted[@]}"

# What travels: tracked files, files that git does not ignore, and .whl.
bytes="$( (git ls-files -z --cached --others --exclude-standard; find .whl -type f -print0) |
    { xargs -0 stat --format=%s -- 2>/dev/null || true; } | awk '{ sum += $1 } END { print sum + 0 }')"
mebibytes=$(((bytes + 1048575) / 1048576))
if [ "$mebibytes" -gt 64 ]; then
    rm -rf .whl
    echo "pack_for_gpu.sh: the working tree and .whl have ${mebibytes} MiB, and at most 64 may travel; pack less" >&2
    exit 1
fi
echo "packed ${wanted[*]} into .whl; with the working tree ${mebibytes} MiB. On the other machine:"
echo "  python3 -m pip install --quiet --no-index --no-deps --target /tmp/site .whl/*.whl"
echo "  PYTHONPATH=/tmp/site python3 -m scripts.gpu_check right"
