#!/usr/bin/env bash
# Runs train_grpo.sh on every node of NODES with pdsh, or with ssh if pdsh is missing. Output lines start with the node:
#   NODES=node1,node2 bash scripts/post_train/pdsh_train.sh --config FILE.yaml [flags]
# Ctrl-C or SIGTERM stops the training on all nodes, then this script. If a node ends with 1 and none with another code,
# all are started again, up to MAX_RESTARTS times.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
LAUNCHER="${LAUNCHER:-pdsh_train.sh}"
source scripts/post_train/common.sh
: "${NODES:?pdsh_train.sh: NODES must list the nodes, separated by commas}"
IFS=, read -r -a nodes <<< "$NODES"
use_nodes "${nodes[@]}"
export PID_FILE="${PID_FILE:-/tmp/$RDZV_ID.pid}" # a path on the nodes
repository="${REMOTE_DIR:-$PWD}"

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
    fail "cannot reach a node, or it has no repository at $repository (set REMOTE_DIR)"
fi

# shellcheck disable=SC2317
stop() { # called by trap
    stopped_by=TERM
    interrupted=1
    say "stopping the training on $NODES"
    on_all_nodes "sh -c $(printf '%q' "kill -TERM \$(cat $PID_FILE)")" || true
}

train() {
    on_all_nodes "$(node_command "$@")" &
    trap stop INT TERM
    wait_for "$!"
}
with_restarts train "$@"
