"""The report of a run folder: what stands in it, that it is whole by itself, and what bad folders get."""

from __future__ import annotations

import json
import re
import shutil
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.evaluate_parallel import PromptRounds, compare_rounds, rounds_summary
from eval import plots, report, report_run, report_text, sweep_page
from eval.page import cell_name, percent
from eval.verdict import judge
from pairing.errors import InputError
from pairing.files import read_json, read_jsonl, write_json, write_jsonl
from recipes.report import main, write_report
from tests import sample_sweep
from tests.sample_run import HOSTILE, LONGEST, drafted, evaluation, result, results, with_one_pass, write


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    return report.build(run_dir)


class Outline(HTMLParser):
    """Tags, attributes and texts of a page; fails where a tag is not closed by its own end."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_verdict_comes_first_then_table_plots_and_the_rest(page: str) -> None:
    text = " ".join(" ".join(Outline(page[page.index("<body>") :].replace("</html>", "")).texts).split())
    order = [
        "A drafter for SmolLM2-135M-Instruct", "Deploy drafter at K = 4", "Void: drafter-nf4 on orders", "Serve with",
        "Served and measured", "orders, temperature 0, one request at a time", "no measurable difference",
        "Parts of a workload", "seen=false",
        "Are the outputs the target's own?", "a tie in rounding", "Latency", "Training", "+0.761 to +0.806",
        "Alignment of the pair", "Aligned, with 1 warning", "Quantization", "nf4: 171.0 MiB before, 123.9 MiB after",
        "Prompts and outputs", "How to get this again", "git checkout 0d41407",
        "draftsmith run recipes/configs/demo/pipeline.yaml 'target=my model'", "Machine and versions", "Words",
    ]  # fmt: skip
    at = [text.index(part) for part in order]
    assert at == sorted(at)


def test_measured_figures_stand_in_their_row(page: str) -> None:
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    cells = [re.sub(r"<[^>]*>", " ", row).split() for row in rows]
    assert ["drafter", "4", "1.34x", "1.28", "to", "1.40", "11.2", "3.25", "replay", "3.19", "teacher-forced", "3.14",
            "56", "%", "100", "%", "faster"] in cells  # fmt: skip
    assert ["ngram", "4", "0.97x", "0.91", "to", "1.03", "8.1", "2.40", "35", "%", "100", "%", "no", "measurable",
            "difference"] in cells  # fmt: skip


def test_the_page_needs_nothing_else_and_runs_nothing(page: str) -> None:
    outline = Outline(page)
    assert {tag for tag, _ in outline.tags} & {"script", "iframe", "object", "embed", "img", "form", "base"} == set()
    for tag, attrs in outline.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "xlink:href", "action", "data", "poster"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    assert not re.search(r"url\((?!#)|@import", page)
    metas = {attrs.get("http-equiv"): attrs.get("content") for tag, attrs in outline.tags if tag == "meta"}
    assert (metas["Content-Security-Policy"] or "").startswith("default-src 'none'")


def test_text_of_models_and_users_is_escaped(run_dir: Path, tmp_path: Path) -> None:
    """A prompt, an output, an arm's name, a void reason and a workload that carry markup are shown, not obeyed."""
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder, ignore=shutil.ignore_patterns("metrics.jsonl", "evaluation.json"))
    rows = [
        result("target", "target", workload=HOSTILE),
        result(HOSTILE, "draft_model", workload=HOSTILE, speedup=1.2, speedup_interval=[1.1, 1.3],
               **drafted([3, 2, 1, 0], 4)),
        result("dead", "draft_model", workload=HOSTILE, void=HOSTILE),
    ]  # fmt: skip
    write_jsonl(folder / "measure" / "results.jsonl", rows)
    page = report.build(folder)
    assert "evil.example" in page
    assert {tag for tag, _ in Outline(page).tags} & {"script", "img"} == set()
    assert "<script" not in page
    assert "onerror=alert(1)>" not in page
    assert "<script" not in report_text.markdown(folder)
    assert "&lt;script&gt;fetch(" in page


def test_prompts_and_outputs_are_escaped(page: str) -> None:
    """Three prompts; two with one output for both arms, one with two."""
    samples = page[page.index("Prompts and outputs") : page.index("How to get this again")]
    assert samples.count("&lt;script&gt;fetch(&#39;http://evil.example/&#39;)&lt;/script&gt;") == 3 + 4
    assert "<script" not in page


def test_plots_are_inline_text_without_clashing_ids(page: str) -> None:
    plotted = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    # orders and humaneval: speed, survival, conditional; memory; parts; orders' waits (TTFT, TPOT, whole); loss, top-1, τ;
    # τ offline and served of both
    assert len(plotted) == 3 + 3 + 1 + 1 + 3 + 3 + 2
    assert all("<text" in p and 'role="img"' in p and "aria-label=" in p for p in plotted)
    ids = [i for p in plotted for i in set(re.findall(r'\bid="([^"]+)"', p))]
    assert not any(re.fullmatch(r"(figure|axes|text|patch)_\d+", i) for i in ids)
    assert "<metadata" not in page


def test_plots_carry_the_figures(page: str) -> None:
    svg = plots.speedups(
        "Speed", [{"arm": "a", "num_speculative_tokens": 3, "speedup": 1.5, "interval": [1.4, 1.6]}], plots.style(["a"])
    )
    assert svg is not None
    assert "a, K = 3" in svg
    assert "1.50x" in svg
    assert plots.speedups("Speed", [{"arm": "a", "speedup": None, "interval": None}], {}) is None
    assert plots.smoothed([(float(i), float(i % 2)) for i in range(100)], 10)[0] == (4.5, 0.5)


def test_samples_show_prompt_and_both_outputs_side_by_side(page: str) -> None:
    samples = page[page.index("Prompts and outputs") : page.index("How to get this again")]
    assert samples.count("Order 0: 3 lamps for Zoë.") == 1
    assert samples.count("target and drafter: the same tokens") == 2  # the second of three differs
    assert "&#34;order&#34;: 1," in samples
    assert "&#34;order&#34;: 7," in samples
    assert "&lt;|im_end|&gt;" in samples


ABSENT = [
    "no results.jsonl: run draftsmith measure",
    "no metrics.jsonl: run draftsmith distill",
    "no check.json: run draftsmith check",
    "no 4-bit drafter: run draftsmith quantize",
    "no provenance.json",
    "no requests.jsonl",
]


def test_parts_that_are_absent_are_left_out_with_a_line_each(page: str, tmp_path: Path) -> None:
    assert not any(line in page for line in ABSENT)
    write_jsonl(tmp_path / "measure" / "results.jsonl", [result("target", "target")])
    bare = report.build(tmp_path)
    Outline(bare)
    assert [line for line in ABSENT if line in bare] == ABSENT[1:]
    shutil.rmtree(tmp_path / "measure")
    write_json(tmp_path / "distill" / "evaluation.json", {"sets": {}, "verdict": "no measurable change"})
    trained = report.build(tmp_path)
    assert [line for line in ABSENT if line in trained] == [ABSENT[0], *ABSENT[2:]]
    assert "no measurable change" in trained


def test_a_measure_folder_alone_is_enough(run_dir: Path) -> None:
    page = report.build(run_dir / "measure")
    assert "Deploy drafter at K = 4" in page
    assert "The prompt's text is not in this run folder" in page
    assert "Outputs are token ids" in page


def test_markdown_is_a_table_that_holds_whatever_the_names_are(tmp_path: Path) -> None:
    told = {"replay_acceptance_length": 3.19, "teacher_forced_acceptance_length": 3.14}
    rows = [result("target", "target"), result("a|b", "draft_model", void="x | y")]
    rows += [
        result(
            "c", "draft_model", speedup=1.2, speedup_interval=[1.1, 1.3], **told, **drafted([320, 250, 190, 140], 400)
        )
    ]
    text = report_text.markdown_results(rows)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {9}
    assert "void: x \\| y" in text
    assert "| 3.25 (replay 3.19, teacher-forced 3.14) | 56" in text


def test_shares_near_one_and_zero_keep_the_digits_that_tell() -> None:
    assert percent(0.996).replace("\u00a0", " ") == "99.6 %"
    assert percent(1.0).replace("\u00a0", " ") == "100 %"
    assert percent(0.003).replace("\u00a0", " ") == "0.3 %"
    assert percent(0.0).replace("\u00a0", " ") == "0 %"
    assert percent(None) == "–"


def test_the_command_writes_page_and_verdict_and_answers(
    run_dir: Path, page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    assert main([str(folder)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "drafter 4 1.34x 1.28–1.40 11.2 3.25 100 % faster" in told
    assert "Deploy drafter at K = 4" in told
    assert read_json(folder / "verdict.json")["answer"] == "deploy"
    # the same bytes as built before, elsewhere: no time of building, no random id
    assert (folder / "report.html").read_text(encoding="utf-8") == page


def test_a_no_is_exit_one_yet_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = result("drafter", "draft_model", speedup=0.7, speedup_interval=[0.6, 0.8], **drafted([3, 2, 1, 0], 4))
    write_jsonl(tmp_path / "results.jsonl", [result("target", "target"), slow])
    assert main([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == read_json(tmp_path / "verdict.json")
    assert read_json(tmp_path / "verdict.json")["answer"] == "do not deploy"
    assert (tmp_path / "report.html").is_file()
    assert write_report(tmp_path)["answer"] == "do not deploy"  # what `run` calls: no exit code


def test_dry_run_writes_nothing(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    assert main([str(folder), "--dry-run"]) == 0
    assert not (folder / "report.html").exists()


def test_bad_folders_are_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such run folder"):
        main([str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match="no results in it"):
        main([str(tmp_path)])
    (tmp_path / "results.jsonl").write_text('{"arm": "tar\n{}\n')
    with pytest.raises(InputError, match=r"results\.jsonl: a line is not valid JSON"):
        main([str(tmp_path)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.jsonl"]


def test_the_best_drafters_own_serve_line_is_taken(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    own = folder / "distill" / "drafter"
    pair = read_json(own / "pair.json")
    line = "vllm serve T --speculative-config C"
    write_json(own / "pair.json", pair | {"serve": {"num_speculative_tokens": 4, "command": line}})
    rows = [result("target", "target"), result("drafter", "draft_model", model=str(own), speedup=1.2,
            speedup_interval=[1.1, 1.3], **drafted([3, 2, 1, 0], 4))]  # fmt: skip
    write_jsonl(folder / "measure" / "results.jsonl", rows)
    assert report.verdict(folder)["serve"]["command"] == line


def test_a_page_names_no_folder_of_this_machine(run_dir: Path, tmp_path: Path) -> None:
    """Paths of the run, the working directory, the home and others, in every part that is shown; verdict.json, which stays
    here, keeps them."""
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    home, here, cwd = str(Path.home()), str(folder), str(Path.cwd())
    own = folder / "distill" / "drafter"
    pair = read_json(own / "pair.json")
    write_json(own / "pair.json", pair | {"target": {"name": f"{cwd}/models/t", "path": f"{home}/t", "digests": {}}})
    write_json(folder / "provenance.json", read_json(folder / "provenance.json") | {
        "argv": ["draftsmith run", f"run_dir={here}", f"target={cwd}/models/t", "x=/srv/data/p.jsonl"],
    })  # fmt: skip
    (folder / "config.yaml").write_text(f"run_dir: {here}\ntarget: {cwd}/models/t\nhome: {home}/x\n")
    rows = [result("target", "target", settings={"command": f"vllm serve {cwd}/models/t --chat {home}/c.jinja"}),
            result("drafter", "draft_model", model=str(own), speedup=1.2, speedup_interval=[1.1, 1.3],
                   settings={"command": f"vllm serve {cwd}/models/t --model {own}"}, **drafted([3, 2, 1, 0], 4)),
            result("dead", "draft_model", void=f"it died (log: {here}/measure/logs/dead.log)")]  # fmt: skip
    write_jsonl(folder / "measure" / "results.jsonl", rows)
    page, text = report.build(folder), report_text.markdown(folder)
    for place in (here, cwd, home + "/", str(tmp_path), "/srv/data", socket.gethostname() + " "):
        assert place not in page, place
        assert place not in text, place
    shown = page.replace("&#34;", '"').replace("&#39;", "'")
    assert "vllm serve models/t --speculative-config" in shown
    assert '"model": "run/distill/drafter"' in shown
    assert "run_dir=run target=models/t x=p.jsonl" in shown
    assert "it died (log: run/measure/logs/dead.log)" in shown
    assert f"{cwd}/models/t" in report.verdict(folder)["serve"]["command"]


def test_long_outputs_and_many_mismatches_are_cut(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    lost = [{"id": f"{i:016x}", "repeat": 0, "position": i, "target_token": 1, "arm_token": 2,
             "why": "no tie" if i == 400 else "a tie in rounding"} for i in range(500)]  # fmt: skip
    rows = [result("target", "target"), result("drafter", "draft_model", speedup=1.2, speedup_interval=[1.1, 1.3],
            mismatches=lost, **drafted([3, 2, 1, 0], 4))]  # fmt: skip
    write_jsonl(folder / "measure" / "results.jsonl", rows)
    requests = read_jsonl(folder / "measure" / "requests.jsonl")
    write_jsonl(folder / "measure" / "requests.jsonl",
                [r | {"output_ids": r["output_ids"] * 3000} for r in requests])  # fmt: skip
    page = report.build(folder)
    assert len(page) < 600_000
    assert "more characters)" in page
    assert "And 488 more, in results.jsonl" in page
    assert f"{400:016x}" in page  # the one that is not explained is among those shown


def test_a_sweeps_page_shows_the_best_of_each_way_and_folds_the_rest(tmp_path: Path) -> None:
    folder = sample_sweep.write(tmp_path / "sweep")
    page = report.build(folder)
    Outline(page)
    found, sweep = report.verdict(folder), read_json(folder / "sweep.json")
    assert found["answer"] == "deploy"
    assert found["sentence"].startswith("Deploy the drafter with the schedule K = ")
    assert found["serve"] == sweep["serve"]
    assert page.count("<summary>All 12 arms; above: the fastest K of each</summary>") == 4
    tables = re.findall(r'<table class="measured">.*?</table>', page, re.DOTALL)
    brief = next(t for t in tables if ">result<" in t and "drafter-parallel-k" in t)
    assert brief.count('<th scope="row">') == 3  # the target, and each way of drafting at its fastest K
    grids = re.findall(r'<table class="measured grid">.*?</table>', page, re.DOTALL)
    assert [g.count("<tr>") for g in grids] == [5, 5]
    cell = next(c for c in sweep["surface"] if c["arm"] == "drafter-k3" and c["concurrency"] == 4)
    assert f"{cell['speedup']:.2f}x" in grids[0]


@pytest.mark.parametrize(
    ("drafter", "parallel", "told"),
    [
        ("runs/demo/drafter", False, "; but slower on humaneval (0.81x)."),
        ("runs/demo/drafter", True, ""),
        ("runs/other", False, ""),
    ],
)
def test_a_sweeps_verdict_says_where_the_same_drafter_loses(
    tmp_path: Path, drafter: str, parallel: bool, told: str
) -> None:
    """By what `measure` has of it on other prompts, drafting alike; another drafter's loss is not its own."""
    sweep = read_json(sample_sweep.write(tmp_path / "sweep") / "sweep.json")
    sweep |= {"drafter": drafter, "serve": sweep["serve"] | {"parallel_drafting": parallel}}
    said = sweep_page.sweep_verdict(judge(results()), sweep)["sentence"]
    assert said == sweep_page.sentence(sweep).removesuffix(".") + (told or ".")


def test_optional_fields_are_shown_where_they_are(tmp_path: Path) -> None:
    """A rate in place of concurrency, the target measured twice, losslessness at a temperature, bands of context, an arm of
    transformers."""
    hot = {"workload": "hot", "temperature": 0.7}
    good = {"speedup": 1.3, "speedup_interval": [1.2, 1.4], **drafted([320, 250, 190, 140], 400)}
    bands = [{"from": 0, "to": 256, "rounds": 30, "acceptance_length": 3.5},
             {"from": 256, "to": None, "rounds": 9, "acceptance_length": 2.25}]  # fmt: skip
    rows = [
        result("target", "target"),
        result("target-again", "target", speedup=0.987, speedup_interval=[0.97, 1.01]),
        result("drafter", "draft_model", **good) | {"acceptance_length_by_context": bands, "precision_reached": False,
         "precision": 0.03, "speedup_half_width": 0.05, "prefix_cache_hit_rate": 0.004},
        result("target", "target", **hot),
        result("drafter", "draft_model", **hot, **good)
        | {"losslessness": {"p": 0.0004, "tokens": 5120, "passed": False}, "exact_match": None},
    ]  # fmt: skip
    write_jsonl(tmp_path / "results.jsonl", rows)
    page = report.build(tmp_path)
    Outline(page)
    plain = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "how far its 0.99x lies from 1 is the noise of this machine" in plain
    assert "was not reached: drafter" in plain
    assert plain.count("Prefix cache hit rate: drafter 0.4 %.") == plain.count("Prefix cache") == 1
    assert "3.50 0 to 256, 30 rounds 2.25 256 and more, 9 rounds" in plain
    assert "drafter &lt; 0.001 5120 no: outputs differ" in plain
    assert cell_name({**hot, "concurrency": None, "rate": 2.5}) == "hot, temperature 0.7, 2.5 requests sent a second"


# ---------------------------------------------------------------- a drafter that also drafts in one pass


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("parallel") / "demo", parallel=True)


def tables(page: str) -> list[list[list[str]]]:
    """Every table of the page: its rows, each the texts of its cells."""
    found = re.findall(r"<table.*?</table>", page, re.DOTALL)
    cells = r"<t[hd][^>]*>(.*?)</t[hd]>"
    return [
        [[" ".join(re.sub(r"<[^>]*>", " ", c).split()) for c in re.findall(cells, row, re.DOTALL)]
         for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)]
        for table in found
    ]  # fmt: skip


def test_the_sample_of_one_pass_is_what_distill_writes() -> None:
    """Else the tests below would show a page that nobody gets."""
    scores = [PromptRounds("a", [np.array([[0, 0], [1, 0], [0, 1], [1, 0]], np.int8)])]
    real, made = compare_rounds(scores, scores, 2), with_one_pass(evaluation())["sets"]["orders"]["parallel"]
    assert real.keys() == made.keys()
    for part, longest in ((real["after"], 2), (made["after"], LONGEST)):
        assert list(part) == ["tau", "top1_by_offset", "survival", "mask_share"]
        assert list(part["tau"]) == [str(k) for k in range(1, longest + 1)]
        assert len(part["top1_by_offset"]) == len(part["survival"]) == longest
    assert real["after"].keys() == rounds_summary(scores).keys()


def test_both_ways_of_drafting_have_a_table(both_ways: Path, page: str) -> None:
    """One by one as ever, and in one pass τ, agreement and survival by hand from the sample's figures."""
    shown = report.build(both_ways)
    Outline(shown)
    found = tables(shown)
    one, other = (next(t for t in found if t[0][0] == head) for head in ("offline", "K"))
    assert ["trained", "0.797", "0.777 to 0.807", "1.80", "2.43", "2.92", "3.19"] in one
    assert other[1:] == [
        ["untrained", "trained"] * 3,
        ["1", "1.01", "1.76", "0.013", "0.795", "0.012", "0.760"],
        ["2", "1.01", "2.33", "0.004", "0.702", "0.001", "0.570"],
        ["3", "1.01", "2.76", "0.000", "0.617", "0.000", "0.430"],
        ["4", "1.01", "3.07", "0.000", "0.541", "0.000", "0.310"],
        ["5", "1.01", "3.26", "0.000", "0.463", "0.000", "0.190"],
        ["6, served", "1.01", "3.38 +2.21 to +2.51", "0.000", "0.398", "0.000", "0.120"],
    ]
    plain = " ".join(re.sub(r"<[^>]*>", " ", shown).split())
    assert "Drafts one by one" in plain
    assert "300 steps, 420,000 supervised tokens, 345,000 mask tokens" in plain
    for words in ("one pass", "one by one", "mask tokens"):
        assert words not in page  # of a drafter that drafts one by one alone


def test_dots_stand_beside_the_replay_of_their_own_way(both_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    draw = plots.offline_against_served

    def noted(title: str, *figures: Any) -> str | None:
        drawn[title] = figures
        return draw(title, *figures)

    monkeypatch.setattr(plots, "offline_against_served", noted)
    shown = report.build(both_ways)
    sets = with_one_pass(evaluation())["sets"]
    for name, s in sets.items():
        for title, figures in (("τ offline and served", s), ("τ offline and served in one pass", s["parallel"])):
            assert drawn[f"{title}, {name}"][:2] == (figures["before"]["tau"], figures["after"]["tau"])
    one, other = (drawn[f"τ offline and served{way}, orders"][2] for way in ("", " in one pass"))
    assert one == {"drafter": [(4, 3.25)], "untrained": [(4, pytest.approx(1.012))]}
    assert other == {"drafter-parallel": [(6, 3.375)]}
    svgs = {re.sub(r".*?aria-label=\"(.*?)\".*", r"\1", svg, flags=re.DOTALL): svg
            for svg in re.findall(r"<svg.*?</svg>", shown, re.DOTALL)}  # fmt: skip
    assert "served, drafter-parallel" not in svgs["τ offline and served, orders"]
    assert "served, drafter-parallel" in svgs["τ offline and served in one pass, orders"]
    assert {"τ at K = 4 on held-out text, by replay", "τ at K = 4 in one pass, by replay"} <= svgs.keys()


def test_a_change_in_one_pass_alone_is_a_change(both_ways: Path, tmp_path: Path) -> None:
    """D15: drafts one by one stayed as they were, those of one pass did not."""
    made = with_one_pass(evaluation())
    for s in made["sets"].values():
        s["change"] = {"top1": [0.0, -0.1, 0.1], "tau_4": [0.0, -0.1, 0.1]}
    write_json(tmp_path / "distill" / "evaluation.json", made)
    sentence = report.verdict(tmp_path)["sentence"]
    assert sentence.startswith(
        "Not measurable: nothing was served; offline on orders, replay gives τ = 3.19 at K = 4, and 3.38"
    )
    assert "no measurable change" not in sentence
    for s in made["sets"].values():
        s["parallel"]["change"] = [0.0, -0.1, 0.1]
    write_json(tmp_path / "distill" / "evaluation.json", made)
    assert report.verdict(tmp_path)["sentence"].endswith("training made no measurable change.")


def test_training_that_ended_before_its_evaluation_has_its_curves(both_ways: Path, tmp_path: Path) -> None:
    """And a round of fewer than 4 drafts is drawn at its longest."""
    metrics = read_jsonl(both_ways / "distill" / "metrics.jsonl")
    for row in metrics:
        if "parallel" in row:
            row["parallel"]["tau"] = {"1": 1.5, "2": None}
    write_jsonl(tmp_path / "metrics.jsonl", metrics)
    page = report.build(tmp_path)
    assert "τ at K = 4 on held-out text, by replay" in page
    assert "in one pass, by replay" not in page  # known of no K that is drawn
    for row in metrics:
        if "parallel" in row:
            row["parallel"]["tau"]["2"] = 1.75
    write_jsonl(tmp_path / "metrics.jsonl", metrics)
    assert "τ at K = 2 in one pass, by replay" in report.build(tmp_path)


def test_commands_name_no_folder_of_this_machine() -> None:
    assert report_run.command(["/a/repo/recipes/run.py", "a b"]) == "python recipes/run.py 'a b'"


def test_a_tau_that_replay_could_not_give_is_left_out(run_dir: Path, tmp_path: Path) -> None:
    """As of drafts that are drawn, on answers drawn at 0.7: no τ in metrics.jsonl and evaluation.json, and no change of it."""
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    none = {str(k): None for k in range(1, 9)}
    metrics = [m | ({"tau": none} if "tau" in m else {}) for m in read_jsonl(folder / "distill" / "metrics.jsonl")]
    write_jsonl(folder / "distill" / "metrics.jsonl", metrics)
    evaluation = read_json(folder / "distill" / "evaluation.json")
    for one in evaluation["sets"].values():
        one["before"]["tau"] = one["after"]["tau"] = none
        one["change"]["tau_4"] = [None, None, None]
    write_json(folder / "distill" / "evaluation.json", evaluation)
    page = report.build(folder)
    assert "τ at K = 4 on held-out text" not in page
    assert "τ offline and served" not in page
    assert "+0.761 to +0.806" in re.sub(r"<[^>]*>", "", page)  # top-1 agreement is known still
    (folder / "measure" / "results.jsonl").unlink()
    assert report.verdict(folder)["sentence"] == "Not measurable: nothing was served."
