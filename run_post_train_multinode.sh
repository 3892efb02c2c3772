#!/usr/bin/env bash
# Trains on several nodes that are reachable by ssh, with the repository at the same path on each:
#   NODES=node1,node2 NPROC_PER_NODE=8 bash run_post_train_multinode.sh --config FILE.yaml [flags of post_train.py]
# Nodes are read from NODES, NODE_FILE or ./hostfile (one node per line), in this order.
# docs/reliability.md#several-machines lists all variables.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" # also if a symbolic link was started
export LAUNCHER=run_post_train_multinode.sh # also in the messages of pdsh_train.sh
source scripts/post_train/common.sh

if [ -z "${NODES:-}" ]; then
    node_file="${NODE_FILE:-hostfile}"
    [ -r "$node_file" ] || fail "set NODES=node1,node2, or NODE_FILE to a file with a node per line; cannot read $node_file"
    # "node1 slots=8" is read as node1.
    NODES="$(sed -e 's/#.*//' "$node_file" | awk 'NF { print $1 }' | paste -s -d ,)"
fi
NODES="${NODES//[[:space:]]/}"
[[ "$NODES" =~ ^[A-Za-z0-9._@:-]+(,[A-Za-z0-9._@:-]+)*$ ]] || fail "NODES must be names separated by commas, got '$NODES'"
IFS=, read -r -a nodes <<< "$NODES"
repeated="$(printf '%s\n' "${nodes[@]}" | sort | uniq -d | paste -s -d ' ')"
[ -z "$repeated" ] || fail "NODES must list each node once, got more than once: $repeated"

export NODES
set_up
exec bash scripts/post_train/pdsh_train.sh "$@"
