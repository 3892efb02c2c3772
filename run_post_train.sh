#!/usr/bin/env bash
# Creates the environment and trains:  bash run_post_train.sh [--config FILE.yaml] [flags of post_train.py]
# The model is the one of --config, or HunyuanVideo-1.5 if --pretrained_model_root or --transformer_version is given.
# Otherwise it is the miniature, in a minute or two on a CPU.
# Runs on all GPUs of this machine, and configs/miniature.yaml alone on two cores; other miniatures are one process.
# NPROC sets the number of processes.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")" # also if a symbolic link was started
LAUNCHER=run_post_train.sh
source scripts/post_train/common.sh
[ -z "${NPROC:-}" ] || check_number NPROC 1
set_up

names_a_model() {
    local argument
    for argument in "$@"; do
        case "${argument%%=*}" in
            --config | --pretrained_model_root) return 0 ;;
            --transformer_version | --pretrained_transformer_version) return 0 ;;
        esac
    done
    return 1
}

has_config() {
    local argument
    for argument in "$@"; do
        case "$argument" in --config | --config=*) return 0 ;; esac
    done
    return 1
}

arguments=("$@")
if ! names_a_model "$@"; then
    say "training configs/miniature.yaml, because no flag names a model. For a larger one,"
    say "choose --config from configs/ and download its weights (checkpoints-download.md)"
    arguments=(--config configs/miniature.yaml "$@")
elif ! has_config "$@"; then # the command line of the public reference
    arguments=(--config configs/hunyuanvideo15_480p_8gpu.yaml "$@")
fi

case " ${arguments[*]} " in
    " --config configs/miniature.yaml ")
        processes="${NPROC:-1}"
        # Two processes of one thread sample the same 32 videos per iteration in less time, up to rounding. With
        # further flags the run has one process, because they may set the batch or the threads.
        if [ -z "${NPROC:-}" ] && [ "$(nproc)" -ge 2 ]; then
            processes=2
            arguments+=(--batch_size 16 --num_threads 1)
        fi
        ;;
    *configs/miniature*.yaml* | *configs/smoke.yaml*) processes="${NPROC:-1}" ;;
    *)
        gpus="$(num_gpus)"
        if [ "$gpus" = 0 ]; then # the reason, such as an old driver
            python -c 'from hyvideo.loading.gpu_driver import driver_problem as find; print(find() or "no GPU was found")' >&2
        fi
        processes="${NPROC:-$((gpus > 0 ? gpus : 1))}"
        ;;
esac
if [ "$processes" -gt 1 ]; then
    exec python -m scripts.launch --standalone --nproc_per_node="$processes" \
        --shutdown-timeout="${SHUTDOWN_TIMEOUT:-240}" post_train.py "${arguments[@]}"
fi
exec python post_train.py "${arguments[@]}"
