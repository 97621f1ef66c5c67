"""The report in a real browser: nothing fetched, nothing complained about, everything seen, on desk and phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.report import write_report
from tests import chromium, sample_run

WIDTHS = (1280, 800, 390, 320)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = sample_run.write(tmp_path_factory.mktemp("runs") / "demo")
    write_report(run_dir)
    return run_dir / "report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Tab]:
    with chromium.tab(tmp_path_factory.mktemp("profile")) as one:
        yield one


def test_the_page_asks_for_nothing_and_complains_about_nothing(page: Path, tab: chromium.Tab) -> None:
    """The sample's prompts and outputs carry a script and an image with a handler: neither runs, neither is fetched."""
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(page, 1280)
    assert tab.requests == [page.resolve().as_uri()]
    assert tab.complaints == []
    assert tab.evaluate("document.title") == "Deploy: A drafter for SmolLM2-135M-Instruct"
    assert tab.evaluate("document.scripts.length") == 0


def test_a_page_that_fetches_and_fails_is_caught(tmp_path: Path, tab: chromium.Tab) -> None:
    """The two checks above can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('no'); nothing.at.all</script>")
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(bad, 1280)
    assert "http://127.0.0.1:9/x.png" in tab.requests
    assert len(tab.complaints) >= 2


@pytest.mark.parametrize("width", WIDTHS)
def test_no_sideways_scroll_and_every_plot_is_seen(page: Path, tab: chromium.Tab, width: int) -> None:
    tab.open(page, width)
    wide, seen = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= seen, f"{wide - seen} px too wide"
    boxes = tab.evaluate(
        "[...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
        " s.getBoundingClientRect().height, s.querySelectorAll('text').length, s.getBoundingClientRect().right])"
    )
    assert len(boxes) == 11
    for plot_width, height, texts, right in boxes:
        assert plot_width > 250
        assert height > 80
        assert texts > 5
        assert right <= seen


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
