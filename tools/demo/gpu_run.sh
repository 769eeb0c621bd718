#!/usr/bin/env bash
# The training of the demo model on one H200, in commands that each end within ten minutes.
#
#   bash tools/demo/gpu_run.sh rehearse DATA OUT             compile and measure all phases, then a minute of p1
#   bash tools/demo/gpu_run.sh p1 DATA OUT                   first phase; compiles the others meanwhile
#   bash tools/demo/gpu_run.sh p23 DATA OUT START...         second and third phase; START as for train.py
#
# DATA is the folder tokens of corpus.py, or a .tar.xz of it. State that is too large for OUT goes to WORK (default
# /tmp/demo_training): p23 on the same machine takes WORK/p1 as START. COMPILED may name a folder of programs from a
# rehearsal. SECONDS_R, SECONDS_1, SECONDS_2 and SECONDS_3 change the time of the rehearsal and of each phase.
set -euo pipefail
mode=$1 data=$2 out=$3
shift 3
export PYTHONPATH=. PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2
work=${WORK:-/tmp/demo_training}
run() { "${PYTHON:-python3}" tools/demo/train.py --data "$data" --cache "$work/compiled" "$@"; }
mkdir -p "$out" "$work/compiled"
case $data in *.tar.xz)
  tar -xJf "$data" -C "$work"
  data=$work/tokens
  ;;
esac
# Programs that an earlier rehearsal compiled on such a machine.
if [ -n "${COMPILED:-}" ] && [ -d "$COMPILED" ]; then cp "$COMPILED"/* "$work/compiled"; fi
case $mode in
  rehearse)
    run --rehearse --seconds "${SECONDS_R:-170}" --out "$out/rehearsal"
    run --phase p1 --seconds "${SECONDS_1:-70}" --reserve 5 --out "$work/rehearsal" --no-evaluation
    cp "$work/rehearsal/log.jsonl" "$out/rehearsal/p1.jsonl"
    mkdir -p "$out/compiled"
    find "$work/compiled" -name 'jit_step*' -size -15M -exec cp {} "$out/compiled" \;
    ls -l "$work/compiled"
    ;;
  p1)
    run --phase p1 --seconds "${SECONDS_1:-560}" --out "$out/p1" --keep "$work/p1" --also p2 p3
    ;;
  p23)
    run --phase p2 --seconds "${SECONDS_2:-360}" --start "$@" --out "$out/p2" --keep "$work/p2"
    run --phase p3 --seconds "${SECONDS_3:-205}" --start "$out/p2" --out "$out/p3"
    ;;
  *)
    echo "unknown mode $mode" >&2
    exit 2
    ;;
esac
