#!/usr/bin/env bash
# Profile an engine on a TPU of one host, and bring the trace here.
#
#   profile.sh --project ID --zone ZONE --name NAME --tpu SLICE --traces DIR -- --model MODEL -tp 8
#
#   --traces DIR           a folder here; xprof shows what is in it
#   -- FLAGS               the flags of host/profile.py: its own (--num-prompts, --prompt-len,
#                          --output-len) and those of the engine
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

traces=""
parse_flags "traces" "" "$@"
require traces
((${#rest[@]})) || die "the flags of the engine are missing: -- --model MODEL -tp $num_chips"
((num_hosts == 1)) || die "--tpu $tpu has $num_hosts hosts; profile.sh profiles one"

id=$(date +%Y%m%d-%H%M%S)-$$
remote=jaxllm/traces/$id
on_workers 0 "$(
  quote bash jaxllm/host/job.sh run "$id" \
    jaxllm/venv/bin/python jaxllm/host/profile.py --trace-dir "$remote" "${rest[@]}"
)"
[[ $traces == /* ]] || traces=$PWD/$traces
run mkdir -p "$traces"
copy 0 --recurse "$name:$remote" "$traces/"
note "to look at it: pip install xprof; $(quote xprof "--logdir=$traces/$id" --port=6006)"
