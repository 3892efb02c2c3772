#!/usr/bin/env bash
# Trains on several nodes that this one reaches by ssh, with the repository at the same path on each:
#   NODES=node1,node2 NPROC_PER_NODE=8 bash run_post_train_multinode.sh --config FILE.yaml [flags of post_train.py]
# The nodes come from NODES, else from NODE_FILE, else from ./hostfile (a node a line). PREFLIGHT=1 checks them only.
# docs/multinode.md has all variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() {
    echo "run_post_train_multinode.sh: $*" >&2
    exit 2
}

if [ -z "${NODES:-}" ]; then
    node_file="${NODE_FILE:-hostfile}"
    [ -r "$node_file" ] || fail "name the nodes: NODES=node1,node2, or a line for each in NODE_FILE; cannot read $node_file"
    # "node1 slots=8" is read as node1.
    NODES="$(sed -e 's/#.*//' "$node_file" | awk 'NF { print $1 }' | paste -s -d ,)"
fi
NODES="${NODES//[[:space:]]/}"
[[ "$NODES" =~ ^[A-Za-z0-9._@:-]+(,[A-Za-z0-9._@:-]+)*$ ]] || fail "NODES must be names with commas between, got '$NODES'"
IFS=, read -r -a nodes <<< "$NODES"
twice="$(printf '%s\n' "${nodes[@]}" | sort | uniq -d | paste -s -d ' ')"
[ -z "$twice" ] || fail "each node must be named once, got twice: $twice"

NNODES="${#nodes[@]}"
MASTER_ADDR="${MASTER_ADDR:-${nodes[0]#*@}}"
MASTER_PORT="${MASTER_PORT:-29500}"
RDZV_ID="${RDZV_ID:-grpo-$(date +%s)-$$}"
export NODES NNODES MASTER_ADDR MASTER_PORT RDZV_ID

# Once, before all nodes of a shared file system would do it together.
[ "${SKIP_SETUP:-0}" = 1 ] || source scripts/setup.sh
exec bash scripts/post_train/pdsh_train.sh "$@"
