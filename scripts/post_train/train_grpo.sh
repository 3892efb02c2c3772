#!/usr/bin/env bash
# Trains on this node, one of NNODES. Run the same command on each node, with the address of the first:
#   NNODES=2 NPROC_PER_NODE=8 MASTER_ADDR=node1 bash scripts/post_train/train_grpo.sh --config FILE.yaml [flags]
# Resumes from the newest complete checkpoint of output_dir, if there is one. On SIGUSR1 it saves and exits with 75 (to be
# started again), on SIGTERM or Ctrl-C it saves and exits with 143; otherwise the exit code is post_train.py's. The
# signal must go to this process only: scancel signals every process, so run scancel --signal=USR1 first.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." # also if a symbolic link was started
if [ -n "${PID_FILE:-}" ]; then # lets another program stop the training
    echo "$$" > "$PID_FILE"
    trap 'rm -f "$PID_FILE"' EXIT
fi
[ "${SKIP_SETUP:-0}" = 1 ] || source scripts/setup.sh

NNODES="${NNODES:-1}"
[ "$NNODES" = 1 ] || : "${MASTER_ADDR:?train_grpo.sh: MASTER_ADDR must be the address of the first of the NNODES nodes}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-29500}"
RDZV_ID="${RDZV_ID:-grpo}"
MAX_RESTARTS="${MAX_RESTARTS:-3}"

if [ -z "${NPROC_PER_NODE:-}" ]; then
    # torch respects CUDA_VISIBLE_DEVICES and counts only GPUs that it can use.
    NPROC_PER_NODE="$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')"
    [ "$NPROC_PER_NODE" -gt 0 ] || NPROC_PER_NODE=1
fi

check_number() { # check_number NAME LEAST: NAME must be an integer of at least LEAST
    if [[ ! "${!1}" =~ ^(0|[1-9][0-9]{0,7})$ ]] || [ "${!1}" -lt "$2" ]; then
        echo "train_grpo.sh: $1 must be an integer of at least $2, got '${!1}'" >&2
        exit 2
    fi
}
SHUTDOWN_TIMEOUT="${SHUTDOWN_TIMEOUT:-240}"
for name in NNODES NPROC_PER_NODE MASTER_PORT; do check_number "$name" 1; done
for name in MAX_RESTARTS SHUTDOWN_TIMEOUT; do check_number "$name" 0; done

# setsid and the SIGUSR1 trap: the agent must receive SIGTERM once, from this script, whichever process was signaled. It
# then sends SIGUSR1 to its processes, which save and exit; it sends them SIGTERM only after one of them has failed.
(
    trap '' USR1
    exec setsid python -m scripts.launch --nnodes="$NNODES" --nproc_per_node="$NPROC_PER_NODE" --rdzv-backend=c10d \
        --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$RDZV_ID" --max-restarts="$MAX_RESTARTS" \
        --shutdown-timeout="$SHUTDOWN_TIMEOUT" post_train.py "$@"
) &
agent=$!

got_usr1=0
got_term=0
# shellcheck disable=SC2317
stop() { # called by trap
    signalled=1
    kill -TERM "$agent" 2> /dev/null || true
}
trap 'got_usr1=1; stop' USR1
trap 'got_term=1; stop' INT TERM HUP
while :; do # a signal interrupts wait
    signalled=0
    status=0
    wait "$agent" || status=$?
    [ "$signalled" = 1 ] || break
done
if [ "$got_usr1" = 1 ]; then
    case "$status" in
        0 | 2 | 3) ;;      # finished, user error, reward hacking: a restart would end the same way
        *) status=75 ;;    # start again: only the time limit was reached
    esac
elif [ "$got_term" = 1 ] && [ "$status" -eq 75 ]; then
    status=143 # stopped on purpose, e.g. by scancel: do not start again
fi
exit "$status"
