#!/usr/bin/env bash
# On a TPU VM: `jaxllm serve`, if there is such a command and the TPU is free.
set -euo pipefail
jaxllm=jaxllm/venv/bin/jaxllm

if ! "$jaxllm" --help | grep '^  serve ' >/dev/null; then
  echo "error: the jaxllm on this TPU VM has no serve command; setup.sh installs another" >&2
  exit 2
fi
mkdir -p jaxllm/jobs
exec 9>jaxllm/jobs/lock
flock --nonblock 9 || { echo "error: a job has the TPU; stop.sh ends it" >&2 && exit 2; }
exec "$jaxllm" serve "$@"
