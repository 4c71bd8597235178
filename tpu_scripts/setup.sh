#!/usr/bin/env bash
# Install Python, jaxllm and the JAX that it is tested with on every host of a TPU.
# What is installed already is left alone.
#
#   setup.sh --project ID --zone ZONE --name NAME --tpu SLICE
#
#   --jax VERSION          of jax, which pins its libtpu (0.10.2)
#   --package SPEC         what to install, as pip names it, such as a wheel's URL;
#                          without it: what is committed in the checkout of this script
#   --hf-token-file FILE   a Hugging Face token for gated models; copied, never on a command line
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

jax=0.10.2 package="" hf_token_file=""
parse_flags "jax package hf-token-file" "" "$@"
[[ -z $hf_token_file || -s $hf_token_file ]] ||
  die "--hf-token-file ${hf_token_file@Q} is missing or empty"

on_workers all "mkdir -p -m 700 jaxllm jaxllm/host .cache .cache/huggingface"
copy all "$here"/host/* "$name:jaxllm/host/"

if [[ -z $package ]]; then
  commit=$(git -C "$here" rev-parse HEAD) || die "no git checkout here; give --package SPEC"
  [[ -z $(git -C "$here" status --porcelain) ]] || note "only what is committed is installed"
  root=$(git -C "$here" rev-parse --show-toplevel)
  run git -C "$root" archive --prefix=jaxllm/ "--output=$scratch/$commit.tar.gz" "$commit"
  copy all "$scratch/$commit.tar.gz" "$name:jaxllm/"
  package=$commit.tar.gz
fi
if [[ $hf_token_file ]]; then
  # Hugging Face's library reads the token there. The copy keeps the mode.
  run install -m 600 "$hf_token_file" "$scratch/token"
  copy all "$scratch/token" "$name:.cache/huggingface/token"
  on_workers all "chmod 600 .cache/huggingface/token"
fi
on_workers all "$(quote bash jaxllm/host/setup_host.sh "$jax" "$package")"
