"""`draftsmith <verb> …`: each verb is the recipe of that name, also runnable as `python recipes/<verb>.py`."""

from __future__ import annotations

import importlib
import sys

VERBS = {
    "check": "prove that a target and a drafter fit: tokens, rows, special ids, templates, context",
    "repair": "mend a drafter that nearly fits: rows, tokenizer, template, special ids, into a new folder",
    "plan": "before any training: what a drafter would give here, which size, go or no-go",
    "init": "make an untrained drafter: from the target, from a donor of another vocabulary, or from a config",
    "generate": "let the target answer prompts, and record its distribution",
    "distill": "train the drafter on the target's distribution (also: accelerate launch recipes/distill.py)",
    "quantize": "write a 4-bit copy of a drafter, reloaded and checked",
    "serve": "serve a target with its drafter in vLLM on loopback, or print the line that does",
    "measure": "serve each arm in vLLM and measure acceptance, speed and losslessness",
    "sweep": "concurrency by K: where speculation pays, and the K to use at each batch size",
    "report": "one HTML page with verdict, table and plots from a run folder",
    "run": "the whole pipeline from one YAML, resumable stage by stage",
}


def main() -> None:
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help", "help"):
        print("usage: draftsmith <verb> [--config FILE] [key.path=value …]\n")
        print("\n".join(f"  {name:9} {about}" for name, about in VERBS.items()))
        print("\n`draftsmith <verb> --help` prints every key with its default.")
        raise SystemExit(0)
    if verb not in VERBS:
        print(f"error: no verb {verb!r}: one of {', '.join(VERBS)}", file=sys.stderr)
        raise SystemExit(2)
    from recipes.config import guarded

    sys.argv = [f"draftsmith {verb}", *sys.argv[2:]]
    raise SystemExit(guarded(importlib.import_module(f"recipes.{verb}").main))


if __name__ == "__main__":
    main()
