"""One finding about a pair: its level, what it is, where, what to do, and whom it stops."""

from __future__ import annotations

from dataclasses import dataclass

# "blocks": the pair cannot run, or runs with wrong tokens; "repairable": it does not run as it is, and a mechanical
# repair exists; "warns": it runs, and something costs or surprises.
LEVELS = ("blocks", "repairable", "warns", "info")
# vLLM's draft_model; transformers' assisted generation with one tokenizer, and with two ("universal"); our training.
USERS = ("vllm", "transformers", "universal", "training")
ONE_VOCABULARY = ("vllm", "transformers", "training")  # the users that pass ids from one model to the other


@dataclass(frozen=True)
class Finding:
    level: str  # one of LEVELS
    what: str  # the fact, in one line
    where: str  # the part that was compared: tokens, rows, special ids, template, …
    fix: str  # what to do; "" where nothing needs doing
    repair: bool = False  # `draftsmith repair` mends it
    stops: tuple[str, ...] = USERS  # which users a "blocks" or "repairable" stops; the others run all the same
