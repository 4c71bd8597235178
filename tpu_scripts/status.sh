#!/usr/bin/env bash
# Say what state a TPU is in, and what runs on it.
#
#   status.sh --project ID --zone ZONE --name NAME --tpu SLICE
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

parse_flags "" "" "$@"

vm=$(state_of tpu-vm state)
queued=$(state_of queued-resources state.state)
[[ $dry_run ]] || echo "$name: VM ${vm:-absent}, request ${queued:-absent}"
if [[ $vm == READY || $dry_run ]]; then
  on_workers all "if [ -e jaxllm/host/job.sh ]; then bash jaxllm/host/job.sh list; fi"
fi
