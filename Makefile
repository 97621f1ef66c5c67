# setup | demo | test | test-fast | lint. Each target makes .venv first where it is missing or out of date.
.PHONY: setup demo test test-fast lint
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
