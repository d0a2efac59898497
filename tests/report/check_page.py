"""The report in a real browser. Run by `make test-report`, and not among the other tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, find_chromium
from reporting_runs import ROOT, report_inputs

from reproduction.config import load_config
from reproduction.reporting.report import write_report

CHROMIUM = find_chromium() or pytest.exit(
    "Chromium is not installed; on Debian: apt-get install chromium", 1
)
# Where pictures of the page are kept, if they are wanted.
PICTURES = os.environ.get("PICTURES")
OPEN = "document.querySelector('dialog').open"


@pytest.fixture(scope="module", params=["demo", "paper"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of invented numbers: one held to itself, and one held to the paper."""
    config = load_config(ROOT / "config" / f"{request.param}.yaml")
    folder = tmp_path_factory.mktemp(request.param)
    out = folder / f"{request.param}.html"
    write_report(config, **report_inputs(config, folder, drawn=True), out=out)
    return out


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Browser]:
    with Browser(CHROMIUM) as browser:
        browser.resize(1200, 900)
        browser.medium()
        browser.open(page)
        yield browser


def picture(browser: Browser, page: Path, name: str, *, whole: bool = True) -> None:
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(PICTURES) / f"{page.stem}-{name}.png", whole=whole)


def of_kind(browser: Browser, *methods: str) -> list[dict[str, Any]]:
    return [event["params"] for event in browser.events if event.get("method") in methods]


def test_a_click_on_a_number_shows_where_it_came_from(browser: Browser, page: Path) -> None:
    browser.run("document.querySelector('td.heat button').click()")
    assert browser.run(OPEN)
    shown = browser.run("document.querySelector('dialog').innerText")
    for part in ("Seed", "Checkpoint", "Selection", "Calibration seed", "Commit", "NVIDIA H200"):
        assert part in shown, part
    browser.run("document.querySelector('dialog summary').click()")
    provenance = browser.run("document.querySelector('dialog details[open] pre').textContent")
    assert '"suite"' in provenance
    picture(browser, page, "origin", whole=False)
    browser.press("Escape")
    assert not browser.run(OPEN)


def test_the_keyboard_does_it_too(browser: Browser) -> None:
    browser.run("document.querySelector('td.heat button').focus()")
    first = browser.run("document.activeElement.dataset.cell")
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    assert browser.run("document.activeElement.matches('td.heat button')")
    assert browser.run("document.activeElement.dataset.cell") != first
    browser.press("Enter")
    assert browser.run(OPEN)
    assert browser.run("document.querySelector('dialog').contains(document.activeElement)")
    browser.press("Escape")
    assert not browser.run(OPEN)
    tables = browser.run("document.querySelectorAll('table.results').length")
    stops = "document.querySelectorAll('td.heat button[tabindex=\"0\"]').length"
    assert browser.run(stops) == tables


def test_numbers_can_be_exchanged_for_differences(browser: Browser) -> None:
    text = "document.querySelector('td.heat').innerText"
    ours = browser.run(text)
    browser.run("document.querySelector('input[value=change]').click()")
    assert browser.run(text) != ours
    browser.run("document.querySelector('input[value=ours]').click()")
    assert browser.run(text) == ours


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390, 320])
def test_the_page_fits_and_can_be_read(
    browser: Browser, page: Path, scheme: str, width: int
) -> None:
    browser.resize(width, 850)
    browser.medium(scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth") <= width
    picture(browser, page, f"{scheme}-{width}")
    assert browser.run(HINTED)
    assert browser.run(FILLED)
    lowest = browser.run(CONTRAST)
    assert lowest[0] >= 4.5, lowest
    browser.run("document.querySelector('td.heat button').click()")
    right = browser.run("document.querySelector('dialog').getBoundingClientRect().right")
    assert right <= width
    picture(browser, page, f"{scheme}-{width}-origin", whole=False)
    browser.press("Escape")


# Whether what is wider than the page, and nothing else, has a hint above it.
HINTED = """
[...document.querySelectorAll(".wide")].every((part) =>
  (part.scrollWidth > part.clientWidth)
    === getComputedStyle(part, "::before").content.includes("scroll"))
"""
# Whether figures of several panels fill the width of the page, at least.
FILLED = """
[...document.querySelectorAll(".broad svg")].every((svg) =>
  svg.getBoundingClientRect().width >= document.querySelector("section").clientWidth - 1)
"""

# The lowest contrast (WCAG 2) of all text that is seen, with the text: its colour on those of all
# elements behind it, one over the other.
CONTRAST = """
(() => {
  const parts = (colour) => {
    const numbers = colour.match(/[\\d.]+/g).map(Number);
    return [numbers.slice(0, 3), numbers[3] ?? 1];
  };
  const light = (rgb) => rgb.map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const [rgb, alpha] = parts(getComputedStyle(element).backgroundColor);
    if (alpha === 0) return behind(element.parentElement);
    const below = alpha < 1 ? behind(element.parentElement) : rgb;
    return rgb.map((c, i) => alpha * c + (1 - alpha) * below[i]);
  };
  let lowest = [99, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("svg, script, dialog")) continue;
    if (!element.checkVisibility()) continue;
    const [a, b] = [light(parts(getComputedStyle(element).color)[0]), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < lowest[0]) lowest = [contrast, walker.currentNode.data];
  }
  return lowest;
})()
"""


def test_it_can_be_printed(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.resize(720, 1000)  # the width of a sheet
    browser.medium(scheme="dark", medium="print")
    assert browser.run("document.documentElement.scrollWidth") <= 720
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    for hidden in ("nav", "fieldset", "dialog"):
        assert (
            browser.run(f"getComputedStyle(document.querySelector('{hidden}')).display") == "none"
        )
    browser.medium()
    browser.print((Path(PICTURES) if PICTURES else tmp_path) / f"{page.stem}.pdf")


def test_nothing_was_requested_and_nothing_went_wrong(browser: Browser, page: Path) -> None:
    """Of all that was done to the page before."""
    urls = [event["request"]["url"] for event in of_kind(browser, "Network.requestWillBeSent")]
    assert [url for url in urls if not url.startswith("data:")] == [page.resolve().as_uri()]
    wrong = of_kind(
        browser, "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"
    )
    assert not wrong
