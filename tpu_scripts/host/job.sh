#!/usr/bin/env bash
# On a TPU VM: run a command that outlives the connection, and follow what it prints.
#   job.sh run ID COMMAND...   start it, unless ID is there: then follow that one
#   job.sh list                all jobs and how they ended
#   job.sh stop                send SIGTERM to those that run
#
# gcloud sends a command again when a connection breaks; by its ID it finds its job. A TPU serves
# one process at a time, so a job waits until the one before it has ended.
set -euo pipefail
jobs=~/jaxllm/jobs
mkdir -p "$jobs"

run_job() {
  exec 9>"$jobs/lock" # held by the command, too
  if ! flock --nonblock 9; then
    echo "another job has the TPU; waiting for it (stop.sh ends it)"
    flock 9
  fi
  trap : TERM # only the command ends; this shell still writes how
  local status=0
  "$@" || status=$?
  echo "$status" >"$job/status"
}

action=$1
shift
case $action in
  run)
    job=$jobs/$1
    shift
    if mkdir "$job" 2>/dev/null; then
      set -m # a process group of its own, for stop
      trap '' HUP
      touch "$job/log" # before there is a pid that says to follow it
      run_job "$@" </dev/null &>"$job/log" &
      echo $! >"$job/pid"
    fi
    until [[ -s $job/pid ]]; do sleep 0.1; done
    tail --lines=+1 --follow --sleep-interval=0.2 --pid="$(<"$job/pid")" "$job/log"
    [[ -s $job/status ]] || { echo "the job ended without a status" >&2 && exit 1; }
    exit "$(<"$job/status")"
    ;;
  list)
    for job in "$jobs"/*/; do
      [[ -s $job/pid ]] || continue
      if [[ -s $job/status ]]; then
        echo "$(basename "$job"): exit status $(<"$job/status")"
      elif kill -0 "$(<"$job/pid")" 2>/dev/null; then
        echo "$(basename "$job"): running: $(tail --lines=1 "$job/log")"
      else
        echo "$(basename "$job"): ended without a status"
      fi
    done
    ;;
  stop)
    for job in "$jobs"/*/; do
      [[ -s $job/pid && ! -s $job/status ]] || continue
      echo "stopping $(basename "$job")"
      kill -TERM -- "-$(<"$job/pid")" || echo "it has ended"
    done
    ;;
esac
