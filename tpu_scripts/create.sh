#!/usr/bin/env bash
# Create a TPU and wait until it is ready. If it exists, say so and wait for it.
#
#   create.sh --project ID --zone ZONE --name NAME --tpu SLICE [--queued] [--spot] [-- FLAGS]
#
#   --queued               queue for it, instead of failing when none is free
#   --spot                 cheaper, and can be taken away at any time
#   --runtime-version V    the software of the VM, if not the usual one of the slice
#   -- FLAGS               more flags for `gcloud ... create`, such as --network=NAME
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

queued="" spot="" runtime_version=""
parse_flags "runtime-version" "queued spot" "$@"

state=$(tpu_state)
if [[ -z $state ]]; then
  kind=(tpu-vm create "$name" "--version=${runtime_version:-$runtime}")
  if [[ $queued ]]; then
    kind=(queued-resources create "$name" "--node-id=$name"
      "--runtime-version=${runtime_version:-$runtime}")
  fi
  run gcloud compute tpus "${kind[@]}" "${where[@]}" "--accelerator-type=$accelerator" \
    ${spot:+--spot} "${rest[@]}"
else
  note "$name exists"
fi

until [[ $state == READY ]]; do
  state=$(tpu_state)
  [[ -z $dry_run ]] || exit 0
  case $state in
    READY) ;;
    "") die "$name does not exist any more" ;;
    FAILED | STOPPED) die "$name is $state; status.sh says more, delete.sh removes it" ;;
    *)
      ! is_preempted "$state" || die "$name is $state: taken away; delete.sh removes it"
      note "$name is $state; next look in $poll_seconds s"
      sleep "$poll_seconds"
      ;;
  esac
done
note "$name is ready: $accelerator, $num_chips chips, $num_hosts host(s)"
