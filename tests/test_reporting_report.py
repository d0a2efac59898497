"""The report: one page with everything in it, and every number with where it came from."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import escape
from reporting_runs import DEMO, VERSIONS, record, report_inputs

from reproduction.cli import main
from reproduction.reporting.claims import Answered, Comparison, read_claims
from reproduction.reporting.curves import draw_curves, read_curve
from reproduction.reporting.frame import (
    Cell,
    Draws,
    Key,
    Result,
    make_union,
    read_results,
    variant_key,
)
from reproduction.reporting.grid import Box
from reproduction.reporting.heat import (
    against_baseline,
    against_paper,
    format_change,
    reference,
    shade_of,
)
from reproduction.reporting.jobs import result_records, summarize_jobs, used_and_asked
from reproduction.reporting.report import Numbers, group_claims, inline, write_report
from reproduction.reporting.verdict import CLAIMS, Judgement
from reproduction.running.paths import PROVENANCE
from statecut.files import read_json, write_json

KEY = Key("delta_net", "none", "grad", "kq", 0.5, None, "pre", "prose_word_ppl")
CLAIM = read_claims(CLAIMS)[0]
FALSE = (Comparison(KEY, "", False, False, False),)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return report_inputs(DEMO, tmp_path_factory.mktemp("run"), drawn=False)


@pytest.fixture(scope="module")
def page(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report(DEMO, **inputs, out=out)
    return out.read_text()


def test_a_run_without_tables_has_a_report_too(tmp_path):
    config = DEMO.model_copy(update={"tables": {}, "figures": {"sweep": DEMO.figures["sweep"]}})
    inputs = report_inputs(config, tmp_path, drawn=False)
    make_union(inputs["frames"], tmp_path / "results.parquet")
    write_report(config, **inputs, out=tmp_path / "report.html")


class Elements(HTMLParser):
    """The start tags of a page, and the text inside each script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and data.strip():
            self.scripts.append(data)


def data_of(page):
    return json.loads(Elements(page).scripts[0])


def test_nothing_is_loaded_from_elsewhere_and_links_lead_somewhere(page):
    elements = Elements(page)
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in elements.tags:
        for name in ("src", "href", "xlink:href", "action", "poster"):
            target = attributes.get(name) or "data:"
            assert target.startswith("data:") or target[1:] in ids, target
        assert attributes.get("aria-labelledby") in (None, *ids)
    assert not re.search(r"@import|url\((?!#)", page)
    assert "fetch(" not in elements.scripts[1]


def test_every_number_of_every_table_has_where_it_came_from(inputs, page):
    data = data_of(page)
    buttons = [b for tag, b in Elements(page).tags if tag == "button" and "data-cell" in b]
    assert {int(b["data-cell"]) for b in buttons} == set(range(len(data["numbers"])))
    shown = [(Key(*key), draw) for key, _, draws in data["numbers"] for draw in draws]
    results = [result for frame in inputs["frames"] for result in read_results(frame)]
    for (key, draw), r in zip(shown, results, strict=True):
        assert key == r.key
        assert draw[:5] == [f"Seed {r.seed}", r.value, r.stderr, r.reason, r.source]
    evaluated = next(r.source for r in results if r.key.method == "grad")
    assert data["sources"][evaluated] == {
        "model": read_json(evaluated)["model"],
        "device": ["NVIDIA H200"],
        "started": "2026-01-31T23:00:00Z",
        "commit": "0123456789ab",
        "versions": [f"{name} {version}" for name, version in sorted(VERSIONS.items())],
    }
    timed = next(r.source for r in results if r.key.model.endswith("mixer"))
    assert data["sources"][timed]["device"] == "NVIDIA H100 80GB HBM3"


def test_a_number_has_the_draws_of_its_own_cell_alone():
    draws = [Result(KEY, seed, 30.0 + seed) for seed in range(3)]
    numbers = Numbers(DEMO, {})
    shown = [numbers.add(of_table, {})[KEY] for of_table in (draws, draws[:1])]
    assert [len(numbers.numbers[place][2]) for place in shown] == [3, 1]


def test_a_pruned_models_number_has_the_steps_that_made_it(inputs, page):
    data = data_of(page)
    made = {variant_key(DEMO, v, ""): [*map(str, p)] for v, p in inputs["steps"].items()}
    shown = {Key(*key)._replace(metric=""): draws[0][5] for key, _, draws in data["numbers"]}
    variants = made.keys() & shown.keys()
    assert {key.method for key in variants} == {*DEMO.methods}
    for key in variants:
        assert data["steps"][shown[key]] == made[key]


def test_the_page_says_what_colours_are_held_to(inputs, page, tmp_path):
    assert "Nothing here compares with the paper’s numbers, only with what it claims." in page
    assert "Cuts of this run match eps, and the paper’s do not." in page
    assert "protocol demo" not in page
    assert "not than the paper’s; a difference within the noise has none" in page
    assert "<h3>The same, asked of Hybrid</h3>" in page
    assert re.search(r"of 24 claims measured", page)
    assert len(page) < 500_000
    evaluation = DEMO.evaluation.model_copy(update={"protocol": "paper"})
    config = DEMO.model_copy(update={"evaluation": evaluation, "eps": "kept"})
    inputs = report_inputs(config, tmp_path, drawn=False)
    write_report(config, **inputs, out=tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "The paper has no such table: held to its own unpruned model." in text


def test_the_page_begins_with_what_the_run_is_and_its_figure_of_states(page):
    header, main = page[page.index("<header>") :].split("<nav")
    assert str(escape(DEMO.about)) in header
    assert [*re.findall(r'<figure id="__figure-(\w+)"', header)] == ["state"]
    others = re.findall(r'<figure id="__figure-(\w+)"', main)
    assert {*others} == {*DEMO.figures} - {"state"}


def test_claims_stand_by_what_they_are_about_and_measured_ones_first(page):
    claims = [
        Answered(CLAIM.model_copy(update={"id": id, "about": about}), comparisons)
        for id, about, comparisons in [
            ("a", "speed", ()), ("b", "cost", ()), ("c", "cost", FALSE), ("d", "choice", FALSE),
        ]
    ]  # fmt: skip
    groups = {about: [c.claim.id for c in group] for about, group in group_claims(claims).items()}
    assert list(groups.items()) == [("cost", ["c", "b"]), ("choice", ["d"]), ("speed", ["a"])]
    headings = re.findall("<h3>(.*)</h3>", page[: page.index('<section id="__tables">')])
    assert headings[:2] == ["Which methods are best", "What pruning costs"]
    assert re.search(r'<p class="measured">\d+ of \d+ comparisons true', page)
    # One seed decides nothing for good, and a claim says so where it is listed.
    assert "✓</span> holds</span>, by fewer than 3 draws</summary>" in page
    assert re.search(r"\d+ hold.*; \d+ of them by fewer than three draws</small>", page, re.DOTALL)


# --- heat ---

CELL = Cell(30.0, None, None, 1, frozenset({"demo"}), "")


@pytest.mark.parametrize(
    ("metric", "ratio", "expected"),
    [
        ("prose_word_ppl", 1.009, ""),
        ("prose_word_ppl", 1.02, "worse-1"),
        ("prose_word_ppl", 0.85, "better-3"),
        ("choice_acc_norm", 1.02, "better-1"),
        ("choice_acc_norm", 0.5, "worse-4"),
        ("training_tokens_per_s", 1.5, "better-4"),
        ("training_peak_memory_gib", 0.95, "better-2"),
        ("decoding_state_mib", 1.05, "worse-2"),
    ],
)
def test_a_shade_says_which_way_and_how_far(metric, ratio, expected):
    assert shade_of(DEMO, metric, 7 * ratio, 7.0) == expected


def test_inside_the_tolerance_there_is_no_colour():
    line = Judgement("t", KEY, 33.0, 30.0, 3.0, 3.0, 3, "reproduced", "", "N1: 30 -> 31")
    look = against_paper(DEMO, line, "30.0")
    assert (look.shade, look.change, look.outside, look.errata) == ("", "+3", False, "N1: 30 -> 31")
    beyond = against_paper(DEMO, line._replace(tolerance=2.0, word="differs"), "30.0")
    assert (beyond.shade, beyond.outside) == ("worse-3", True)


def test_noise_has_no_colour():
    base = KEY._replace(method="baseline", target="", compression=0.0, rft="none")

    def shade(value, **noise):
        cells = {base: replace(CELL, **noise), KEY: replace(CELL, value=value, **noise)}
        return against_baseline(DEMO, KEY, cells, dict.fromkeys(cells, Box("30.0"))).shade

    assert shade(33.0) == "worse-3"
    assert shade(33.0, spread=1.0) == "worse-3"  # 2 sqrt(1 + 1) is 2.8
    assert shade(33.0, spread=1.1) == ""
    assert shade(33.0, stderr=1.1) == ""
    # Numbers of the same documents go up and down together.
    draws = Draws("d", (28.0, 30.0, 32.0))
    assert shade(33.0, stderr=1.1, draws=draws) == "worse-3"


def test_a_number_is_held_to_its_own_unpruned_model():
    base = KEY._replace(method="baseline", target="", compression=0.0, rft="none")
    shared, other = base._replace(model="s", conv_sharing="head"), base._replace(model="other")
    cells = dict.fromkeys([other, base, shared, KEY], CELL)
    assert reference(KEY, cells) == base
    assert reference(KEY._replace(rft="post"), cells) == base
    assert reference(base, cells) is None
    assert reference(shared, cells) == other  # the first with separate filters
    assert reference(KEY._replace(model="unknown"), cells) is None


def test_changes_are_percents_or_multiples():
    shown = [format_change(ratio) for ratio in (1.0, 1.052, 0.5, 12.34, 4510.0)]
    assert shown == ["+0.0 %", "+5.2 %", "-50.0 %", "×12.3", "×4,510"]


def test_a_picture_has_ids_of_its_own():
    svg = (
        '<?xml version="1.0"?><svg width="9pt"><metadata>x</metadata><defs>'
        '<style type="text/css">*{stroke: red}</style><path id="m1"/></defs>'
        '<use xlink:href="#m1"/><g clip-path="url(#m1)" gid="m1"/></svg>'
    )
    inlined = inline(svg, "p", 'says "<this>"')
    assert inlined.startswith(
        '<svg role="img" aria-label="says &#34;&lt;this&gt;&#34;" width="9pt">'
    )
    assert '<path id="p-m1"/>' in inlined
    assert '<use xlink:href="#p-m1"/><g clip-path="url(#p-m1)" gid="m1"/>' in inlined
    assert "metadata" not in inlined
    assert "stroke" not in inlined


# --- work and training ---


def test_gpu_hours_are_those_of_the_gpus_that_jobs_had():
    jobs = [("evaluate", 10.0, ("H200", "H200"), {"peak_mib": 512}),
            ("evaluate", 30.0, ("H200",), {"gpu_share": 0.5, "peak_mib": 400}),
            ("score", 5.0, (), {})]  # fmt: skip
    records = [
        {**record(rule, seconds, gpus), "started": f"2026-01-0{3 - i}", **more}
        for i, (rule, seconds, gpus, more) in enumerate(jobs)
    ]
    work = summarize_jobs(records)
    score, evaluate = work["rules"]  # as they first ran
    assert (score.name, score.jobs, score.seconds, score.gpu_seconds) == ("score", 1, 5.0, 0)
    assert (evaluate.jobs, evaluate.seconds, evaluate.longest) == (2, 40.0, 30.0)
    assert (evaluate.gpu_seconds, evaluate.where) == (35.0, ["node1", "H200"])
    assert (evaluate.peak_mib, score.peak_mib) == (512, 0)
    assert (work["all"].jobs, work["all"].gpu_seconds) == (3, 35.0)
    assert (work["started"], work["ended"]) == ("2026-01-01", "2026-01-03T00:00:10Z")
    assert work["commits"] == {"0123456789ab": 3}


def test_what_jobs_took_stands_next_to_what_they_asked_for_by_rule_and_model():
    sliced = {"wildcards": {"model": "small"}, "peak_mib": 1000, "asked": {"mem_mb": 16000}}
    asked = {"asked": {"mem_mb": 32000, "runtime": 240}}
    evaluated = {"wildcards": {"subject": "sliced/small/l1-kq-0.5-0", "suite": "ppl"}, **asked}
    timed = {"wildcards": {"benchmark": "speed", "measured": "small-13-64x64-forward"}}
    records = [
        {**record("slice", 9.0), **sliced},
        {**record("evaluate", 20.0), **evaluated, "peak_mib": 2000},
        {**record("evaluate", 10.0), **evaluated, "gpu_peak_mib": 4000},
        {**record("measure", 3.0), **timed},
        record("tokens", 2.0),
    ]
    assert used_and_asked(records)[1:] == [
        ["slice", "small", "1", "9", "9", "", "1.0", "16.0", ""],
        ["evaluate", "small ppl", "2", "15", "20", "14,400", "2.1", "32.0", "4.2"],
        ["measure", "small-13 speed", "1", "3", "3", "", "", "", ""],
        ["tokens", "", "1", "2", "2", "", "", "", ""],
    ]


def test_records_that_come_and_go_meanwhile_are_left_out(tmp_path):
    made, shown = (tmp_path / f"{name}{PROVENANCE}" for name in ("models/a", "tables/t.tex"))
    write_json(made, record("pretrain", 9.0))
    write_json(shown, {"rule": "table"})
    half = tmp_path / f".document.tex{PROVENANCE}.a1b2c3d4" / f"document.tex{PROVENANCE}"
    half.parent.mkdir()
    half.write_text('{"ru')
    # Listed, and no longer there once it is read.
    (tmp_path / f"document.pdf{PROVENANCE}").symlink_to("gone")
    assert result_records(tmp_path) == {made: record("pretrain", 9.0)}


def test_a_curve_is_drawn_by_means_and_without_skipped_steps(tmp_path):
    rows = [f"{i},{i * 10},,{'nan' if i == 7 else i % 2},,," for i in range(1000)]
    (tmp_path / "loss.csv").write_text("\n".join(["step,tokens,loss,ce,kd,lr,grad_norm", *rows]))
    curve = read_curve(tmp_path / "loss.csv")
    assert curve.shape == (100, 2)
    np.testing.assert_allclose(curve[2:, 1], 0.5, atol=0.1)


def test_curves_are_of_what_was_trained(inputs):
    curves = inputs["curves"]
    figures = draw_curves(DEMO, curves)
    assert set(figures) == {"pretraining", "recovery"}
    for name in ("DRRQR", "DRRQR, refitted"):
        assert f">{name}</text>" in figures["recovery"]
    only = {variant: path for variant, path in curves.items() if variant.rft == "none"}
    svg = draw_curves(DEMO, only)["pretraining"]
    for variant in only:
        assert f">{DEMO.models[variant.model].label}</text>" in svg
    assert draw_curves(DEMO, {}) == {}
    other = {replace(v, eps="kept"): path for v, path in curves.items() if v.pruned}
    assert draw_curves(DEMO, {**curves, **other}) == figures


def test_jobs_of_a_run_are_printed_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "rehearsal"
    folder.mkdir(parents=True)
    assert main(["jobs", "rehersal"]) == 2
    assert "results/rehersal; did you mean 'rehearsal'?" in capsys.readouterr().err
    write_json(folder / f"page{PROVENANCE}", {**record("page", 9.0), "peak_mib": 1000})
    assert main(["jobs", "rehearsal"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["page", "1", "9", "9", "1.0"]
