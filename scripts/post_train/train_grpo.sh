#!/usr/bin/env bash
# Trains on this node, one of NNODES. Run the same command on each node, with the address of the first:
#   NNODES=2 NPROC_PER_NODE=8 MASTER_ADDR=node1 bash scripts/post_train/train_grpo.sh --config FILE.yaml [flags]
# Resumes from the newest complete checkpoint of output_dir, if there is one. On SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C the
# run saves and exits with 75; otherwise the exit code is post_train.py's. On one node, a run that ends with 1 is started
# again up to MAX_RESTARTS times. On several nodes, all must have ended before any is started again, which
# run_post_train_multinode.sh and slurm.sbatch do.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." # also if a symbolic link was started
if [ -n "${PID_FILE:-}" ]; then # lets another program stop the training
    echo "$$" > "$PID_FILE"
    trap 'rm -f "$PID_FILE"' EXIT
fi
LAUNCHER=train_grpo.sh
source scripts/post_train/common.sh
set_up

NNODES="${NNODES:-1}"
[ "$NNODES" = 1 ] || : "${MASTER_ADDR:?train_grpo.sh: MASTER_ADDR must be the address of the first of the NNODES nodes}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-29500}"
RDZV_ID="${RDZV_ID:-grpo}"
SHUTDOWN_TIMEOUT="${SHUTDOWN_TIMEOUT:-240}"

if [ -z "${NPROC_PER_NODE:-}" ]; then
    NPROC_PER_NODE="$(num_gpus)"
    [ "$NPROC_PER_NODE" -gt 0 ] || NPROC_PER_NODE=1
fi

for name in NNODES NPROC_PER_NODE MASTER_PORT; do check_number "$name" 1; done
MAX_RESTARTS="${MAX_RESTARTS:-$((NNODES == 1 ? 3 : 0))}"
for name in MAX_RESTARTS SHUTDOWN_TIMEOUT; do check_number "$name" 0; done

# Sets the address by which the other nodes reach this one, and the network interface of gloo. torchrun and gloo would
# announce the host name, which /etc/hosts may map to a loopback address, as on Ubuntu.
find_network() {
    local addresses master route
    command -v ip > /dev/null || {
        say "to find this node's address, install iproute2, or set LOCAL_ADDR and GLOO_SOCKET_IFNAME"
        return
    }
    addresses="$(getent ahostsv4 "$MASTER_ADDR" | awk '{ print $1 }')" || return 0 # torchrun reports the name
    master="$(awk '!/^127\./ { print; exit }' <<< "$addresses")"
    # On the first node its own name may only have a loopback address; then the default route is taken, to an address
    # that is reserved for documentation.
    route="$(ip -4 -o route get "${master:-198.51.100.1}")" || return 0
    LOCAL_ADDR="$(sed -n 's/.* src \([^ ]*\).*/\1/p' <<< "$route")"
    GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$(ip -4 -o addr show to "$LOCAL_ADDR" | awk '{ print $2; exit }')}"
    export GLOO_SOCKET_IFNAME
    if [ -z "$master" ] || [ "$master" = "$LOCAL_ADDR" ]; then
        endpoint=localhost # torchrun may not recognize an address of this machine
    fi
}

endpoint="$MASTER_ADDR"
if [ "$NNODES" -gt 1 ] && [ -z "${LOCAL_ADDR:-}" ] && [[ ! "$MASTER_ADDR" =~ ^(localhost$|127\.) ]]; then
    find_network
fi

launcher=""
# shellcheck disable=SC2317
stop() { # called by trap
    interrupted=1
    stopped_by="${stopped_by:-$1}" # Slurm sends SIGTERM some time after SIGUSR1
    [ -z "$launcher" ] || kill -TERM "$launcher" 2> /dev/null || true
}
trap 'stop USR1' USR1
trap 'stop TERM' INT TERM HUP

train() {
    # setsid: the launcher receives a signal of the terminal once, from this script.
    setsid python -m scripts.launch --nnodes="$NNODES" --nproc_per_node="$NPROC_PER_NODE" --rdzv-backend=c10d \
        --rdzv-endpoint="$endpoint:$MASTER_PORT" --rdzv-id="$RDZV_ID" ${LOCAL_ADDR:+"--local-addr=$LOCAL_ADDR"} \
        --shutdown-timeout="$SHUTDOWN_TIMEOUT" post_train.py "$@" &
    launcher=$!
    [ -z "$stopped_by" ] || kill -TERM "$launcher" # the signal came before the launcher
    wait_for "$launcher"
}
status=0
with_restarts train "$@" || status=$?

if [ "$stopped_by" = USR1 ]; then
    case "$status" in
        0 | 2 | 3) ;;      # finished, unusable settings, reward hacking: a restart would end the same way
        *) status=75 ;;    # start again: only the time limit was reached
    esac
elif [ "$stopped_by" = TERM ] && [ "$status" -eq 75 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    status=143 # by scancel: slurm.sbatch must not requeue the job
fi
exit "$status"
