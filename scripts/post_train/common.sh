#!/usr/bin/env bash
# What the launch scripts share; each of them sources it in the folder of the repository:
#   source scripts/post_train/common.sh
set -euo pipefail
LAUNCHER="${LAUNCHER:-${0##*/}}" # in messages

say() { echo "$LAUNCHER: $*" >&2; }

fail() {
    say "$@"
    exit 2
}

check_number() { # check_number NAME LEAST: NAME must be an integer of at least LEAST
    [[ "${!1}" =~ ^(0|[1-9][0-9]{0,7})$ ]] && [ "${!1}" -ge "$2" ] ||
        fail "$1 must be an integer of at least $2, got '${!1}'"
}

# Creates .venv if it is missing, and puts it on PATH. A launcher calls this once for all nodes, because on a shared
# file system they would otherwise do it at the same time.
set_up() {
    [ "${SKIP_SETUP:-0}" = 1 ] || source scripts/setup.sh
}

num_gpus() { # torch respects CUDA_VISIBLE_DEVICES and counts only GPUs that it can use
    python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
}

use_nodes() { # use_nodes NODE ...: sets what train_grpo.sh needs on each of them; the first is the master
    NNODES="$#"
    MASTER_ADDR="${MASTER_ADDR:-${1#*@}}"
    MASTER_PORT="${MASTER_PORT:-29500}"
    RDZV_ID="${RDZV_ID:-grpo-$(date +%s)-$$}"
    export NNODES MASTER_ADDR MASTER_PORT RDZV_ID
}

# node_command [FLAG ...] prints the command that trains on a node, for a shell that does not have our environment. Only
# these variables are passed: other users can read a command line, so it must not contain secrets.
node_command() {
    local name argument script
    script="cd $(printf '%q' "${REMOTE_DIR:-$PWD}") && exec env"
    for name in $(compgen -e); do
        case " NNODES MASTER_ADDR MASTER_PORT NPROC_PER_NODE SHUTDOWN_TIMEOUT SKIP_SETUP PYTHON PID_FILE \
OMP_NUM_THREADS ${PASS_ENV:-} " in
            *" $name "*) ;;
            *) case "$name" in NCCL_* | GLOO_* | TORCH_* | TORCHINDUCTOR_* | CUDA_* | PYTORCH_*) ;; *) continue ;; esac ;;
        esac
        script+=" $(printf '%q' "$name=${!name}")"
    done
    # Each start of the run has an RDZV_ID of its own.
    script+=" $(printf '%q' "RDZV_ID=$RDZV_ID-$ATTEMPT") MAX_RESTARTS=0 bash scripts/post_train/train_grpo.sh"
    for argument in "$@"; do
        script+=" $(printf '%q' "$argument")"
    done
    # %q quotes for bash, and the login shell of a node may be a different one.
    echo "exec bash -c $(printf '%q' "$script")"
}

stopped_by="" # the signal that has stopped the run, set by a trap
interrupted=0 # set to 1 by a trap

# with_restarts COMMAND [ARGUMENT ...] runs the command, and again up to MAX_RESTARTS (3) times if it ends with 1, as a
# run does after an error. After other codes a restart would end the same way, or is not wanted. ATTEMPT counts from 0.
with_restarts() {
    local status
    MAX_RESTARTS="${MAX_RESTARTS:-3}"
    check_number MAX_RESTARTS 0
    for ((ATTEMPT = 0; ATTEMPT <= MAX_RESTARTS; ATTEMPT++)); do
        [ "$ATTEMPT" = 0 ] || say "restart $ATTEMPT of at most $MAX_RESTARTS"
        status=0
        "$@" || status=$?
        if [ "$status" -ne 1 ] || [ -n "$stopped_by" ]; then
            break
        fi
    done
    return "$status"
}

wait_for() { # wait_for PID: returns its exit code, also if signals interrupt the waiting
    local status
    interrupted=1
    while [ "$interrupted" = 1 ]; do
        interrupted=0
        status=0
        wait "$1" || status=$?
    done
    return "$status"
}
