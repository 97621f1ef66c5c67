#!/usr/bin/env bash
# What to run when a GPU is at hand, in under 8 minutes: parity, the recipe, its parallel forms, the two benches, served vLLM
# (the demo's pipeline, whose drafter is served one by one and in one pass). What of it is of masks was not run on a GPU here yet.
#
#   OUT=runs/gpu-check TARGET=folder TRAIN=answers/train HELDOUT=answers/orders scripts/gpu_check.sh
#   SMOKE=1 OUT=runs/gpu-smoke scripts/gpu_check.sh      # the same steps with tiny models, also without a GPU
#
# TARGET: the target's folder, hub id or .gguf file. DRAFT: its drafter; made where missing. TRAIN, HELDOUT: the target's
# answers; made where missing. PY: the interpreter. STEPS, SEEDS, INIT_SEEDS, JOBS, SIZES, BENCH_SECONDS: the benches' length, seeds, runs at one time, shapes, limit.
# SECONDS_IN_ALL: what is left is each step's limit. A step that fails does not stop the next; $OUT gets at most 8 small files.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${OUT:-runs/gpu-check}") PY=${PY:-.venv/bin/python} SMOKE=${SMOKE:-}
STEPS=${STEPS:-300} SEEDS=${SEEDS:-2} JOBS=${JOBS:-6} SIZES=${SIZES:-4 2 8} SECONDS_IN_ALL=${SECONDS_IN_ALL:-470}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
WORK=$(mktemp -d) SAID=()
mkdir -p "$OUT"
trap 'rm -rf "$WORK"' EXIT
exec > >(tee "$OUT/check.log") 2>&1
LAUNCH=("$PY" -m accelerate.commands.launch --num_machines 1 --dynamo_backend no)
SECONDS=0

left() { echo $((SECONDS_IN_ALL - SECONDS)); }

step() { # NAME LIMIT COMMAND…: runs it for at most LIMIT seconds, and remembers how it went
  local name=$1 limit=$2 began=$SECONDS rc=0
  shift 2
  ((limit > $(left))) && limit=$(left)
  if ((limit < 10)); then
    SAID+=("$name: skipped, no time left")
    return 1
  fi
  echo "== $name, at most $limit s"
  timeout -k 5 "$limit" "$@" || rc=$?
  case $rc in
  0) SAID+=("$name: good, $((SECONDS - began)) s") ;;
  124 | 137) SAID+=("$name: stopped after $limit s") ;;
  *) SAID+=("$name: FAILED, exit $rc, $((SECONDS - began)) s") ;;
  esac
  return $rc
}

watched() { # FOLDER COMMAND…: the command, with the GPU's memory written to FOLDER.csv
  local csv=$1.csv pid=
  shift
  command -v nvidia-smi >/dev/null && { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 500 >"$csv" & pid=$!; }
  "$@"
  local rc=$?
  [[ -n $pid ]] && kill "$pid"
  [[ -f $csv && -d ${csv%.csv} ]] && mv "$csv" "${csv%.csv}/memory.csv"
  return $rc
}

distil() { # NAME LIMIT LAUNCHER… -- KEY=VALUE…: the recipe in $WORK/NAME
  local name=$1 limit=$2 launcher=()
  shift 2
  while [[ $1 != -- ]]; do launcher+=("$1") && shift; done
  shift
  watched "$WORK/$name" step "$name" "$limit" "${launcher[@]}" recipes/distill.py draft="$DRAFT" data="$TRAIN" \
    heldout.orders="$HELDOUT" out="$WORK/$name" losses.forward_kl=1 losses.cross_entropy=0.1 batch_size=16 \
    eval_every=1000000 checkpoint_every=1000000 "$@"
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv || echo "no nvidia-smi here"
"$PY" -c 'import torch, transformers, accelerate; print(torch.__version__, transformers.__version__, accelerate.__version__)'

if [[ -n $SMOKE ]]; then # a tiny pair takes the place of the real one
  "$PY" -c "from pathlib import Path; from scripts.bench_common import TINY, random_pair; random_pair(Path('$WORK/tiny'), **TINY)"
  TARGET=$WORK/tiny/target DRAFT=$WORK/tiny/draft TRAIN=$WORK/tiny/train HELDOUT=$WORK/tiny/heldout STEPS=4 SEEDS=1 SIZES=2
  MINUTES=0.05 REPEATED=3 PARITY=(--smoke)
else
  MINUTES=${MINUTES:-1} REPEATED=30
  TARGET=${TARGET:-HuggingFaceTB/SmolLM2-135M-Instruct} DRAFT=${DRAFT:-$WORK/draft}
  if [[ -z ${TRAIN:-} || -z ${HELDOUT:-} ]]; then
    TRAIN=$WORK/answers/train HELDOUT=$WORK/answers/orders
    step generate 120 "$PY" recipes/generate.py target="$TARGET" out="$WORK/answers" temperature=0 top_logprobs=32 \
      sets.train.prompts=orders sets.train.split=train sets.train.limit=1000 sets.train.max_tokens=64 \
      sets.orders.prompts=orders sets.orders.split=test sets.orders.limit=60 sets.orders.max_tokens=64
  fi
  [[ -d $DRAFT ]] || step init 60 "$PY" recipes/init.py target="$TARGET" layers=[0,1,14,28,29] out="$DRAFT"
  PARITY=(--draft "$DRAFT" --train "$TRAIN")
fi

step parity 130 "$PY" -m scripts.gpu_parity --out "$OUT" "${PARITY[@]}"

BF16=("${LAUNCH[@]}" --num_processes 1 --mixed_precision bf16)
distil float32 $((SECONDS_IN_ALL / 4)) "$PY" -- minutes=$MINUTES
distil bf16 $((SECONDS_IN_ALL / 4)) "${BF16[@]}" -- minutes=$MINUTES
if "$PY" -c 'import bitsandbytes' 2>/dev/null; then
  distil qlora 60 "$PY" -- max_steps=$REPEATED trainable=qlora
else
  SAID+=("qlora: skipped, bitsandbytes is not installed")
fi
# the same steps on one plain process and under the forms that shard: their losses must be equal within rounding
SHARDED=() SAME=()
distil plain 60 "$PY" -- max_steps=$REPEATED
if [[ -z $SMOKE ]]; then # and with masks beside the text: what of plain's tokens/s is left says what they cost here
  distil masks 60 "$PY" -- max_steps=$REPEATED parallel_drafting=8 num_speculative_tokens=6
else
  SAID+=("masks: skipped, the tiny pair's tokenizer has no spare token to be the mask")
fi
if "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  SHARDED+=(fsdp2)
  "$PY" -c 'import deepspeed' 2>/dev/null && SHARDED+=(deepspeed_zero2) || SAID+=("deepspeed_zero2: skipped, not installed")
else
  SAID+=("fsdp2: skipped, accelerate starts it on GPUs only (on CPUs: tests/integration/test_parallel.py)")
fi
for form in "${SHARDED[@]}"; do
  distil "$form" 60 "${LAUNCH[@]}" --config_file "recipes/configs/accelerate/$form.yaml" --num_processes 1 --mixed_precision no \
    -- max_steps=$REPEATED && SAME+=("same=plain,$form")
done
RUNS=()
for run in float32 bf16 qlora plain masks "${SHARDED[@]}"; do [[ -f $WORK/$run/metrics.jsonl ]] && RUNS+=("$run=$WORK/$run"); done
step "figures of the runs" 20 "$PY" -m scripts.gpu_summary "$OUT/distill.jsonl" "${RUNS[@]}" "${SAME[@]}"

# quality, not speed, is looked at: so the two share the GPU; what is done when time is up is reported
DEVICE=$("$PY" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
LIMIT=$(($(left) - 25))
((LIMIT > ${BENCH_SECONDS:=150})) && LIMIT=$BENCH_SECONDS
if ((LIMIT > 20)); then
  echo "== the benches, at most $LIMIT s"
  timeout -k 5 $LIMIT "$PY" -m scripts.bench_objectives --device "$DEVICE" --jobs "$JOBS" --target "$TARGET" --draft "$DRAFT" \
    --train "$TRAIN" --heldout "$HELDOUT" --steps "$STEPS" --seeds "$SEEDS" --out "$WORK/objectives.jsonl" &
  ARMS=$! SHAPES=()
  for seed in ${INIT_SEEDS:-0}; do
    # shellcheck disable=SC2086
    timeout -k 5 $LIMIT "$PY" -m scripts.bench_init --train-only --target "$TARGET" --train "$TRAIN" --heldout "$HELDOUT" \
      --steps "$STEPS" --sizes $SIZES --seeds "$seed" --out "$WORK/shapes-$seed" &
    SHAPES+=($!)
  done
  wait $ARMS || SAID+=("bench_objectives: exit $?, what was done is in objectives.md")
  [[ -f $WORK/objectives.jsonl ]] && cp "$WORK/objectives.jsonl" "$OUT/"
  wait "${SHAPES[@]}" || SAID+=("bench_init: exit $?, what was done is in init.md")
  cat "$WORK"/shapes-*/results.jsonl >"$OUT/init.jsonl" || true
  step "the benches' tables" 25 "$PY" - "$OUT" <<'END'
import sys
from pathlib import Path

from pairing.files import read_jsonl, write_text
from scripts import bench_init, bench_objectives

out = Path(sys.argv[1])
write_text(out / "objectives.md", bench_objectives.report(read_jsonl(out / "objectives.jsonl")))
write_text(out / "init.md", bench_init.table(read_jsonl(out / "init.jsonl"), 1.3, 0.0))
print((out / "objectives.md").read_text(), (out / "init.md").read_text(), sep="\n\n")
END
else
  SAID+=("the benches: skipped, no time left")
fi

if "$PY" -c 'import vllm' 2>/dev/null && (($(left) > 180)) && [[ -z $SMOKE ]]; then # the demo's pipeline at a tenth of its length
  step "served pipeline" "$(left)" "$PY" recipes/run.py recipes/configs/demo/pipeline.yaml run_dir="$WORK/pipeline" \
    generate.sets.train.limit=200 generate.sets.orders.limit=24 generate.sets.humaneval.limit=4 \
    distill.minutes=1 measure.minutes=2 measure.resident=false measure.enforce_eager=true
  [[ -f $WORK/pipeline/report.md ]] && cat "$WORK/pipeline/report.md"
else
  SAID+=("served pipeline: skipped, it wants vLLM and 3 minutes")
fi

echo "== summary, $SECONDS s in all"
printf '%s\n' "${SAID[@]}"
[[ ! "${SAID[*]}" =~ FAILED ]]
