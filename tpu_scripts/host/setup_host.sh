#!/usr/bin/env bash
# On a TPU VM, called by setup.sh: make ~/jaxllm/venv with Python 3.11, jax and jaxllm.
#   setup_host.sh JAX_VERSION PACKAGE
set -euo pipefail
cd ~/jaxllm
jax=$1 package=$2

if [[ -e installed && $(<installed) == "$jax $package" ]]; then
  echo "jaxllm is set up on $(hostname)"
  exit
fi

mkdir -p jobs
exec 9>jobs/lock
if ! flock --nonblock 9; then
  echo "error: a job runs with what is installed; stop.sh ends it" >&2
  exit 2
fi

# The VM's Python may be too old for jaxllm. uv installs another one, without root.
PATH=$PWD/uv:$PATH
if ! command -v uv >/dev/null; then
  curl -LsSf https://astral.sh/uv/install.sh | env UV_UNMANAGED_INSTALL="$PWD/uv" sh
fi
[[ ! -f $package ]] || package="jaxllm @ file://$PWD/$package"

rm -f installed
uv venv --quiet --clear --python 3.11 venv
uv pip install --quiet --python venv/bin/python "jax[tpu]==$jax" "$package"
venv/bin/jaxllm --version
echo "$jax $2" >installed
