"""The report in a real browser: nothing fetched, nothing complained about, everything seen, on desk and phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.report import main, write_report
from tests import chromium, sample_run, sample_sweep

WIDTHS = (1280, 800, 390, 360, 320)
PAGES = ("run", "parallel", "sweep", "compare", "kept")
KEPT = Path(__file__).parents[2] / "docs" / "example-report.html"  # the one that the README points to
PLOTS = {"run": 16, "parallel": 16 + 3, "sweep": 4 + 4 * 6 + 1, "compare": 1}
# A page's folds are opened before it is looked at: what is inside must be as good.
OPEN = (
    "document.querySelectorAll('details').forEach(d => { d.open = true }); document.querySelectorAll('details').length"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run's page, that of a drafter trained both ways, a sweep's of both at K from 1 to 6, of two runs compared, and the one
    kept in docs/."""
    folder = tmp_path_factory.mktemp("runs")
    before, demo = sample_run.write(folder / "before"), sample_run.write(folder / "demo")
    both_ways = sample_run.write(folder / "parallel", parallel=True)
    write_report(both_ways)
    sweep = sample_sweep.write(folder / "sweep")
    write_report(demo)
    write_report(sweep)
    assert main([str(before), str(demo)]) == 0
    return {
        "run": demo / "report.html",
        "parallel": both_ways / "report.html",
        "sweep": sweep / "report.html",
        "compare": demo / "compare.html",
        "kept": KEPT,
    }


@pytest.fixture(scope="module")
def page(pages: dict[str, Path]) -> Path:
    return pages["run"]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Tab]:
    with chromium.tab(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_ask_for_nothing_and_complain_about_nothing(
    pages: dict[str, Path], tab: chromium.Tab, name: str
) -> None:
    """The sample's prompts and outputs carry a script and an image with a handler: neither runs, neither is fetched."""
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(pages[name], 1280)
    assert tab.requests == [pages[name].resolve().as_uri()]
    assert tab.complaints == []
    assert tab.evaluate("document.scripts.length") == 0
    assert pages[name].stat().st_size < 1_500_000


def test_the_title_is_the_verdict(page: Path, tab: chromium.Tab) -> None:
    tab.open(page, 1280)
    assert tab.evaluate("document.title") == "Deploy: A drafter for SmolLM2-135M-Instruct"


def test_a_page_that_fetches_and_fails_is_caught(tmp_path: Path, tab: chromium.Tab) -> None:
    """The two checks above can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('no'); nothing.at.all</script>")
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(bad, 1280)
    assert "http://127.0.0.1:9/x.png" in tab.requests
    assert len(tab.complaints) >= 2


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_sideways_scroll_and_every_plot_is_seen(
    pages: dict[str, Path], tab: chromium.Tab, width: int, name: str
) -> None:
    tab.open(pages[name], width)
    tab.evaluate(OPEN)
    wide, seen = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= seen, f"{wide - seen} px too wide"
    boxes = tab.evaluate(
        "[...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
        " s.getBoundingClientRect().height, s.querySelectorAll('text').length, s.getBoundingClientRect().right])"
    )
    assert len(boxes) == PLOTS.get(name, pages[name].read_text(encoding="utf-8").count("<figure>")) > 0
    for plot_width, height, texts, right in boxes:
        assert plot_width > 250
        assert height > 80
        assert texts > 5
        assert right <= seen


@pytest.mark.parametrize("name", PAGES)
def test_printed_nothing_is_cut(pages: dict[str, Path], tab: chromium.Tab, name: str) -> None:
    """A4 less its margins is 718 px wide; a printed table cannot be scrolled, and nobody can open a fold."""
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        tab.open(pages[name], 718)
        over = tab.evaluate(
            "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 719)"
            ".map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 40))"
        )
        assert over == []
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        cut = tab.evaluate(
            "[...document.querySelectorAll('figure')].filter(f => getComputedStyle(f).breakInside !== 'avoid').length"
        )
        assert cut == 0
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("name", PAGES)
def test_labels_of_a_plot_do_not_lie_on_each_other(pages: dict[str, Path], tab: chromium.Tab, name: str) -> None:
    tab.open(pages[name], 1280)
    tab.evaluate(OPEN)
    clashes = tab.evaluate(
        "(() => { const bad = []; for (const s of document.querySelectorAll('figure svg')) {"
        " const boxes = [...s.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);"
        " boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {"
        "  const w = Math.min(p.right, q.right) - Math.max(p.left, q.left);"
        "  const h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);"
        "  if (w > 3 && h > 5) bad.push(s.getAttribute('aria-label') + ': ' + a + ' / ' + b) })) } return bad })()"
    )
    assert clashes == []


def test_text_in_plots_stays_readable_on_a_phone(page: Path, tab: chromium.Tab) -> None:
    """The smallest text of the plots is at least 9 px high there, ascenders to descenders."""
    tab.open(page, 390)
    smallest = tab.evaluate(
        "Math.min(...[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height))"
    )
    assert smallest >= 9


def test_the_verdict_is_seen_without_scrolling(page: Path, tab: chromium.Tab) -> None:
    for width, height in ((1280, 720), (390, 800)):
        tab.open(page, width, height)
        assert tab.evaluate("document.querySelector('.verdict').getBoundingClientRect().bottom") < height


def test_ids_are_unique_or_the_same_drawing(page: Path, tab: chromium.Tab) -> None:
    """Two plots may share a marker's id where the marker is the same; two different things must not."""
    tab.open(page, 1280)
    clashing = tab.evaluate(
        "(() => { const seen = {}, bad = []; for (const e of document.querySelectorAll('[id]'))"
        " { if (e.id in seen && seen[e.id] !== e.outerHTML) bad.push(e.id); seen[e.id] = e.outerHTML; } return bad })()"
    )
    assert clashing == []
