#!/usr/bin/env bash
# Runs train_grpo.sh on every node of NODES by pdsh, or ssh where there is no pdsh; lines begin with the node's name:
#   NODES=node1,node2 NNODES=2 MASTER_ADDR=node1 bash scripts/post_train/pdsh_train.sh --config FILE.yaml [flags]
# Ctrl-C, or SIGTERM, ends the training on the nodes, and then this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

: "${NODES:?pdsh_train.sh: NODES must name the nodes, with commas}"
RDZV_ID="${RDZV_ID:-grpo-$(date +%s)-$$}"
PID_FILE="${PID_FILE:-/tmp/$RDZV_ID.pid}" # on the nodes
IFS=, read -r -a nodes <<< "$NODES"

passed_on=() # NAME=value, quoted for a shell
# Names only, and those with a value; what is secret does not belong on a command line and is not passed on.
for name in $(compgen -e); do
    case " NNODES MASTER_ADDR MASTER_PORT NPROC_PER_NODE MAX_RESTARTS SHUTDOWN_TIMEOUT PREFLIGHT SKIP_SETUP PYTHON \
OMP_NUM_THREADS ${PASS_ENV:-} " in
        *" $name "*) ;;
        *) case "$name" in NCCL_* | GLOO_* | TORCH_* | CUDA_*) ;; *) continue ;; esac ;;
    esac
    passed_on+=("$(printf '%q' "$name=${!name}")")
done
passed_on+=("$(printf '%q' "RDZV_ID=$RDZV_ID")" "$(printf '%q' "PID_FILE=$PID_FILE")")

repository="${REMOTE_DIR:-$PWD}"
script="cd $(printf '%q' "$repository") && exec env ${passed_on[*]} bash scripts/post_train/train_grpo.sh"
for argument in "$@"; do
    script+=" $(printf '%q' "$argument")"
done
# bash -c, since %q writes what bash reads, and the login shell of a node may be another.
command="exec bash -c $(printf '%q' "$script")"

# Sessions of their own: Ctrl-C in this terminal goes to the nodes by stop, not to the connections.
on_all_nodes() {
    if command -v pdsh > /dev/null; then
        # -f: by default pdsh talks to 32 nodes at a time, and the others would wait. %h and %u mean something to it.
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

# First, as a node that does not come would be waited for.
if ! on_all_nodes "ls $(printf '%q' "$repository/scripts/post_train/train_grpo.sh") > /dev/null"; then
    echo "pdsh_train.sh: a node was not reached, or the repository is not at $repository there (REMOTE_DIR)" >&2
    exit 2
fi

# shellcheck disable=SC2317
stop() { # called by trap
    stopped=1
    echo "pdsh_train.sh: ending the training on $NODES" >&2
    on_all_nodes "sh -c $(printf '%q' "kill -TERM \$(cat $PID_FILE)")" || true
}

on_all_nodes "$command" &
launcher=$!
trap stop INT TERM
status=0
while :; do # a signal ends a wait
    stopped=0
    status=0
    wait "$launcher" || status=$?
    [ "$stopped" = 1 ] || break
done
exit "$status"
