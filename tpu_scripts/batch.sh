#!/usr/bin/env bash
# Run a batch file through `jaxllm run-batch` on a TPU that is set up: one host, or a pod.
# Started again with the same flags it goes on where it was, also on another TPU.
#
#   batch.sh --project ID --zone ZONE --name NAME --tpu SLICE \
#     --input requests.jsonl --results results -- --model MODEL -tp 8
#
#   --input FILE           the requests: a file, or gs://bucket/file
#   --results DIR          where output.jsonl comes, and saved.tar.gz meanwhile, to go on from: a
#                          folder here, or gs://bucket/folder
#   --save-seconds N       from one saved.tar.gz to the next (60)
#   -- FLAGS               the flags of `jaxllm run-batch`, but for -i, -o, --error-file and
#                          --journal-dir
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
results=${results%/}
bucket=""
[[ $results != gs://* ]] || bucket=$results

# The folder on the TPU VM; the same --results have the same folder.
batch=jaxllm/batch/$(cksum <<<"$results" | cut -d' ' -f1)
command=(jaxllm/venv/bin/jaxllm run-batch
  -i "$batch/input.jsonl" -o "$batch/results/output.jsonl" "${rest[@]}")
((num_hosts == 1)) || command+=(--nnodes auto)

# Move the input into place, because a running batch may still read the previous one.
send_input() {
  on_workers all "mkdir -p $batch/results"
  if [[ $input == gs://* ]]; then
    on_workers all "$(quote gcloud storage cp "$input" "$batch/input.new")"
  else
    copy all "$input" "$name:$batch/input.new"
  fi
  on_workers all "mv $batch/input.new $batch/input.jsonl"
}

# Worker 0 has the results.
on_results() {
  on_workers 0 "$(quote bash jaxllm/host/results.sh "$1" "$batch" ${bucket:+"$bucket"})"
}

restore() {
  if [[ -z $bucket && -e $results/saved.tar.gz ]]; then
    copy 0 "$results/saved.tar.gz" "$name:$batch/"
  fi
  on_results restore
}

save() { on_results save && { [[ $bucket ]] || fetch saved.tar.gz; }; }

deliver() { if [[ $bucket ]]; then on_results deliver; else fetch "results/*.jsonl"; fi; }

# Copy files to this machine; never replace a complete file by an incomplete one.
fetch() {
  run mkdir -p "$results/.incoming" &&
    copy 0 "$name:$batch/$1" "$results/.incoming/" &&
    run find "$results/.incoming" -type f -exec mv "{}" "$results/" ";"
}

keep_saving() {
  while sleep "$save_seconds" && kill -0 $$; do # as long as this script is there
    save &>"$scratch/save" || note "nothing saved: $(tail -n 1 "$scratch/save")"
  done
}

saver=""
stop_saving() {
  [[ -z $saver ]] || kill -- "-$saver" 2>/dev/null || true
  saver=""
}

send_input
restore
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
if ((status)); then
  note "the batch ended with status $status"
  save || note "its last results could not be saved"
  exit "$status"
fi
deliver
save || note "the results are all there, but saved.tar.gz is not the newest"
