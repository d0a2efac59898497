"""The report in a real browser. Run by `make test-report`, and not among the other tests.

Chromium opens a page that holds the report in a frame of some width, runs a script in it, and
prints what that leaves.
"""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from reporting_runs import ROOT, report_inputs

from reproduction.config import load_config
from reproduction.reporting.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None) or pytest.exit(
    "Chromium is not installed; on Debian: apt-get install chromium", 1
)
FRAME = """<!DOCTYPE html><style>body {{ margin: 0 }} iframe {{ border: 0 }}</style>
<iframe src="report.html" width="{width}" height="850"></iframe><script>
const frame = document.querySelector("iframe"), errors = [];
frame.addEventListener("load", () => {{
  const {{ document, getComputedStyle, NodeFilter }} = frame.contentWindow;
  const all = (selector) => [...document.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);
  frame.contentWindow.onerror = (message) => {{ errors.push(message); }};
  const requests = frame.contentWindow.performance.getEntriesByType("resource");
  const result = (() => {{ {script} }})();
  const text = JSON.stringify({{ result, errors, requests: requests.length }});
  const shown = window.document.createElement("pre");
  shown.textContent = text;
  window.document.body.replaceChildren(shown);
}});</script>"""


@pytest.fixture(scope="module", params=["demo", "paper"])
def folder(request, tmp_path_factory):
    """A report of invented numbers: one held to itself, and one held to the paper."""
    config = load_config(ROOT / "config" / f"{request.param}.yaml")
    folder = tmp_path_factory.mktemp(request.param)
    write_report(config, **report_inputs(config, folder, drawn=True), out=folder / "report.html")
    return folder


def chromium(folder, *arguments):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command = [CHROMIUM, *flags, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def run(folder, script, *, width=1200, dark=False):
    """What a script returns in the report, in which nothing may be loaded or go wrong."""
    (folder / "frame.html").write_text(FRAME.format(script=script, width=width))
    scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    access, budget = "--allow-file-access-from-files", "--virtual-time-budget=20000"
    page = (folder / "frame.html").as_uri()
    shown = chromium(folder, access, budget, scheme, "--dump-dom", page)
    left = json.loads(unescape(re.search("<pre>(.*)</pre>", shown, re.DOTALL)[1]))
    assert (left["errors"], left["requests"]) == ([], 0)
    return left["result"]


def test_a_click_on_a_number_shows_where_it_came_from(folder):
    script = """
        one("td.heat button").click();
        return [one("dialog").open, one("dialog").innerText];"""
    opened, shown = run(folder, script)
    assert opened
    for part in ("Seed", "Model digest", "Made in steps", "Commit", "NVIDIA H200", "torch 2.13.0"):
        assert part in shown, part


@pytest.mark.parametrize("folder", ["demo"], indirect=True)
def test_a_cut_to_widths_of_keys_and_values_is_no_timing(folder):
    script = """
        const {numbers} = JSON.parse(one("#__data").textContent);
        const place = numbers.findIndex(([key]) => key[9]);
        one(`button[data-cell="${place}"]`).click();
        return one("dialog").innerText;"""
    shown = run(folder, script)
    assert "d_k 16, d_v 64" in shown
    assert "standard error over documents" in shown


def test_numbers_can_be_exchanged_for_differences(folder):
    script = """
        return ["ours", "change", "ours"].map((name) => {
          one(`input[value=${name}]`).click();
          return one("td.heat").innerText;
        });"""
    ours, change, again = run(folder, script)
    assert ours == again != change


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390, 320])
def test_the_page_fits_and_can_be_read(folder, dark, width):
    wide, hinted, filled, right, background, (contrast, text) = run(
        folder, FITS + CONTRAST, width=width, dark=dark
    )
    assert wide <= width
    assert hinted
    assert filled
    assert right <= width
    assert (background == "rgb(255, 255, 255)") is not dark
    assert contrast >= 4.5, text


FITS = """
// Whether what is wider than the page, and nothing else, has a hint above it.
const hinted = all(".wide").every((part) => (part.scrollWidth > part.clientWidth)
  === getComputedStyle(part, "::before").content.includes("scroll"));
// Whether figures of several panels fill the width of the page, at least.
const filled = all(".broad svg").every((svg) =>
  svg.getBoundingClientRect().width >= one("section").clientWidth - 1);
const wide = document.documentElement.scrollWidth;
one("td.heat button").click();
const right = one("dialog").getBoundingClientRect().right;
one("dialog").close();
const background = getComputedStyle(document.body).backgroundColor;
"""
# The lowest contrast (WCAG 2) of all text that is seen, with the text: its colour on those of all
# elements behind it, one over the other.
CONTRAST = """
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
return [wide, hinted, filled, right, background, lowest];
"""


def test_it_can_be_printed(folder):
    chromium(folder, f"--print-to-pdf={folder}/report.pdf", (folder / "report.html").as_uri())
    assert (folder / "report.pdf").read_bytes().startswith(b"%PDF")
