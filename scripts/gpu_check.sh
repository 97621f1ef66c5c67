#!/usr/bin/env bash
# What to run when a GPU is at hand, in under 8 minutes; NOT RUN HERE yet: no GPU was. Prints what it saw, writes to $OUT.
#
#   OUT=gpu-check scripts/gpu_check.sh
#
# Runs the demo's pipeline at a tenth of its length, in bf16 on the GPU; needs scripts/setup.sh to have run with BACKEND=cuda.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/gpu-check}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
timeout 470 .venv/bin/draftsmith run recipes/configs/demo/pipeline.yaml run_dir="$OUT" \
  generate.sets.train.limit=200 generate.sets.orders.limit=24 generate.sets.humaneval.limit=4 \
  distill.minutes=1 measure.minutes=2 measure.resident=false measure.enforce_eager=true
