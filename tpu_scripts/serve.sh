#!/usr/bin/env bash
# Run `jaxllm serve` on a TPU of one host, reachable at http://127.0.0.1:PORT of this machine
# through ssh, and from nowhere else. Ctrl-C ends it.
#
#   serve.sh --project ID --zone ZONE --name NAME --tpu SLICE --model MODEL -- -tp 8
#
#   --model MODEL          a name on the Hugging Face hub, or a path on the TPU VM
#   --port PORT            here and there (8000)
#   -- FLAGS               more flags for `jaxllm serve`
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

model="" port=8000
parse_flags "model port" "" "$@"
require model
[[ $port =~ ^[0-9]+$ ]] || die "--port ${port@Q} is no number"
((num_hosts == 1)) || die "--tpu $tpu has $num_hosts hosts; serve.sh serves from one"

# With a terminal (-t) the server gets the Ctrl-C, and ends with the connection.
run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --quiet --worker=0 \
  --ssh-flag="-t -L $port:127.0.0.1:$port" "--command=$(
    quote bash jaxllm/host/serve.sh "$model" --port "$port" --host 127.0.0.1 "${rest[@]}"
  )"
