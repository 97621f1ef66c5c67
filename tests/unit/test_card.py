"""The drafter's model card: its parts, front matter that is YAML, and that what a user wrote in it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pairing.card import BEGIN, END, render_card, write_card
from pairing.files import read_json, write_json

SNAPSHOT = "/c/models--Org--Target-1B/snapshots/ab12"


def pair(**fields: Any) -> dict[str, Any]:
    row = {"arm": "drafter", "workload": "orders", "temperature": 0.0, "concurrency": 1, "num_speculative_tokens": 4,
           "draft_acceptance_rate": 0.56, "acceptance_length": 3.25, "speedup": 1.336, "speedup_interval": [1.281, 1.398],
           "exact_match": 1.0, "void": None, "versions": {"vllm": "0.32.0", "torch": None}}  # fmt: skip
    slow = {**row, "workload": "hum|an<b>", "speedup": 0.81, "speedup_interval": [0.77, 0.86]}
    none = {**row, "workload": "chat", "temperature": 0.7, "speedup": 1.01, "speedup_interval": [0.98, 1.04]}
    void = {**row, "concurrency": 8, "speedup": None, "speedup_interval": None, "void": "died (log: /x/y/drafter.log)"}
    return {
        "schema": 1, "made": [{"step": "init", "layers": [0, 2]}],
        "target": {"name": "Org/Target-1B", "path": SNAPSHOT, "digests": {"weights": "sha256:1"}},
        "measurements": [row, slow, none, void], "measured": {"date": "2026-11-30", "machine": "A CPU (2 cores)"},
        "serve": {"num_speculative_tokens": 4, "command": f"vllm serve {SNAPSHOT} --speculative-config C"},
    } | fields  # fmt: skip


def folder(tmp_path: Path, **fields: Any) -> Path:
    drafter = tmp_path / "drafter"
    write_json(drafter / "pair.json", pair(**fields))
    return drafter


def test_verdict_serve_line_table_and_limits(tmp_path: Path) -> None:
    drafter = folder(tmp_path)
    write_card(drafter)
    card = (drafter / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "Org/Target-1B"
    assert front["library_name"] == "transformers"
    assert "speculative-decoding" in front["tags"]
    parts = [
        "**It pays:** 1.34x the target's own speed (95 % interval 1.28 to 1.40) on orders with K = 4.",
        "vllm serve Org/Target-1B --speculative-config C",
        "| drafter | orders | 0 | 1 | 4 | 1.34x (1.28 to 1.40) | 3.25 | 56% | 100.0% |",
        "| drafter | hum\\|an&lt;b> | 0 | 1 | 4 | 0.81x (0.77 to 0.86) |",
        "| drafter | orders | 0 | 8 | 4 | void: died (log: drafter.log) |",
        "Do not deploy it, it is slower than the target alone: hum\\|an&lt;b> at K = 4 (0.81x).",
        "No measurable gain: chat at temperature 0.7 at K = 4 (1.01x).",
        "; on A CPU (2 cores); 2026-11-30; with vllm 0.32.0.",
        "1. init: layers [0, 2]",
    ]
    at = [card.index(part) for part in parts]
    assert at == sorted(at)
    assert "/c/" not in card


def test_a_speedup_that_the_verdict_does_not_let_stand_is_no_claim() -> None:
    """eval/verdict.py decides; measurements of before its answer was kept are read by their interval (above)."""
    why = "1 output differs from the target's and not by a tie in rounding, first <p> at token 3"
    row = pair()["measurements"][0]
    lossy = {**row, "answer": "differs from the target", "reason": why}
    noisy = {**row, "workload": "chat", "answer": "no measurable difference", "reason": "within the machine's noise"}
    card = render_card(pair(measurements=[lossy, noisy]), "drafter")
    assert "It pays" not in card
    assert (
        "**It does not pay:** 1.34x the target's own speed (95 % interval 1.28 to 1.40) on orders with K = 4: " in card
    )
    assert why.replace("<", "&lt;") in card
    assert "| 1.34x (1.28 to 1.40), differs from the target |" in card
    assert "- Do not deploy it, its outputs are not the target's own: orders at K = 4 (1.34x)." in card
    assert "- No measurable gain: chat at K = 4 (1.34x)." in card
    slower = {**row, "speedup": 1.1, "speedup_interval": [1.05, 1.15], "answer": "faster"}
    assert "**It pays:** 1.10x" in render_card(pair(measurements=[lossy, slower]), "drafter")


def test_a_users_text_stays_and_ours_is_replaced(tmp_path: Path) -> None:
    drafter = folder(tmp_path)
    write_card(drafter)
    card = drafter / "README.md"
    once = card.read_text()
    write_card(drafter)
    assert card.read_text() == once
    card.write_text(
        once.replace("library_name: transformers", "license: mit").replace(BEGIN, f"Ours.\n{BEGIN}") + "\nThanks.\n"
    )
    write_json(drafter / "pair.json", pair(measurements=[]))
    write_card(drafter)
    text = card.read_text()
    assert "license: mit" in text
    assert "Ours.\n" in text
    assert text.endswith("\nThanks.\n")
    assert text.count(BEGIN) == text.count(END) == 1
    assert "1.34x" not in text
    assert "Not measured yet" in text


def test_a_readme_without_our_marks_gets_our_section_at_its_end(tmp_path: Path) -> None:
    drafter = folder(tmp_path)
    (drafter / "README.md").write_text("# Mine\n\nAll of it.\n")
    write_card(drafter)
    write_card(drafter)
    text = (drafter / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["base_model"] == "Org/Target-1B"
    assert text.index("All of it.") < text.index(BEGIN)
    assert text.count("# drafter") == 1


def test_a_local_target_is_no_base_model_and_shows_no_folder(tmp_path: Path) -> None:
    target = {"name": str(tmp_path / "target"), "path": str(tmp_path / "target"), "digests": {}}
    drafter = folder(tmp_path, target=target, serve=None)
    write_card(drafter)
    card = (drafter / "README.md").read_text()
    assert "base_model" not in card
    assert str(tmp_path) not in card
    assert "speculative decoding with `target`" in card
    assert str(tmp_path / "target") in str(read_json(drafter / "pair.json"))  # only the card is for others
    assert "Not measured yet" in render_card(pair(measurements=[]), "drafter")
