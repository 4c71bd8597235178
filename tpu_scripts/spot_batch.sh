#!/usr/bin/env bash
# Run a batch to its end on spot TPUs: create, set up, run; when the TPU is taken away, delete what
# is left of it, create it anew and go on from the results that were saved. At the end delete it.
#
#   spot_batch.sh --project ID --zone ZONE --name NAME --tpu SLICE \
#     --input requests.jsonl --results gs://bucket/results -- --model MODEL -tp 8
#
#   --input, --results, --save-seconds, -- FLAGS     as for batch.sh
#   --runtime-version V                              as for create.sh
#   --jax V, --package SPEC, --hf-token-file FILE    as for setup.sh
#   --attempts N           give up after so many (20)
#   --keep                 leave the TPU running at the end
#   --yes                  a TPU of that name that was there before may be deleted, too
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

input="" results="" save_seconds="" runtime_version="" jax="" package="" hf_token_file=""
attempts=20 keep="" yes=""
parse_flags "input results save-seconds runtime-version jax package hf-token-file attempts" \
  "keep yes" "$@"
require input results
[[ $attempts =~ ^[1-9][0-9]*$ ]] || die "--attempts ${attempts@Q} is no number above 0"

attempt() {
  "$here/create.sh" "${target[@]}" "$@" --queued --spot \
    ${runtime_version:+--runtime-version "$runtime_version"} &&
    "$here/setup.sh" "${target[@]}" "$@" ${jax:+--jax "$jax"} ${package:+--package "$package"} \
      ${hf_token_file:+--hf-token-file "$hf_token_file"} &&
    "$here/batch.sh" "${target[@]}" "$@" --input "$input" --results "$results" \
      ${save_seconds:+--save-seconds "$save_seconds"} -- "${rest[@]}"
}

# Check the flags of all scripts before anything is created.
[[ $dry_run ]] || attempt --dry-run >/dev/null || exit

state=$(tpu_state)
may_delete=$yes
[[ $state ]] || may_delete=1 # what this script creates it may delete

for ((number = 1; number <= attempts; number++)); do
  if is_preempted "$state"; then
    [[ $may_delete ]] || die "$name was there before, and is $state; --yes lets this delete it"
    note "$name is $state: taken away"
    "$here/delete.sh" "${target[@]}" --yes
  fi
  note "attempt $number of $attempts"
  status=0
  attempt || status=$?
  if ((status == 0)); then
    if [[ $keep || -z $may_delete ]]; then
      note "done; $name is left as it is, and delete.sh deletes it"
    else
      "$here/delete.sh" "${target[@]}" --yes
    fi
    exit
  fi
  # A preempted TPU may still look ready for a while. Retry after a broken connection (255), but
  # after no other failure while the TPU exists.
  for _ in 1 2 3; do
    state=$(tpu_state)
    [[ $state == READY && $status != 255 ]] || break
    sleep "$poll_seconds"
  done
  if [[ -z $state || $state == FAILED || ($state == READY && $status != 255) ]]; then
    die "status $status, and $name was not taken away: it is ${state:-absent}, and left as it is"
  fi
done
die "gave up after $attempts attempts; $name is left as it is"
