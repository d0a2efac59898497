"""Tables, with the paper's own numbers put in as if they had been measured."""

import os
import random
import re
import shutil
from collections import Counter
from dataclasses import replace
from itertools import product
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from reporting_runs import DEMO, PAPERS_RUN, PRINTED, PUBLISHED, ROOT, in_print

from reproduction.config import parse_config
from reproduction.reporting.frame import table_results
from reproduction.reporting.grid import Box, Row, marks
from reproduction.reporting.tables import LAYOUTS, lay_out
from reproduction.reporting.verdict import read_errata
from reproduction.reporting.writing import (
    compile_document,
    escape_tex,
    to_html,
    to_markdown,
    to_rows,
    to_tex,
)
from reproduction.reporting.writing import write_document as document_of
from statecut.errors import InputError


@pytest.fixture(scope="module")
def paper():
    """The paper's rows alone: one draw, and no recovered model that nothing was cut from."""
    recovery = PAPERS_RUN.recovery.model_copy(update={"control": False})
    return PAPERS_RUN.model_copy(update={"seeds": (42,), "recovery": recovery})


@pytest.fixture(scope="module")
def grids(paper):
    names = dict.fromkeys(printed.table for printed in PRINTED)
    return {
        name: lay_out(paper, name, table_results(paper, name, in_print(paper, name)))
        for name in names
    }


def numbers(grid):
    """Every number of a table, by its row and column."""
    for i, row in enumerate(grid.rows):
        column = 0
        for box in row.boxes:
            if box.key:
                yield i, column, box
            column += box.span


def invented(config, table, seeds=()):
    """Numbers for every cell of a table, the same ones every time."""
    draw, known = random.Random(table), {"protocol": "demo", "source": "x", "reason": ""}
    return [
        result._replace(seed=seed, value=draw.uniform(20, 60), stderr=1.0, **known)
        for result in table_results(config, table, [])
        for seed in (seeds or (result.seed,))
    ]


# --- the paper's tables ---


def value(text):
    """A number of a .csv as it was: units and powers of ten undone."""
    number, unit = re.fullmatch(r"([\d.]+(?:e\d+)?)(M|×|GiB|)", text).groups()
    return float(number) * (1e6 if unit == "M" else 1)


def test_every_number_of_the_paper_comes_back_from_its_table(grids):
    assert len(grids) == 16
    shown = Counter()
    for name, grid in grids.items():
        rows = to_rows(grid)
        assert len({len(row) for row in rows}) == 1
        for line, column, box in numbers(grid):
            assert box.key
            number = value(rows[1 + line][column])
            if grid.kind == "model_speed" and box.key.metric == "tokens_per_s":
                number = round(number * 1000)
            shown[name, box.key, number] += 1
    expected = Counter((printed.table, printed.key, printed.value) for printed in PRINTED)
    assert expected.total() == 2497
    # One number of its table has two decimals in the paper; all have one here.
    [(table, key, two_decimals)] = (expected - shown).elements()
    assert (table, key.method, key.target) == ("ablation_kq_targets", "l1", "k")
    assert two_decimals == 29.75
    assert list((shown - expected).elements()) == [(table, key, 29.8)]


def test_marks_differ_from_the_paper_exactly_where_the_errata_say(grids):
    computed = {
        (name, box.key): box.mark for name, grid in grids.items() for _, _, box in numbers(grid)
    }
    differing = sorted(
        (
            printed.table,
            printed.key,
            printed.mark or "none",
            computed[printed.table, printed.key] or "none",
        )
        for printed in PRINTED
        if printed.mark != computed[printed.table, printed.key]
    )
    errata = [
        erratum for erratum in read_errata(PUBLISHED / "errata.csv") if erratum.kind == "mark"
    ]
    assert differing == sorted(
        (erratum.table, erratum.key, erratum.printed, erratum.follows) for erratum in errata
    )
    # M7 is inside rounding: the printed means and the paper's marks agree.
    assert {erratum.id for erratum in errata} == {f"M{i}" for i in range(1, 12)} - {"M7"}
    groups = {(table, key._replace(method="")) for (table, key), mark in computed.items() if mark}
    assert len(groups) == 160


# --- marks ---


@given(st.dictionaries(st.integers(), st.integers(0, 4).map(float), min_size=1), st.booleans())
def test_marks_go_by_value_and_ties_share_them(values, lower):
    marked = marks(values, lower=lower)
    for name, own in values.items():
        better = {other for other in values.values() if (other < own if lower else other > own)}
        mark = {0: "best", 1: "second"}.get(len(better), "")
        unmarked = own == 0 or len({*values.values()}) == 1
        assert marked.get(name, "") == ("" if unmarked else mark)


def test_marks_come_from_unrounded_numbers(paper):
    name = "pre_rft_50_gated_only"
    results = [
        result._replace(value={"grad": 31.44, "drrqr": 31.36}.get(result.key.method, result.value))
        for result in in_print(paper, name)
    ]
    grid = lay_out(paper, name, table_results(paper, name, results))
    shown = {
        box.key.method: (box.text, box.mark)
        for _, _, box in numbers(grid)
        if box.key and (box.key.model, box.key.metric) == ("gated_deltanet_370M", "lambada_ppl")
    }
    assert shown["grad"] == ("31.4", "second")
    assert shown["drrqr"] == ("31.4", "best")


# --- what a run adds ---


def test_a_missing_cell_is_a_dash_and_reasons_and_notes_stand_below():
    results = invented(DEMO, "by_model")
    why = "out of memory & 100 % sure"
    gone = results[3]._replace(value=None, stderr=None, source="", reason=why)
    noted = results[4]._replace(note="piqa: data at v2")
    grid = lay_out(DEMO, "by_model", [*results[:3], gone, noted, *results[5:]])
    assert [box.key for _, _, box in numbers(grid) if box.notes] == [gone.key, noted.key]
    assert grid.notes[-1] == ("b", "piqa: data at v2")
    [(line, column, box)] = [number for number in numbers(grid) if number[2].key == gone.key]
    assert (box.text, box.mark, box.notes) == ("–", "", ("a",))
    written = to_tex(grid)
    assert r"--\textsuperscript{a}" in written
    assert r"\textsuperscript{a}~out of memory \& 100 \% sure" in written
    assert to_rows(grid)[1 + line][column] == f"– ({why})"
    assert "<sup>a</sup> out of memory &amp; 100 % sure" in to_html(grid)


def test_numbers_of_another_protocol_say_so():
    results = invented(DEMO, "by_model")
    note = "protocol demo, not the paper's"
    assert ("", note) in lay_out(DEMO, "by_model", results).notes
    mixed = [*results[:-1], results[-1]._replace(protocol="paper")]
    assert ("", f"in part {note}") in lay_out(DEMO, "by_model", mixed).notes


# --- languages ---


def test_cuts_with_eps_kept_and_matched_stand_side_by_side():
    both = lay_out(DEMO, "small_eps", table_results(DEMO, "small_eps", []))
    assert [box.text for box in both.heads[0].boxes[4:]] == [
        "Sliced, eps kept", "Sliced, eps matched", "Refitted, eps kept", "Refitted, eps matched",
    ]  # fmt: skip
    shown = [(box.key.rft, box.key.eps) for box in both.rows[0].boxes if box.key]
    assert shown == [*product(("pre", "refit"), ("kept", "matched"))]


def test_tables_are_whole_in_every_language(grids):
    own = [lay_out(DEMO, name, invented(DEMO, name)) for name in DEMO.tables]
    assert {grid.kind for grid in own} == {*LAYOUTS}
    for grid in [*own, *grids.values()]:
        wide = sum(grid.groups)
        root = ElementTree.fromstring(to_html(grid))
        for row in root.iter("tr"):
            assert sum(int(cell.get("colspan", "1")) for cell in row) == wide
        for line in (*grid.heads, *grid.rows):
            assert sum(box.span for box in line.boxes) == wide
        written = to_tex(grid)
        marked = Counter(box.mark for _, _, box in numbers(grid))
        for mark, command, tag in (
            ("best", r"\textbf{", "strong"),
            ("second", r"\underline{", "u"),
        ):
            assert written.count(command) == len(list(root.iter(tag))) == marked[mark]
        assert written.isascii()
        shown = [line for line in to_markdown(grid).splitlines() if line.startswith("|")]
        assert {line.count("|") for line in shown} == {wide + 1}
        assert len(shown) == 2 + len(grid.rows)
        assert sum(line.count("**") for line in shown) == 2 * marked["best"]


def test_a_bar_in_a_label_ends_no_cell_of_markdown(grids):
    head, line = Row((Box("x"),)), Row((Box("a|b"),))
    grid = replace(next(iter(grids.values())), groups=(1,), heads=(head,), rows=(line,))
    assert r"| a\|b |" in to_markdown(grid)


def test_ratios_stand_across_and_several_models_down():
    data = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text())
    data["tables"]["by_ratio"] |= {"models": ["delta_net", "gated_deltanet"], "methods": ["l1"]}
    run = parse_config(data, "a test")
    head, one, baseline, recovered, other, *_ = to_rows(
        lay_out(run, "by_ratio", invented(run, "by_ratio"))
    )
    labels = [run.models[name].label for name in ("delta_net", "gated_deltanet")]
    assert [one[0], other[0]] == labels
    assert [row[1] for row in (one, baseline, recovered)] == [
        "L1", "Baseline", "Baseline, recovered",
    ]  # fmt: skip
    assert [text.split()[0] for text in head[2:]] == ["75%"] * 3 + ["50%"] * 3


def test_latex_takes_no_text_for_a_command():
    assert escape_tex(r"50 % of a_b & {c} \d ~ ^ # $") == (
        r"50 \% of a\_b \& \{c\} \textbackslash{}d \textasciitilde{} \textasciicircum{} \# \$"
    )


needs_latex = pytest.mark.skipif(
    shutil.which("pdflatex") is None and not os.environ.get("CI"),
    reason="pdflatex is not installed (texlive-latex-base, texlive-latex-recommended)",
)


@needs_latex
def test_all_tables_and_figures_compile_to_one_pdf(grids, tmp_path):
    from PIL import Image

    Image.new("RGB", (40, 30), "navy").save(tmp_path / "picture.png")
    own = [lay_out(DEMO, name, invented(DEMO, name, (0, 1))) for name in DEMO.tables]
    tables = []
    for grid in [*grids.values(), *own]:
        tables.append(tmp_path / "tables" / f"{grid.name}.tex")
        tables[-1].parent.mkdir(exist_ok=True)
        tables[-1].write_text(to_tex(grid))
    figure = DEMO.figures["filters"].model_copy(update={"caption": "With 50 % & more_of it."})
    config = DEMO.model_copy(update={"figures": {"p": figure}})
    document = tmp_path / "document.tex"
    document_of(config, tables, [tmp_path / "picture.png"], document)
    for name in ("a", "b"):
        compile_document(document, tmp_path / f"{name}.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.pdf", "b.pdf", "document.tex", "picture.png", "tables"}


@needs_latex
def test_a_document_that_does_not_compile_says_where(tmp_path):
    (tmp_path / "document.tex").write_text(r"\documentclass{article}\begin{document}\nonsense")
    with pytest.raises(InputError, match="Undefined control sequence"):
        compile_document(tmp_path / "document.tex", tmp_path / "a.pdf")
    assert not (tmp_path / "a.pdf").exists()


# --- what numbers rest on ---


def test_a_table_says_of_how_many_trainings_draws_and_recoveries_it_is():
    data = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text())
    data["models"]["delta_net"]["source"]["trainings"] = 3
    data["seeds"], data["recovery"]["seeds"] = [0, 1], [0]
    data["tables"]["refit_recovered"] |= {"columns": {"pre": ["ppl"], "post": ["ppl"]}}
    data["tables"]["several"] = {**data["tables"]["refit_recovered"], "trainings": 3}

    def lines(name, drawn="drrqr"):
        data["tables"][name]["methods"] = [drawn]
        run = parse_config(data, "a test")
        rows = to_rows(lay_out(run, name, invented(run, name)))
        assert len({len(row) for row in rows}) == 1
        return [row[0] for row in rows if "training" in row[0]]

    drawn = "2 draws of channels or text, 1 recovery; ± one standard deviation over"
    assert lines("several") == [f"3 trainings, of each {drawn} trainings"]
    assert lines("refit_recovered") == [f"1 training, {drawn} seeds"]
    assert lines("refit_recovered", "l1") == ["1 training, 1 recovery"]  # the weights alone choose
    assert lines("small") == []  # the run does not train its models


# --- the form of a kind ---


@pytest.mark.parametrize(
    ("table", "part", "content", "says"),
    [
        ("by_ratio", "columns", {"pre": ["ppl"], "post": ["ppl"]}, "one of columns, not 2"),
        ("by_model", "ratios", [0.5, 0.75], "one of ratios, not 2"),
        ("targets", "columns", {"pre": ["ppl"], "post": ["ppl"]}, "one of columns, not 2"),
        ("breakdown", "kind", "sharing", "sharing has no methods"),
    ],
)
def test_a_table_without_a_place_for_its_cells_is_refused(table, part, content, says):
    data = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text())
    name = next(name for name, spec in data["tables"].items() if spec["kind"] == table)
    data["tables"][name][part] = content
    with pytest.raises(InputError, match=says):
        parse_config(data, "a test")
