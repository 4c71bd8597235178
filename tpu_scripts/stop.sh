#!/usr/bin/env bash
# Stop what runs on a TPU. A batch finishes the requests that it is working on; batch.sh goes on
# with the others when it is started again.
#
#   stop.sh --project ID --zone ZONE --name NAME --tpu SLICE
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

parse_flags "" "" "$@"
on_workers all "bash jaxllm/host/job.sh stop"
