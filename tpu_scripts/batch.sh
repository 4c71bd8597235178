#!/usr/bin/env bash
# Run a batch file through `jaxllm run-batch` on a TPU that is set up: one host, or a pod.
# Started again with the same flags it goes on where the results end.
#
#   batch.sh --project ID --zone ZONE --name NAME --tpu SLICE \
#     --input requests.jsonl --results results -- --model MODEL -tp 8
#
#   --input FILE           the requests: a file, or gs://bucket/file
#   --results DIR          where output.jsonl comes: a folder here, or gs://bucket/folder
#   --save-seconds N       between two copies of the results while they grow (60)
#   -- FLAGS               the flags of `jaxllm run-batch`, without -i and -o
#
# The batch outlives this script: Ctrl-C ends only the looking on; stop.sh ends the batch.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

input="" results="" save_seconds=60
parse_flags "input results save-seconds" "" "$@"
require input results
((${#rest[@]})) || die "the flags of jaxllm run-batch are missing: -- --model MODEL -tp $num_chips"
[[ $input == gs://* || -r $input ]] || die "--input ${input@Q} cannot be read"
[[ $save_seconds =~ ^[1-9][0-9]*$ ]] || die "--save-seconds ${save_seconds@Q} is no number above 0"
[[ $input == gs://* || $input == /* ]] || input=$PWD/$input
[[ $results == gs://* || $results == /* ]] || results=$PWD/$results

# Its place on the TPU VM: the same for the same results.
batch=jaxllm/batch/$(cksum <<<"$results" | cut -d' ' -f1)
command=(jaxllm/venv/bin/jaxllm run-batch
  -i "$batch/input.jsonl" -o "$batch/results/output.jsonl" "${rest[@]}")
((num_hosts == 1)) || command+=(--nnodes auto)

# The input is moved into its place, because a batch that runs may be reading the one before it.
send_input() {
  on_workers all "mkdir -p $batch/results $batch/saved"
  if [[ $input == gs://* ]]; then
    on_workers all "$(quote gcloud storage cp "$input" "$batch/input.new")"
  else
    copy all "$input" "$name:$batch/input.new"
  fi
  on_workers all "mv $batch/input.new $batch/input.jsonl"
}

# What an earlier TPU saved goes to worker 0, the one that writes results, if it has none itself.
restore() {
  local has_none="[ -z \"\$(ls -A $batch/results)\" ]" files
  if [[ $results == gs://* ]]; then
    # The first copy shows that the bucket can be written, before there is anything to lose.
    on_workers 0 "touch $batch/started; $(
      quote gcloud storage cp "$batch/started" "$results/started"
    ) && if $has_none; then $(quote gcloud storage rsync "$results" "$batch/results"); fi"
    return
  fi
  shopt -s nullglob
  files=("$results"/output.jsonl*)
  if ((${#files[@]})); then
    copy 0 "${files[@]}" "$name:$batch/saved/"
    on_workers 0 "if $has_none; then cp $batch/saved/* $batch/results/; fi"
  fi
}

# Copy the results as they are now; never half a file over a whole one.
save() {
  if [[ $results == gs://* ]]; then
    # One after the other, so that the last is the newest.
    on_workers 0 "$(quote flock "$batch/saving" gcloud storage rsync "$batch/results" "$results")"
  else
    run mkdir -p "$results/.incoming" &&
      copy 0 "$name:$batch/results/*" "$results/.incoming/" &&
      run find "$results/.incoming" -type f -exec mv "{}" "$results/" ";"
  fi
}

keep_saving() {
  while sleep "$save_seconds" && kill -0 $$; do # as long as this script is there
    save &>"$scratch/save" || note "nothing saved: $(tail -n 1 "$scratch/save")"
  done
}

send_input
restore

saver=""
stop_saving() {
  [[ -z $saver ]] || kill -- "-$saver" 2>/dev/null || true
  saver=""
}
if [[ -z $dry_run ]]; then
  set -m # a process group of its own, which ends as a whole
  keep_saving &
  set +m
  saver=$!
  trap 'stop_saving; cleanup' EXIT
fi

id=$(date +%Y%m%d-%H%M%S)-$$
status=0
on_workers all "$(quote bash jaxllm/host/job.sh run "$id" "${command[@]}")" || status=$?
stop_saving
((status == 0)) || note "the batch ended with status $status"
if ! save; then
  note "the last results could not be copied"
  ((status)) || status=1
fi
exit "$status"
