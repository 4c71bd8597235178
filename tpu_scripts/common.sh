# shellcheck shell=bash
# Shared by the scripts: flags, --dry-run, quoting, facts about slices, and gcloud.
# A script sources this file, sets the defaults of its own flags, and calls parse_flags.
# shellcheck disable=SC2034 # what is set here is read by the scripts

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "error: this is bash $BASH_VERSION; the scripts need 4.4 or newer" >&2
  exit 2
fi
shopt -s inherit_errexit # a die within $(...) ends the script, too

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project="" zone="" name="" tpu="" poll_seconds=30 dry_run=""
rest=() # what followed --

# A temporary folder, which is removed at exit.
scratch=$(mktemp -d)
cleanup() { rm -rf "$scratch"; }
trap cleanup EXIT

# The commands of --dry-run go here, also from within $(...).
exec 3>&1

note() { echo "$(basename "$0"): $*" >&2; }
die() {
  note "error: $*"
  exit 2
}

# Print the script's first comment, and the flags of all scripts.
usage() {
  awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
  cat <<'END'

Every script takes:
  --project ID       the Google Cloud project
  --zone ZONE        where the TPU is, for example us-east5-b
  --name NAME        of the TPU
  --tpu SLICE        as jaxllm names it: v6e-8, v5e-4, v5p-16, ...
  --poll-seconds N   between two looks at what is awaited (30)
  --dry-run          print the commands that would run, and run none
  --help
END
}

# parse_flags "FLAG..." "SWITCH..." ARGUMENT...: --some-flag VALUE sets some_flag, --some-switch
# sets some_switch to 1. The flags that identify the TPU are common to all scripts and required.
parse_flags() {
  local flags=" project zone name tpu poll-seconds $1 " switches=" dry-run $2 " word
  shift 2
  while (($#)); do
    word=${1#--}
    case $1 in
      -h | --help) usage && exit ;;
      --) rest=("${@:2}") && break ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
    esac
    if [[ $1 =~ ^--[a-z-]+$ && $switches == *" $word "* ]]; then
      printf -v "${word//-/_}" 1
      shift
    elif [[ $1 =~ ^--[a-z-]+$ && $flags == *" $word "* ]]; then
      [[ ${2:---} != --* ]] || die "$1 needs a value"
      printf -v "${word//-/_}" %s "$2"
      shift 2
    else
      die "unknown argument ${1@Q}; --help lists the flags"
    fi
  done
  require project zone name tpu
  [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
    die "--name ${name@Q}: small letters, digits and hyphens only, and first a letter"
  [[ $poll_seconds =~ ^[0-9]+$ ]] || die "--poll-seconds ${poll_seconds@Q} is no whole number"
  slice_facts
  where=(--project "$project" --zone "$zone")
  # The common flags, for scripts that call others.
  target=("${where[@]}" --name "$name" --tpu "$tpu" --poll-seconds "$poll_seconds"
    ${dry_run:+--dry-run})
}

require() {
  local flag variable
  for flag; do
    variable=${flag//-/_}
    [[ ${!variable} ]] || die "--$flag is missing; --help says what it is"
  done
}

# Set the values that follow from --tpu: Google's accelerator type and software version, chips and
# hosts. jaxllm's names are Google's, except for v5e and v7x. The number of a v5e or v6e slice counts
# chips: a single host has up to 8, hosts of larger slices have 4. The number of other slices counts
# cores: two per chip, with four chips per host.
slice_facts() {
  [[ $tpu =~ ^(v4|v5e|v5p|v6e|v7x)-([1-9][0-9]{0,4})$ ]] ||
    die "--tpu ${tpu@Q} is no slice; there are v4-8, v5e-8, v5p-8, v6e-8, v7x-8 and other sizes"
  local generation=${BASH_REMATCH[1]} size=${BASH_REMATCH[2]}
  case $generation in
    v4) accelerator=$tpu runtime=tpu-ubuntu2204-base ;;
    v5e) accelerator=v5litepod-$size runtime=v2-alpha-tpuv5-lite ;;
    v5p) accelerator=$tpu runtime=v2-alpha-tpuv5 ;;
    v6e) accelerator=$tpu runtime=v2-alpha-tpuv6e ;;
    v7x) accelerator=tpu7x-$size runtime=v2-alpha-tpu7-ubuntu2404 ;;
  esac
  if [[ $generation == v5e || $generation == v6e ]]; then
    [[ " 1 4 8 16 32 64 128 256 " == *" $size "* ]] ||
      die "--tpu $tpu: $generation has slices of 1, 4, 8, 16, 32, 64, 128 and 256 chips"
    num_chips=$size num_hosts=$((size <= 8 ? 1 : size / 4))
  else
    ((size % 8 == 0)) || die "--tpu $tpu: the size of a $generation slice is a multiple of 8"
    num_chips=$((size / 2)) num_hosts=$((size / 8))
  fi
}

# Quote the arguments as words of a shell command.
quote() {
  local word words=()
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:,@%+=-]+$ ]] || word=${word@Q}
    words+=("$word")
  done
  echo "${words[*]}"
}

# Run a command and show it; with --dry-run only show it.
run() {
  if [[ $dry_run ]]; then
    quote "$@" >&3
  else
    echo "+ $(quote "$@")" >&2
    "$@"
  fi
}

# on_workers 0|all COMMAND: COMMAND is one string, for the shell of the TPU VM.
on_workers() {
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --quiet "--worker=$1" "--command=$2"
}

# copy 0|all SOURCE... DESTINATION: a path on the TPU VM is $name:PATH, from the home directory.
copy() {
  run gcloud compute tpus tpu-vm scp "${@:2}" "${where[@]}" --quiet "--worker=$1"
}

# The state of a tpu-vm or a queued-resources, empty if it does not exist. Retries while the network
# fails.
state_of() {
  local ask=(gcloud compute tpus "$1" describe "$name" "${where[@]}" "--format=value($2)") errors
  if [[ $dry_run ]]; then
    run "${ask[@]}"
    return
  fi
  for _ in 1 2 3 4 5; do
    ! "${ask[@]}" 2>"$scratch/errors" || return 0
    errors=$(<"$scratch/errors")
    [[ $errors != *NOT_FOUND* ]] || return 0
    [[ ! $errors =~ PERMISSION_DENIED|INVALID_ARGUMENT|UNAUTHENTICATED ]] || break
    note "cannot ask for $name, trying again in $poll_seconds s: $errors"
    sleep "$poll_seconds"
  done
  die "cannot ask for $name: $errors"
}

# The state of the VM, or of the queued request if it has no VM (yet, or any more).
tpu_state() {
  local state
  state=$(state_of tpu-vm state)
  [[ $state ]] || state=$(state_of queued-resources state.state)
  echo "$state"
}

# Whether a TPU in this state was preempted.
is_preempted() { [[ $1 =~ ^(PREEMPTED|TERMINATED|SUSPENDED)$ ]]; }
