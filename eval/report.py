"""The report of a run folder: its verdict, and one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from eval import report_run, report_served, sweep_page
from eval.page import environment, folders, measured_on
from eval.run_results import Run, load
from eval.verdict import judge, latest, serve_with
from pairing.files import read_json
from pairing.portable import portable
from pairing.source import ModelSource, servable


def verdict(run_dir: Path) -> dict[str, Any]:
    """What verdict.json holds: eval.verdict.judge's, and what to `serve` with. Raises InputError as `load`."""
    return verdict_of(load(run_dir))


def verdict_of(run: Run) -> dict[str, Any]:
    """`verdict` of a folder that was read."""
    found = judge(run.results, run.evaluation)
    if run.sweep:
        return sweep_page.sweep_verdict(found, run.sweep)
    own = Path(str((found["best"] or {}).get("model"))) / "pair.json"
    pair = read_json(own) if own.is_file() else None
    return found | {"serve": serve_with(found, _servable(run), pair)}


def _target(run: Run) -> str | None:
    named = ((run.pair or {}).get("target") or {}).get("name")
    return named or next((str(r["model"]) for r in run.results if r["kind"] == "target" and r.get("model")), None)


def _servable(run: Run) -> str | None:
    """The target as a `vllm serve` line names it: of a GGUF file or an adapter the folder that was made of it."""
    made_for = (run.pair or {}).get("target") or {}
    if not made_for.get("path"):
        return _target(run)
    return servable(ModelSource(made_for["name"], Path(made_for["path"]), made_for.get("revision"), None))


def build(run_dir: Path) -> str:
    """The whole page. No script, no request to anywhere; text of models and users is escaped (jinja2 autoescape).

    Parts that the folder doesn't hold are left out, each with a line that says so. Raises InputError as `verdict`.
    """
    run = load(run_dir)
    roots = folders(run)
    found = portable(verdict_of(run), roots)
    run = _published(run, roots)
    rows = latest(run.results)
    styles = report_served.styles_of(rows)
    cells = [report_served.cell_section(cell, rows, styles, run.requests) for cell in found["cells"]]
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            title=_title(run),
            day=measured_on(run.requests),
            verdict=found,
            cells=cells,
            by_load=report_served.by_load(cells, styles) if not run.sweep else [],
            **report_served.groups(rows, found, styles),
            memory=report_served.memory(rows, styles),
            contexts=report_served.contexts(rows),
            offline=report_served.offline(run.results),
            latencies=report_served.LATENCIES,
            training=report_run.training(run, rows),
            sweep=sweep_page.section(run.sweep) if run.sweep else None,
            check=run.check,
            quantize=run.quantize,
            samples=report_run.samples(run, found),
            settings=report_run.settings(rows),
            provenance=run.provenance or next(iter(run.jobs.values()), None),
            commands=report_run.commands(run),
            stages=run.stages,
            config=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else None,
            pair=run.pair,
        )
    )


def _title(run: Run) -> str:
    target = _target(run)
    return f"A drafter for {target.rstrip('/').split('/')[-1]}" if target else f"Run {run.folder.name}"


def _published(run: Run, roots: Sequence[tuple[str, str]]) -> Run:
    """The run as a page shows it: no folder of this machine in its settings, reasons, configs and commands."""
    shown = ("config", "provenance", "jobs", "stages", "results", "sweep", "check", "quantize", "pair")
    return replace(run, **{name: portable(getattr(run, name), roots) for name in shown})
