#!/usr/bin/env bash
# Trains on the node it runs on, one of NNODES; the same command on each node, with the first one's address:
#   NNODES=2 NPROC_PER_NODE=8 MASTER_ADDR=node1 bash scripts/post_train/train_grpo.sh --config FILE.yaml [flags]
# Goes on from the newest complete checkpoint of its output_dir, if there is one. Asked to end by SIGUSR1 it ends with
# 75, to be started again; by SIGTERM or Ctrl-C with 143; either way all is saved, where the signal comes here alone:
# scancel signals every process, so first let them leave by scancel --signal=USR1. Else the code is post_train.py's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ -n "${PID_FILE:-}" ]; then # for who wants to end it from elsewhere
    echo "$$" > "$PID_FILE"
    trap 'rm -f "$PID_FILE"' EXIT
fi
[ "${SKIP_SETUP:-0}" = 1 ] || source scripts/setup.sh

NNODES="${NNODES:-1}"
[ "$NNODES" = 1 ] || : "${MASTER_ADDR:?train_grpo.sh: MASTER_ADDR must name the first of the NNODES nodes}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-29500}"
RDZV_ID="${RDZV_ID:-grpo}"
MAX_RESTARTS="${MAX_RESTARTS:-3}"

if [ -z "${NPROC_PER_NODE:-}" ]; then
    NPROC_PER_NODE="$(nvidia-smi --list-gpus 2> /dev/null | grep -c '^GPU ' || true)"
    [ "$NPROC_PER_NODE" -gt 0 ] || NPROC_PER_NODE=1
fi

value_of() { # value_of NAME ARGUMENTS...: of --NAME or --NA-ME, the last one; fails where it is not given
    local wanted="$1" value="" found=1
    shift
    while [ "$#" -gt 0 ]; do
        case "${1%%=*}" in
            "--$wanted" | "--${wanted//_/-}")
                found=0
                case "$1" in *=*) value="${1#*=}" ;; *) value="${2:-}" ;; esac
                ;;
        esac
        shift
    done
    printf '%s' "$value"
    return "$found"
}

resume=(--resume_from_checkpoint latest) # begins from nothing where there is no checkpoint
if value_of resume_from_checkpoint "$@" > /dev/null; then
    resume=()
elif config="$(value_of config "$@")" && grep -Eq "^resume_from_checkpoint: *['\"]?[^'\" #]" "$config" 2> /dev/null; then
    resume=() # the file names one
fi

entry=(post_train.py "${resume[@]}")
if [ "${PREFLIGHT:-0}" = 1 ]; then
    entry=(-m scripts.preflight "${resume[@]}")
    MAX_RESTARTS=0
fi

# A session of its own and no SIGUSR1: the agent shall hear SIGTERM once, from here, whoever was signalled. It asks its
# processes to leave by SIGUSR1; SIGTERM is the end of those whose fellow has failed.
(
    trap '' USR1
    exec setsid python -m scripts.launch --nnodes="$NNODES" --nproc_per_node="$NPROC_PER_NODE" --rdzv-backend=c10d \
        --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$RDZV_ID" --max-restarts="$MAX_RESTARTS" \
        --shutdown-timeout="${SHUTDOWN_TIMEOUT:-240}" "${entry[@]}" "$@"
) &
agent=$!

asked_to_leave=0
told_to_end=0
# shellcheck disable=SC2317
stop() { # called by trap
    signalled=1
    kill -TERM "$agent" 2> /dev/null || true
}
trap 'asked_to_leave=1; stop' USR1
trap 'told_to_end=1; stop' INT TERM HUP
while :; do # a signal ends a wait
    signalled=0
    status=0
    wait "$agent" || status=$?
    [ "$signalled" = 1 ] || break
done
if [ "$asked_to_leave" = 1 ]; then
    case "$status" in
        0 | 2 | 3) ;;      # done, refused, reward hacking: another start would end so too
        *) status=75 ;;    # to be started again: Slurm's time was up, not the training
    esac
elif [ "$told_to_end" = 1 ] && [ "$status" -eq 75 ]; then
    status=143 # by who does not want it started again, as scancel
fi
exit "$status"
