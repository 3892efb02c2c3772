#!/usr/bin/env bash
# From a fresh clone to a moving picture of the pretrained model before and after training, on a CPU:
#   bash examples/galaxies/run.sh [sage|nft|lora]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
config="${1:-sage}"
out="outputs/galaxies/$config"
source scripts/setup.sh
python -m pip install --no-deps galaxygrad==0.1.9
python -m examples.galaxies.convert
python post_train.py --config "examples/galaxies/$config.yaml"
python -m examples.galaxies.results "$out" --picture "$out/training.webp"
echo "$out/training.webp and $out/report.html show what has changed"
