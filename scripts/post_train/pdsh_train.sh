#!/usr/bin/env bash
# Runs train_grpo.sh on every node of NODES with pdsh, or with ssh if pdsh is missing. Output lines start with the node:
#   NODES=node1,node2 NNODES=2 MASTER_ADDR=node1 bash scripts/post_train/pdsh_train.sh --config FILE.yaml [flags]
# Ctrl-C or SIGTERM stops the training on all nodes, then this script. If a node ends with 1 and none with another code,
# all are started again, up to MAX_RESTARTS times.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

: "${NODES:?pdsh_train.sh: NODES must list the nodes, separated by commas}"
RDZV_ID="${RDZV_ID:-grpo-$(date +%s)-$$}"
PID_FILE="${PID_FILE:-/tmp/$RDZV_ID.pid}" # a path on the nodes
MAX_RESTARTS="${MAX_RESTARTS:-3}"
if [[ ! "$MAX_RESTARTS" =~ ^[0-9]{1,8}$ ]]; then
    echo "${LAUNCHER:-pdsh_train.sh}: MAX_RESTARTS must be an integer of at least 0, got '$MAX_RESTARTS'" >&2
    exit 2
fi
IFS=, read -r -a nodes <<< "$NODES"

passed_env=() # NAME=value, quoted for a shell
# Only these variables are passed: other users can read a command line, so it must not contain secrets.
for name in $(compgen -e); do
    case " NNODES MASTER_ADDR MASTER_PORT NPROC_PER_NODE SHUTDOWN_TIMEOUT SKIP_SETUP PYTHON \
OMP_NUM_THREADS ${PASS_ENV:-} " in
        *" $name "*) ;;
        *) case "$name" in NCCL_* | GLOO_* | TORCH_* | TORCHINDUCTOR_* | CUDA_* | PYTORCH_*) ;; *) continue ;; esac ;;
    esac
    passed_env+=("$(printf '%q' "$name=${!name}")")
done
passed_env+=("$(printf '%q' "PID_FILE=$PID_FILE")" MAX_RESTARTS=0)

repository="${REMOTE_DIR:-$PWD}"
flags=""
for argument in "$@"; do
    flags+=" $(printf '%q' "$argument")"
done
# command_of ATTEMPT prints the command of a node. Each start of the run has an RDZV_ID of its own.
command_of() {
    local script variables=("${passed_env[@]}" "$(printf '%q' "RDZV_ID=$RDZV_ID-$1")")
    script="cd $(printf '%q' "$repository") && exec env ${variables[*]} bash scripts/post_train/train_grpo.sh$flags"
    # %q quotes for bash, and the login shell of a node may be a different one.
    echo "exec bash -c $(printf '%q' "$script")"
}

# setsid: Ctrl-C in this terminal must reach the nodes through stop(), and not close the connections.
on_all_nodes() {
    if command -v pdsh > /dev/null; then
        # -f: by default pdsh runs on 32 nodes at a time. It expands %h and %u, so % is escaped.
        setsid pdsh -S -R ssh -f "${#nodes[@]}" -w "$NODES" "${1//%/%%}"
        return
    fi
    local node pid code status=0 pids=()
    for node in "${nodes[@]}"; do
        setsid ssh -o BatchMode=yes "$node" "$1" < /dev/null > >(sed -u "s/^/$node: /") 2>&1 &
        pids+=("$!")
    done
    for pid in "${pids[@]}"; do
        code=0
        wait "$pid" || code=$?
        [ "$code" -le "$status" ] || status="$code"
    done
    return "$status"
}

# Checked first: the other nodes would wait for one that never starts.
if ! on_all_nodes "ls $(printf '%q' "$repository/scripts/post_train/train_grpo.sh") > /dev/null"; then
    echo "${LAUNCHER:-pdsh_train.sh}: cannot reach a node, or it has no repository at $repository (set REMOTE_DIR)" >&2
    exit 2
fi

stopped=0
# shellcheck disable=SC2317
stop() { # called by trap
    stopped=1
    interrupted=1
    echo "${LAUNCHER:-pdsh_train.sh}: stopping the training on $NODES" >&2
    on_all_nodes "sh -c $(printf '%q' "kill -TERM \$(cat $PID_FILE)")" || true
}

for ((attempt = 0; attempt <= MAX_RESTARTS; attempt++)); do
    [ "$attempt" = 0 ] || echo "${LAUNCHER:-pdsh_train.sh}: restart $attempt of at most $MAX_RESTARTS" >&2
    on_all_nodes "$(command_of "$attempt")" &
    launcher=$!
    trap stop INT TERM
    interrupted=1
    while [ "$interrupted" = 1 ]; do # a signal interrupts wait
        interrupted=0
        status=0
        wait "$launcher" || status=$?
    done
    # The run ends with 1 after an error. After other codes a restart would end the same way, or is not wanted.
    if [ "$status" -ne 1 ] || [ "$stopped" = 1 ]; then
        break
    fi
done
exit "$status"
