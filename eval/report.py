"""The report of a run folder: one HTML page that needs nothing else, Markdown, tables for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import yaml
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from eval import plots, sweep_page
from eval.run_results import Run, load, prompts
from eval.verdict import explained, judge, latest, serve_with, void_reason
from pairing.files import read_json
from pairing.portable import portable, roots_of
from pairing.source import ModelSource, servable

SAMPLES = 3
SAMPLE_CHARACTERS = 3000  # of each output: a page is read, not searched
MISMATCHES = 12  # shown of each cell; results.jsonl has them all
FEW = 8  # rows of a table that are read at a glance; of more, the best of each arm is shown and the rest folded
LATENCIES = (
    ("ttft_ms", "first token (TTFT)"),
    ("tpot_ms", "per output token (TPOT)"),
    ("itl_ms", "between tokens (ITL)"),
    ("chunk_gap_ms", "between chunks"),
    ("e2e_ms", "whole answer"),
)
Row = Mapping[str, Any]


def verdict(run_dir: Path) -> dict[str, Any]:
    """What verdict.json holds: eval.verdict.judge's, and what to `serve` with. Raises InputError as `load`."""
    return _verdict(load(run_dir))


def _verdict(run: Run) -> dict[str, Any]:
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
    found = portable(_verdict(run), roots)
    run = _published(run, roots)
    rows = latest(run.results)
    styles = _styles(rows)
    cells = [_cell(cell, rows, styles, run.requests) for cell in found["cells"]]
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            title=_title(run),
            day=measured_on(run.requests),
            verdict=found,
            cells=cells,
            by_load=_by_load(cells, styles) if not run.sweep else [],
            **_groups(rows, found, styles),
            memory=_memory(rows, styles),
            contexts=_contexts(rows),
            offline=_offline(run.results),
            latencies=LATENCIES,
            training=_training(run, rows),
            sweep=sweep_page.section(run.sweep) if run.sweep else None,
            check=run.check,
            quantize=run.quantize,
            samples=_samples(run, found),
            settings=_settings(rows),
            provenance=run.provenance or next(iter(run.jobs.values()), None),
            commands=_commands(run),
            stages=run.stages,
            config=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else None,
            pair=run.pair,
        )
    )


def folders(run: Run) -> list[tuple[str, str]]:
    config = run.config or {}
    return roots_of(run.folder, *(str(config[k]) for k in ("run_dir", "out") if config.get(k)))


def _published(run: Run, roots: Sequence[tuple[str, str]]) -> Run:
    """The run as a page shows it: no folder of this machine in its settings, reasons, configs and commands."""
    shown = ("config", "provenance", "jobs", "stages", "results", "sweep", "check", "quantize", "pair")
    return replace(run, **{name: portable(getattr(run, name), roots) for name in shown})


def environment() -> jinja2.Environment:
    """The templates beside this file, with the filters that they share."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"times": times, "percent": percent, "figure": figure, "ms": ms, "mebibytes": mebibytes,
                            "p_value": p_value}  # fmt: skip
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")
    environment.filters["without"] = lambda v, *keys: {k: x for k, x in v.items() if k not in keys}
    environment.tests["explained"] = explained
    environment.tests["mapping_list"] = lambda v: (
        isinstance(v, list) and bool(v) and all(isinstance(i, dict) for i in v)
    )
    return environment


def markdown(run_dir: Path) -> str:
    """The sentence and the table of every whole-workload row, for a pull request or a README."""
    run = load(run_dir)
    roots = folders(run)
    return _markdown(portable(_verdict(run), roots), portable(run.results, roots))


def markdown_results(results: Sequence[Row], evaluation: Mapping[str, Any] | None = None) -> str:
    """`markdown` of rows at hand."""
    return _markdown(judge(results, evaluation), results)


def _markdown(found: Mapping[str, Any], results: Sequence[Row]) -> str:
    lines = [f"**{found['answer'].capitalize()}.** {escape(found['sentence'], quote=False)}", ""]
    for cell in found["cells"]:
        lines += [f"{escape(cell_name(cell), quote=False)}:", ""]
        lines += ["| arm | K | speed | tokens/s | τ | accepted | identical | |", "|---|--:|--:|--:|--:|--:|--:|---|"]
        for row in _table_rows(cell, latest(results)):
            lines.append("| " + " | ".join(escape(t, quote=False).replace("|", "\\|") for t in _texts(row)) + " |")
        if hits := cache_hits(_rows_of(cell, latest(results))):
            lines += ["", escape(hits, quote=False)]
        lines.append("")
    lines += [f"- {escape(alarm, quote=False)}" for alarm in found["alarms"]]
    return "\n".join(lines).rstrip() + "\n"


def tables(run_dir: Path) -> Group:
    """The same rows for a terminal of 80 columns: a rich table for each workload, temperature and concurrency."""
    run = load(run_dir)
    shown = []
    for cell in _verdict(run)["cells"]:
        one = Table(title=cell_name(cell), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for i, head in enumerate(("arm", "K", "speed", "95 %", "tok/s", "τ", "identical", "result")):
            one.add_column(head, justify="left" if i in (0, 7) else "right", no_wrap=True)
        for row in _table_rows(cell, latest(run.results)):
            # Text, not str: names must not be read as rich's markup
            colour = {"faster": "green", "void": "yellow", "slower": "red", "differs from the target": "red"}
            texts = (
                row["arm"],
                figure(row["num_speculative_tokens"]),
                times(row["speedup"]),
                f"{row['interval'][0]:.2f}–{row['interval'][1]:.2f}" if row["interval"] else "–",
                figure(row["output_tokens_per_s"], 1),
                figure(row["acceptance_length"], 2),
                percent(row["exact_match"]),
                {"no measurable difference": "no difference", "differs from the target": "differs"}.get(
                    row["answer"], row["answer"]
                ),
            )
            one.add_row(*(Text(t, style=colour.get(row["answer"], "")) for t in texts))
        shown.append(Padding(one, (0, 0, 1, 0)))
    return Group(*shown)


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def percent(value: float | None, digits: int = 0) -> str:
    """A share just under 1, or over 0, gets the digits that tell it from that."""
    if value is None:
        return "–"
    while digits < 3 and 0 < value < 1 and round(value, digits + 2) in (0, 1):
        digits += 1
    return f"{value * 100:.{digits}f}\u00a0%"


def ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def mebibytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.1f} MiB"


def p_value(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def figure(value: Any, digits: int | None = None) -> str:
    """Anything a table cell may hold, as a reader wants it."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}f}" if digits is not None else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(figure(v, digits) for v in value)
    return str(value)


def _texts(row: Row) -> list[str]:
    low_high = row["interval"]
    speed = times(row["speedup"]) + (f" ({low_high[0]:.2f}–{low_high[1]:.2f})" if low_high else "")
    return [
        row["arm"],
        figure(row["num_speculative_tokens"]),
        speed,
        figure(row["output_tokens_per_s"], 1),
        figure(row["acceptance_length"], 2),
        percent(row["draft_acceptance_rate"]),
        percent(row["exact_match"]),
        row["answer"] + (f": {row['reason']}" if row["answer"] in ("void", "not measurable") else ""),
    ]


def cell_name(cell: Row) -> str:
    if cell.get("rate") is not None:
        at = f"{cell['rate']:g} requests sent a second"
    elif cell["concurrency"] is None:
        at = "offline"
    else:
        at = "one request at a time" if cell["concurrency"] == 1 else f"{cell['concurrency']} requests in flight"
    return f"{cell['workload']}, temperature {cell['temperature']:g}, {at}"


def cache_hits(rows: Sequence[Row]) -> str | None:
    """What of the prompts these arms found in the prefix cache (D20); None where none found any, as is usual."""
    found = [f"{r['arm']} {percent(r['prefix_cache_hit_rate'], 1)}" for r in rows if r.get("prefix_cache_hit_rate")]
    return f"Prefix cache hit rate: {', '.join(found)}." if found else None


def _rows_of(cell: Row, rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r.get("group") is None
            and all(r.get(k) == cell.get(k) for k in ("workload", "temperature", "concurrency", "rate"))]  # fmt: skip


def family(row: Row) -> str:
    """The arm's name without the K that a sweep puts into it: its arms of every K are one way of drafting."""
    return str(row["arm"]).removesuffix(f"-k{row['num_speculative_tokens']}")


def _styles(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Arm or family -> colour and marker: all K of one way of drafting look alike."""
    families = {r["arm"]: family(r) for r in rows if r["arm"] != "target"}
    by_family = plots.style(list(dict.fromkeys(families.values())))
    return {"target": (plots.INK, "x"), **by_family, **{arm: by_family[name] for arm, name in families.items()}}


def _table_rows(cell: Row, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The target, then the arms as judged, fastest first; each the results row with the verdict's fields over it."""
    own = _rows_of(cell, rows)
    keys = ("arm", "num_speculative_tokens", "draft_sample_method")
    by_arm = {tuple(r.get(k) for k in keys): r for r in own}
    fields = ("output_tokens_per_s", "exact_match", "acceptance_length", "draft_acceptance_rate", "prompts", "repeats")
    blank = dict.fromkeys((*fields, "mismatches", *(k for k, _ in LATENCIES)))  # a void row may hold none of them
    targets = [
        {**blank, **r, "num_speculative_tokens": None, "reason": void_reason(r),
         "speedup": None if void_reason(r) else 1.0 if r["arm"] == "target" else r.get("speedup"),
         "interval": None if r["arm"] == "target" or void_reason(r) else r.get("speedup_interval"),
         "answer": "void" if void_reason(r) else "baseline"}
        for r in own if r["kind"] == "target"
    ]  # fmt: skip
    return targets + [{**blank, **by_arm[tuple(a.get(k) for k in keys)], **a} for a in cell["arms"]]


def _brief(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The target, and of each way of drafting the fastest (rows are fastest first); one that is void everywhere stays."""
    kept: dict[str, dict[str, Any]] = {}
    for row in rows:
        held = kept.setdefault(family(row), row)
        if held["answer"] == "void" and row["answer"] != "void":
            kept[family(row)] = row
    return list(kept.values())


def _cell(
    cell: Row, rows: Sequence[Row], styles: Mapping[str, tuple[str, str]], requests: Sequence[Row]
) -> dict[str, Any]:
    shown = _table_rows(cell, rows)
    brief = _brief(shown)  # an arm measured at several K: its fastest in the plots
    survivors = [row for row in brief if row["answer"] not in ("void", "baseline")]
    drawn = [
        plots.speedups("End-to-end speed", survivors, styles),
        plots.per_position("Accepted up to this position (of all rounds)", survivors, "survival_per_pos", styles),
        plots.per_position("Accepted here, if all before were", survivors, "conditional_per_pos", styles),
    ]
    keys = ("workload", "temperature", "concurrency", "rate")
    here = [r for r in requests if all(r.get(k) == cell.get(k) for k in keys)]
    waits = [
        plots.distribution(
            title,
            {row["arm"]: [r[key] * 1000 for r in here if r["arm"] == row["arm"] and r.get(key) is not None]
             for row in brief if row["answer"] != "void"},
            styles,
        )
        for key, title in (
            ("ttft_s", "First token (TTFT)"), ("tpot_s", "Per output token (TPOT)"), ("e2e_s", "Whole answer")
        )
    ]  # fmt: skip
    mismatches = [(row["arm"], m) for row in shown for m in row["mismatches"] or []]
    return {
        **{k: cell.get(k) for k in keys},
        "name": cell_name(cell),
        "rows": shown,
        "brief": brief if len(shown) > FEW else shown,
        "plots": [p for p in drawn if p],
        "waits": [p for p in waits if p],
        # what is not explained first: it is what a reader must see
        "mismatches": sorted(mismatches, key=lambda m: explained(m[1]))[:MISMATCHES],
        "more_mismatches": max(0, len(mismatches) - MISMATCHES),
        "lossless": [row for row in shown if row.get("losslessness") and row["answer"] != "void"],
        "cache_hits": cache_hits(_rows_of(cell, rows)),
        "again": next((row for row in shown if row["arm"] == "target-again"), None),
        "imprecise": sorted({row["arm"] for row in shown if row.get("precision_reached") is False}),
    }


def _by_load(cells: Sequence[Row], styles: Mapping[str, tuple[str, str]]) -> list[str]:
    """Speed by requests in flight, and by requests sent a second, of every workload and temperature with two or more."""
    drawn = []
    for unit in ("concurrency", "rate"):
        series: dict[tuple[str, float], dict[str, list[Row]]] = {}
        for cell in cells:
            for row in cell["rows"]:
                if cell[unit] is not None and row["answer"] not in ("void", "baseline"):
                    here = series.setdefault((cell["workload"], cell["temperature"]), {})
                    here.setdefault(row["arm"], []).append({**row, unit: cell[unit]})
        for (workload, temperature), lines in series.items():
            if len({row[unit] for line in lines.values() for row in line}) > 1:
                at = f", temperature {temperature:g}" if temperature else ""
                drawn.append(plots.by_load(f"{workload}{at}", lines, unit, styles))
    return [p for p in drawn if p]


def _groups(rows: Sequence[Row], found: Mapping[str, Any], styles: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Rows of parts of a workload, those of the headline's cell first and drawn."""
    parts = [{**r, "load": cell_name(r).split(", ", 1)[1]} for r in rows
             if r.get("group") is not None and r["kind"] != "target"]  # fmt: skip
    drawn = []
    keys = ("workload", "temperature", "concurrency", "rate")
    first = found["cells"][0] if found["cells"] else {}
    here = [r for r in parts if all(r.get(k) == first.get(k) for k in keys) and not void_reason(r)]
    for arm in dict.fromkeys(r["arm"] for r in here):
        bars = [{**r, "label": r["group"], "interval": r.get("speedup_interval")} for r in here if r["arm"] == arm]
        drawn.append(plots.speedups(f"{arm} by part of {first['workload']}", bars, styles))
    main = [r for r in parts if all(r.get(k) == first.get(k) for k in ("temperature", "concurrency", "rate"))]
    return {"groups": main, "more_groups": [r for r in parts if r not in main], "group_plots": [p for p in drawn if p]}


def _memory(rows: Sequence[Row], styles: Mapping[str, tuple[str, str]]) -> str | None:
    """The largest memory of each arm's server; of several K the largest."""
    most: dict[str, float] = {}
    for r in rows:
        if r.get("memory_mib") and not void_reason(r):
            most[family(r)] = max(most.get(family(r), 0.0), r["memory_mib"])
    return plots.bars("Memory of the server, with everything it loaded", most, "MiB", styles)


def _offline(results: Sequence[Row]) -> list[dict[str, Any]]:
    """Arms of another engine (transformers), each cell with its own target alone: no rivals of the served ones."""
    keys = ("arm", "kind", "workload", "temperature", "speedup", "output_tokens_per_s", "acceptance_length",
            "exact_match", "num_speculative_tokens")  # fmt: skip
    return [
        {k: r.get(k) for k in keys} | {"interval": r.get("speedup_interval"), "reason": void_reason(r)}
        for r in results
        if r.get("engine", "vllm") != "vllm" and r.get("group") is None
    ]


def _contexts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """τ by how long the context was, of each arm and cell that has it: {"arm", "cell", "bands"}."""
    return [
        {"arm": r["arm"], "cell": cell_name(r), "bands": r["acceptance_length_by_context"]}
        for r in rows
        if r.get("acceptance_length_by_context") and r.get("group") is None and not void_reason(r)
    ]


def _title(run: Run) -> str:
    target = _target(run)
    return f"A drafter for {target.rstrip('/').split('/')[-1]}" if target else f"Run {run.folder.name}"


def measured_on(requests: Sequence[Row]) -> str | None:
    """When the measuring began, from the run itself: the page of a run doesn't depend on when it is built."""
    started = [r["started_at"] for r in requests if r.get("started_at")]
    if not started:
        return None
    first = min(started, key=str)
    return first[:10] if isinstance(first, str) else datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d")


def _training(run: Run, rows: Sequence[Row]) -> dict[str, Any] | None:
    if not run.metrics and not run.evaluation:
        return None
    train = [m for m in run.metrics if m["kind"] == "train"]
    evals = [m for m in run.metrics if m["kind"] == "eval"]
    names = list(dict.fromkeys(m["set"] for m in evals))
    sets = (run.evaluation or {}).get("sets", {})
    loss = [(m["step"], m["loss"]) for m in train if m.get("loss") is not None]
    drawn = [
        plots.curve("Training loss", {"loss": plots.smoothed(loss, max(1, len(loss) // 120))}),
        plots.curve(
            "Top-1 agreement on held-out text",
            {n: [(m["step"], m["top1"]) for m in evals if m["set"] == n] for n in names},
            unit=True,
        ),
        plots.curve(
            "τ at K = 4 on held-out text, by replay",
            {n: [(m["step"], m["tau"]["4"]) for m in evals if m["set"] == n and "4" in m["tau"]] for n in names},
        ),
    ]
    for name, s in sets.items():
        served: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            mine = row["workload"] == name and row["kind"] == "draft_model" and row.get("group") is None
            if mine and row.get("acceptance_length") and not void_reason(row):
                served.setdefault(row["arm"], []).append((row["num_speculative_tokens"], row["acceptance_length"]))
        before, after = (s.get("before") or {}).get("tau"), (s.get("after") or {}).get("tau")
        drawn.append(plots.offline_against_served(f"τ offline and served, {name}", before, after, served))
    last = train[-1] if train else {}
    return {
        "plots": [p for p in drawn if p],
        "sets": sets,
        "verdict": (run.evaluation or {}).get("verdict"),
        "steps": last.get("step"),
        "tokens": last.get("tokens"),
        "seconds": last.get("seconds"),
    }


def _samples(run: Run, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first prompts of the headline's workload with the target's and the best arm's outputs side by side."""
    if not found["cells"] or not run.requests:
        return None
    best, workload = found["best"] or {}, found["cells"][0]["workload"]
    outputs: dict[str, dict[str, list[int]]] = {}
    for r in run.requests:
        ours = r["workload"] == workload and r["repeat"] == 0
        if ours and (r["arm"] == "target" or (r["arm"], r.get("num_speculative_tokens"))
                     == (best.get("arm"), best.get("num_speculative_tokens"))):  # fmt: skip
            outputs.setdefault(r["id"], {})[r["arm"]] = r["output_ids"]
    chosen = list(outputs.items())[:SAMPLES]
    asked = prompts(run.answers, [id for id, _ in chosen])
    return {
        "workload": workload,
        "decoded": run.tokenizer is not None,
        "items": [
            {
                "id": id,
                "messages": asked.get(id),
                "same": len(arms) > 1 and len({tuple(ids) for ids in arms.values()}) == 1,
                "outputs": {arm: _decode(run.tokenizer, ids) for arm, ids in arms.items()},
            }
            for id, arms in chosen
        ],
    }


def _decode(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """Special tokens are shown: an answer that never ended must look like one."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False) if tokenizer else " ".join(map(str, ids))
    more = len(text) - SAMPLE_CHARACTERS
    return text if more <= 0 else f"{text[:SAMPLE_CHARACTERS]}… ({more} more characters)"


def _settings(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The arms' settings: what they share and what differs, so that "alike but for speculation" can be seen."""
    by_arm = {r["arm"]: r.get("settings") or {} for r in rows}
    if not any(by_arm.values()):
        return None
    keys = list(dict.fromkeys(k for s in by_arm.values() for k in s))
    shared, differing = {}, []
    for key in keys:
        values = {arm: s.get(key) for arm, s in by_arm.items()}
        if all(v == next(iter(values.values())) for v in values.values()):
            shared[key] = next(iter(values.values()))
        else:
            differing.append((key, values))
    return {
        "shared": shared,
        "differing": differing,
        "versions": next((r["versions"] for r in rows if r.get("versions")), None),
    }


def _commands(run: Run) -> list[str]:
    """What to type to get this run again."""
    first = run.provenance or next(iter(run.jobs.values()), None)
    if not first:
        return []
    jobs = [run.provenance] if run.provenance else list(run.jobs.values())
    lines = [f"git checkout {first['git']}"] if first.get("git") else []
    return lines + [_command(job["argv"]) for job in jobs if job and job.get("argv")]


def _command(argv: Sequence[str]) -> str:
    """argv as a person types it: `draftsmith run …`, or `python recipes/run.py …` without this machine's folders."""
    program = argv[0]
    if program.endswith(".py"):
        program = "python " + "/".join(Path(program).parts[-2:])
    return " ".join([program, *(shlex.quote(a) for a in argv[1:])])
