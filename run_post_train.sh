#!/usr/bin/env bash
# Creates the environment and trains:  bash run_post_train.sh [--config FILE.yaml] [flags of post_train.py]
# Without --config: HunyuanVideo-1.5 on all GPUs of this machine, or the miniature if there is no GPU.
# NPROC sets the number of processes.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/setup.sh

has_flag() {
    local flag="$1" argument
    shift
    for argument in "$@"; do
        case "$argument" in "$flag" | "$flag="*) return 0 ;; esac
    done
    return 1
}

first_free_folder() { # outputs/miniature, outputs/miniature-2, ...
    local folder="$1" number=1
    while [ -e "$folder" ]; do
        number=$((number + 1))
        folder="$1-$number"
    done
    echo "$folder"
}

# torch respects CUDA_VISIBLE_DEVICES and counts only GPUs that it can use.
num_gpus="$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')"
arguments=("$@")
if ! has_flag --config "$@"; then
    if [ "$num_gpus" -gt 0 ]; then
        if [ ! -d ckpts ] && ! has_flag --pretrained_model_root "$@" && ! has_flag --print_config "$@"; then
            echo "run_post_train.sh: the folder ./ckpts with the HunyuanVideo-1.5 checkpoints does not exist." >&2
            echo "Download them (bash download_weights.sh) or set --pretrained_model_root to their folder." >&2
            echo "The miniature needs no download: bash run_post_train.sh --config configs/miniature.yaml" >&2
            exit 2
        fi
        arguments=(--config configs/hunyuanvideo15_480p_8gpu.yaml "$@")
    else
        if command -v nvidia-smi > /dev/null; then # an old driver must not go unnoticed
            python -c 'import sys; from hyvideo.training.gpu_driver import driver_problem; sys.exit(driver_problem())' ||
                echo "run_post_train.sh: the miniature runs on the CPU" >&2
        fi
        arguments=(--config configs/miniature.yaml "$@")
        if ! has_flag --output_dir "$@" && ! has_flag --out "$@" && ! has_flag --resume_from_checkpoint "$@"; then
            arguments+=(--output_dir "$(first_free_folder outputs/miniature)")
        fi
    fi
fi

processes="${NPROC:-$((num_gpus > 0 ? num_gpus : 1))}"
case " ${arguments[*]} " in *configs/miniature*.yaml* | *configs/smoke.yaml*) processes="${NPROC:-1}" ;; esac
if [ "$processes" -gt 1 ]; then
    exec python -m scripts.launch --standalone --nproc_per_node="$processes" --shutdown-timeout=240 post_train.py \
        "${arguments[@]}"
fi
exec python post_train.py "${arguments[@]}"
