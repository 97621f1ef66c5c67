# setup | demo | test | test-fast | lint | bench. Each target makes .venv first where it is missing or out of date.
.PHONY: setup demo test test-fast lint bench
PY := .venv/bin/python

setup:
	@scripts/setup.sh

demo: setup
	@.venv/bin/draftsmith run recipes/configs/demo/pipeline.yaml

lint: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

test: setup lint
	@scripts/browser.sh
	@$(PY) -m pytest tests

test-fast: setup
	@$(PY) -m pytest tests/unit

BENCH := runs/bench
PAIR := --draft $(BENCH)/draft
ONE_LINE := Turn the order into one line of JSON with the keys name, city, item, quantity and day.

# Stopped anywhere, it goes on there: answers, drafter and every finished run are kept in $(BENCH). Delete it to measure anew.
bench: setup
	@echo "bench, about four and a half hours on 2 cores; leave the machine alone meanwhile. In turn:"
	@echo "  data       SmolLM2-135M answers orders; a 5-layer drafter is cut from it             5 min"
	@echo "  check      draftsmith check on 150,000 tokens                                        1 min"
	@echo "  distill    our loop, a plain loop and TRL's GKD trainer; also with 151,936 rows     80 min"
	@echo "  init       drafters of other depths and widths, trained alike and timed             20 min"
	@echo "  objectives losses, cache sizes, the online target, layers to begin with, 3 seeds; then served  75 min"
	@echo "  recording  what recording the target's distribution costs generation                 6 min"
	@echo "  quantize   a trained drafter in 4 bits, before and after a short part with the quantizer   20 min"
	@echo "  parallel   one by one against all drafts in one pass, on orders and on code          60 min"
	@echo "Results: $(BENCH)/*.jsonl and $(BENCH)/init, a line a run; tables beside them, *.md"
	@$(PY) -c "import trl" 2>/dev/null || $(PY) -m pip install -q -c constraints.txt -e '.[bench]'
	@.venv/bin/draftsmith generate target=HuggingFaceTB/SmolLM2-135M-Instruct out=$(BENCH)/answers \
	  sets.train.prompts=orders sets.train.split=train sets.train.limit=240 sets.train.max_tokens=64 \
	  sets.heldout.prompts=orders sets.heldout.split=test sets.heldout.limit=60 sets.heldout.max_tokens=64 \
	  sets.short.prompts=orders sets.short.split=train sets.short.limit=192 sets.short.max_tokens=64 "sets.short.system=$(ONE_LINE)" \
	  sets.short-heldout.prompts=orders sets.short-heldout.split=test sets.short-heldout.limit=24 \
	  sets.short-heldout.max_tokens=64 "sets.short-heldout.system=$(ONE_LINE)"
	@test -d $(BENCH)/draft || .venv/bin/draftsmith init target=HuggingFaceTB/SmolLM2-135M-Instruct \
	  layers=[0,1,14,28,29] out=$(BENCH)/draft
	-@$(PY) -m scripts.bench_check
	@$(PY) -m scripts.bench_distill $(PAIR) --case "orders after two examples" --train $(BENCH)/answers/train \
	  --heldout $(BENCH)/answers/heldout --steps 3 --out $(BENCH)/distill.jsonl >$(BENCH)/distill.md
	@$(PY) -m scripts.bench_distill $(PAIR) --case "short orders" --train $(BENCH)/answers/short \
	  --heldout $(BENCH)/answers/short-heldout --wide-steps 0 --out $(BENCH)/distill.jsonl >>$(BENCH)/distill.md
	@$(PY) -m scripts.bench_distill $(PAIR) --train $(BENCH)/answers/train --heldout $(BENCH)/answers/heldout --steps 0 \
	  --matmul-precision medium --out $(BENCH)/distill-medium.jsonl >>$(BENCH)/distill.md
	@$(PY) -m scripts.bench_init --target HuggingFaceTB/SmolLM2-135M-Instruct --train $(BENCH)/answers/train \
	  --heldout $(BENCH)/answers/heldout --steps 30 --out $(BENCH)/init
	@$(PY) -m scripts.bench_objectives $(PAIR) --train $(BENCH)/answers/train --heldout $(BENCH)/answers/heldout \
	  --steps 30 --jobs 2 --keep $(BENCH)/kept --out $(BENCH)/objectives.jsonl >$(BENCH)/objectives.md
	@$(PY) -m scripts.bench_served --results $(BENCH)/objectives.jsonl --out $(BENCH)/served >>$(BENCH)/objectives.md
	-@$(PY) -m scripts.bench_recording --log $(BENCH)/recording.log >$(BENCH)/recording.md
	@.venv/bin/draftsmith distill draft=$(BENCH)/draft data=$(BENCH)/answers/train out=$(BENCH)/trained max_steps=240
	@$(PY) -m scripts.bench_quantize --draft $(BENCH)/trained/drafter --train $(BENCH)/answers/train \
	  --heldout $(BENCH)/answers/heldout --out $(BENCH)/quantize.jsonl >$(BENCH)/quantize.md
	@$(PY) -m scripts.bench_parallel --name orders --train orders --heldout orders --out $(BENCH)/parallel >$(BENCH)/parallel.md
	@$(PY) -m scripts.bench_parallel --name code --train functions --heldout humaneval --max-tokens 96 \
	  --out $(BENCH)/parallel >>$(BENCH)/parallel.md
	@cat $(BENCH)/distill.md $(BENCH)/init/table.md $(BENCH)/objectives.md $(BENCH)/recording.md $(BENCH)/quantize.md $(BENCH)/parallel.md
