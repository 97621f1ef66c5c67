"""What a drafter inside vLLM computes, for tests to compare: mixed into vLLM's worker by `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

SPY = f"{__name__}.DraftSpy"


class DraftSpy:
    """Reached by `collective_rpc`: "watch_drafts", then any number of "watched_drafts"."""

    model_runner: Any
    draft_logits: list[list[list[float]]]

    def watch_drafts(self) -> None:
        """From here on the logits that drafts are taken from are kept, pass by pass."""
        model = self.model_runner.drafter.model
        compute, self.draft_logits = model.compute_logits, []

        def kept(hidden: Any) -> Any:
            logits = compute(hidden)
            self.draft_logits.append(logits.float().tolist())
            return logits

        model.compute_logits = kept

    def watched_drafts(self) -> list[list[list[float]]]:
        """[passes][rows][vocabulary] since the last call."""
        found, self.draft_logits = self.draft_logits, []
        return found
