#!/usr/bin/env bash
# Trains on two hosts of eight GPUs without a scheduler. Run it on both within five minutes:
#
#   on node01:   examples/cluster/two_hosts.sh node01 0
#   on node02:   examples/cluster/two_hosts.sh node01 1
#
# The first argument is the first host's name as the second host reaches it; the second argument is
# this host's number. Further arguments go to `train`. Both hosts must share the file system that
# holds the run directory.
set -euo pipefail
usage="usage: two_hosts.sh FIRST_HOST 0|1 [options of jaxptd train]"
first="${1:?$usage}"
number="${2:?$usage}"
shift 2
exec python -m jaxptd.train --config gpt2-1.5b --layout.dp 2 --layout.tp 8 \
    --train.run_dir runs/two_hosts --processes.coordinator "$first:${PORT:-5555}" \
    --processes.count 2 --processes.id "$number" "$@"
