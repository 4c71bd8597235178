#!/usr/bin/env bash
# On a TPU VM, called by batch.sh: what a batch has so far, to and from BATCH/saved.tar.gz.
#   results.sh save BATCH [gs://...]      pack it; upload it if there is a bucket for it
#   results.sh restore BATCH [gs://...]   unpack it, unless the batch has results here
#   results.sh deliver BATCH gs://...     upload the finished results
set -euo pipefail
action=$1 url=${3-}
cd "$2"
exec 9>lock
flock 9 # an upload that was given up here may still go on; the next one must come later

case $action in
  save)
    if ! compgen -G "results/*.journal/journal" >/dev/null; then
      echo "there are no results yet" >&2
      exit 1
    fi
    # run-batch writes a result before its journal records it. Copy the journal first, so that the
    # copied journal records only results that the copy has.
    rm -rf journal copy
    mkdir journal
    (cd results && cp --parents -- *.journal/manifest.json *.journal/journal ../journal/)
    cp -r results copy
    cp -r journal/. copy/
    tar --create --gzip --file=saved.new --directory=copy --exclude=custom_ids .
    mv saved.new saved.tar.gz
    rm -rf journal copy
    [[ -z $url ]] || gcloud storage cp saved.tar.gz "$url/saved.tar.gz"
    ;;
  restore)
    if [[ $url ]]; then
      # Test that the bucket can be written, before there are results to lose.
      date >started
      gcloud storage cp started "$url/started"
    fi
    [[ -z $(ls -A results) ]] || exit 0
    if [[ $url ]]; then
      listed=$(gcloud storage ls "$url/")
      [[ $listed != */saved.tar.gz* ]] || gcloud storage cp "$url/saved.tar.gz" saved.tar.gz
    fi
    [[ ! -e saved.tar.gz ]] || tar --extract --file=saved.tar.gz --directory=results
    ;;
  deliver)
    for file in results/*.jsonl; do
      gcloud storage cp "$file" "$url/$(basename "$file")"
    done
    ;;
esac
