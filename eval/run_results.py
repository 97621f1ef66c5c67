"""Reads a run folder, of the whole pipeline or of one measure or distill job, into what a report is made from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from tokenizers import Tokenizer

from pairing.errors import InputError
from pairing.files import read_json, read_jsonl

Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """Every part that the folder holds; None or empty where it is absent."""

    folder: Path
    config: dict[str, Any] | None
    asked: dict[str, Any]
    """The config of what measured: measure's or sweep's."""
    provenance: dict[str, Any] | None
    jobs: dict[str, dict[str, Any]]
    """Provenance of each job within: {"distill": {…}, "measure": {…}}."""
    stages: Any
    results: Table
    requests: Table
    metrics: Table
    evaluation: dict[str, Any] | None
    answers: list[Path]
    """Folders of recorded answers, where the prompts' texts are."""
    sweep: dict[str, Any] | None
    check: Any
    quantize: dict[str, Any] | None
    pair: dict[str, Any] | None
    tokenizer: Tokenizer | None


def load(folder: Path) -> Run:
    """Raises InputError where there is no such folder, or neither a measurement nor a training in it."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such run folder")
    measure = _holder(folder, "measure", "results.jsonl")
    distill = _holder(folder, "distill", "metrics.jsonl")
    results, metrics = _jsonl(measure, "results.jsonl"), _jsonl(distill, "metrics.jsonl")
    evaluation = _json(distill, "evaluation.json")
    if not results and not metrics and evaluation is None:
        raise InputError(
            f"{folder}: no results in it (no results.jsonl, no metrics.jsonl): run `draftsmith measure` first"
        )
    asked = _yaml(measure / "config.yaml") or {}
    workloads = asked.get("workloads") or {}
    answers = [Path(str(w["answers"])) for w in workloads.values() if isinstance(w, dict) and w.get("answers")]
    drafters = [folder / "distill" / "drafter", folder / "drafter", folder / "nf4", folder / "w4a16", folder / "init"]
    drafters += [Path(str(r["model"])) for r in results if r.get("model")]
    pairs = [read_json(d / "pair.json") for d in drafters if (d / "pair.json").is_file()]
    jobs = {name: _json(folder / name, "provenance.json") for name in ("distill", "measure")}
    return Run(
        folder=folder,
        config=_yaml(folder / "config.yaml"),
        asked=asked,
        provenance=_json(folder, "provenance.json"),
        jobs={name: job for name, job in jobs.items() if job},
        stages=_json(folder, "stages.json"),
        results=results,
        requests=_jsonl(measure, "requests.jsonl"),
        metrics=metrics,
        evaluation=evaluation,
        answers=list(dict.fromkeys([*sorted(folder.glob("data/*")), *answers])),
        sweep=_json(_holder(folder, "sweep", "sweep.json"), "sweep.json"),
        check=_json(folder, "check.json"),
        quantize=_json(folder, "quantize.json")
        or next((p["quantization"] for p in pairs if p.get("quantization")), None),
        pair=pairs[0] if pairs else None,
        tokenizer=next(
            (Tokenizer.from_file(str(d / "tokenizer.json")) for d in drafters if (d / "tokenizer.json").is_file()), None
        ),
    )


def prompts(answers: Iterable[Path], ids: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """id -> chat messages, for those of `ids` that these folders of answers hold."""
    wanted = set(ids)
    found: dict[str, list[dict[str, str]]] = {}
    for shard in [shard for folder in answers for shard in sorted(folder.glob("shards/*.arrow"))]:
        try:
            with pa.memory_map(str(shard)) as source:
                table = pa.ipc.open_stream(source).read_all().select(["id", "messages"])
                rows = zip(table["id"].to_pylist(), table["messages"].to_pylist(), strict=True)
                found |= {id: json.loads(messages) for id, messages in rows if id in wanted}
        except pa.ArrowInvalid:
            continue  # torn by a kill, before its stage went on: a report does without these prompts
    return found


def _holder(folder: Path, part: str, file: str) -> Path:
    """The job's folder: the part of a pipeline run, or the folder itself where it is that job's own."""
    return folder if (folder / file).is_file() else folder / part


def _jsonl(folder: Path, name: str) -> Table:
    try:
        return read_jsonl(folder / name)
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise InputError(f"{folder / name}: a line is not valid JSON ({e}): measure again into a new folder") from None


def _json(folder: Path, name: str) -> Any:
    return read_json(folder / name) if (folder / name).is_file() else None


def _yaml(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(e).split())})") from None
