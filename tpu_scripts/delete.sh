#!/usr/bin/env bash
# Delete a TPU, and its request in the queue. What is on its disk is lost.
#
#   delete.sh --project ID --zone ZONE --name NAME --tpu SLICE --yes
#
#   --yes                  really delete; without it the script only says what there is
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

yes=""
parse_flags "" "yes" "$@"

queued=$(state_of queued-resources state.state)
vm=$(state_of tpu-vm state)
if [[ $dry_run ]]; then
  note "of the commands that delete, the first one that has something to delete would run"
elif [[ -z $queued$vm ]]; then
  note "there is no $name in $zone"
  exit
elif [[ -z $yes ]]; then
  die "$name is ${vm:-$queued}; --yes deletes it"
fi
if [[ $queued || $dry_run ]]; then # the VM goes with its request
  run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
fi
if [[ -z $queued ]]; then
  run gcloud compute tpus tpu-vm delete "$name" "${where[@]}" --quiet
fi
