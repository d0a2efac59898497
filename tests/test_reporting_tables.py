"""Tables, with the paper's own numbers put in as if they had been measured."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from reporting_runs import in_print

from reproduction.config import Config, load_config, parse_config
from reproduction.reporting.frame import (
    Key,
    Printed,
    Result,
    from_frame,
    read_published,
    table_frame,
    to_frame,
)
from reproduction.reporting.grid import Box, Grid, Row, format_spread, marks, scientific_if_large
from reproduction.reporting.tables import TIMING_TABLES, VARIANT_TABLES, lay_out
from reproduction.reporting.verdict import read_errata
from reproduction.reporting.writing import (
    compile_document,
    escape_tex,
    to_html,
    to_rows,
    to_tex,
    write_document,
)
from statecut.errors import InputError

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "workflow" / "templates"
PUBLISHED = ROOT / "config" / "published"


@pytest.fixture(scope="module")
def paper() -> Config:
    """The paper's rows alone: one draw, and no recovered model that nothing was cut from."""
    config = load_config(ROOT / "config" / "paper.yaml")
    assert config.recovery
    recovery = config.recovery.model_copy(update={"control": False})
    return config.model_copy(update={"seeds": (42,), "recovery": recovery})


@pytest.fixture(scope="module")
def demo() -> Config:
    return load_config(ROOT / "config" / "demo.yaml")


@pytest.fixture(scope="module")
def published() -> list[Printed]:
    return read_published(PUBLISHED / "values.csv")


@pytest.fixture(scope="module")
def grids(paper: Config, published: list[Printed]) -> dict[str, Grid]:
    names = dict.fromkeys(printed.table for printed in published)
    return {
        name: lay_out(paper, name, table_frame(paper, name, in_print(paper, name, published)))
        for name in names
    }


def numbers(grid: Grid) -> Iterator[tuple[int, int, Box]]:
    """Every number of a table, by its row and column."""
    for i, row in enumerate(grid.rows):
        column = 0
        for box in row.boxes:
            if box.key:
                yield i, column, box
            column += box.span


def invented(config: Config, table: str, seeds: tuple[int, ...] = ()) -> list[Result]:
    """Numbers for every cell of a table, the same ones every time."""
    draw = random.Random(table)
    frame = table_frame(config, table, [])
    return [
        result._replace(
            seed=seed,
            value=draw.uniform(20, 60),
            stderr=1.0,
            protocol="demo",
            source="x",
            reason="",
        )
        for result in from_frame(frame)
        for seed in (seeds or (result.seed,))
    ]


# --- the paper's tables ---


def value(text: str) -> float:
    """A number of a .csv as it was: units and powers of ten undone."""
    number, unit = re.fullmatch(r"([\d.]+(?:e\d+)?)(M|×|GiB|)", text).groups()  # type: ignore[union-attr]
    return float(number) * (1e6 if unit == "M" else 1)


def test_passes_timed_as_graphs_have_columns_of_their_own(demo: Config) -> None:
    table = demo.tables["model_speed"]
    graphs = demo.benchmarks[table.benchmark].model_copy(update={"graph": True})  # type: ignore[union-attr]
    config = demo.model_copy(update={"benchmarks": {**demo.benchmarks, table.benchmark: graphs}})  # type: ignore[union-attr]
    grid = lay_out(config, "model_speed", table_frame(config, "model_speed", []))
    models = len(graphs.models)  # type: ignore[union-attr]
    assert [box.text for box in grid.heads[1].boxes][1:] == [
        "k tok/s ↑", "Speedup ↑", "CUDA graph ↑", "Speedup ↑"
    ] * models  # fmt: skip
    metrics = [box.key.metric for _, _, box in numbers(grid) if box.key][:4]
    assert metrics == ["tokens_per_s", "speedup", "graph_tokens_per_s", "graph_speedup"]


def test_every_number_of_the_paper_comes_back_from_its_table(
    grids: dict[str, Grid], published: list[Printed]
) -> None:
    assert len(grids) == 16
    shown: Counter[tuple[str, Key, float]] = Counter()
    for name, grid in grids.items():
        rows = to_rows(grid)
        assert len({len(row) for row in rows}) == 1
        for line, column, box in numbers(grid):
            assert box.key
            number = value(rows[1 + line][column])
            if grid.kind == "model_speed" and box.key.metric == "tokens_per_s":
                number = round(number * 1000)
            shown[name, box.key, number] += 1
    expected = Counter((printed.table, printed.key, printed.value) for printed in published)
    assert expected.total() == 2497
    # One number of its table has two decimals in the paper; all have one here.
    [(table, key, two_decimals)] = (expected - shown).elements()
    assert (table, key.method, key.target, two_decimals) == (
        "ablation_kq_targets",
        "l1",
        "k",
        29.75,
    )
    assert list((shown - expected).elements()) == [(table, key, 29.8)]


@pytest.mark.parametrize(
    ("table", "method", "metric", "texts"),
    [
        ("zs-dn-370M", "s_wanda", "zero_shot_avg", {"30.0", "40.8", "35.1"}),
        ("zs-dn-370M", "l1", "lambada_ppl", {"9661610.6", "146.7"}),
        ("adv_vs_non_adv", "pca_proper", "wikitext_word_ppl", {"3.3e5", "184.48", "155.76"}),
        ("mixer_scaling", "", "tokens_per_s", {"10.8M", "12.2M"}),
        ("mixer_scaling", "", "peak_memory_gib", {"4.57GiB", "3.70GiB"}),
        ("mixer_scaling", "baseline", "speedup", {"1.00×"}),
        ("speedup_whole_model", "", "tokens_per_s", {"469.0", "91.7"}),
    ],
)
def test_numbers_have_the_form_of_the_paper(
    grids: dict[str, Grid], table: str, method: str, metric: str, texts: set[str]
) -> None:
    boxes = [box for _, _, box in numbers(grids[table])]
    shown = {b.text for b in boxes if b.key and (b.key.method, b.key.metric) == (method, metric)}
    assert texts <= shown


@pytest.mark.parametrize(
    ("value", "spread", "expected"),
    [(151_672.0, 7_282.67, "0.07e5"), (243.84, 2.47, "2.47"), (12_345.0, 9_999.0, "1.00e4")],
)
def test_a_spread_has_the_power_of_its_number(value: float, spread: float, expected: str) -> None:
    assert format_spread(scientific_if_large(value), spread, scientific_if_large) == expected


def test_marks_differ_from_the_paper_exactly_where_the_errata_say(
    grids: dict[str, Grid], published: list[Printed]
) -> None:
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
        for printed in published
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


def test_rows_and_columns_are_the_papers(grids: dict[str, Grid]) -> None:
    shapes = {name: (len(grid.rows), sum(grid.groups)) for name, grid in grids.items()}
    assert shapes == {
        "full_results_gdn_13B_paper": (6, 17),
        "pre_rft_50_gated_only": (6, 5),
        "mixer_scaling": (6, 6),
        "shared-non-shared-comp-full": (3, 10),
        "adv_vs_non_adv": (7, 4),
        "ablation_kq_targets": (5, 13),
        "speedup_whole_model": (4, 11),
        "unified_summary_50": (24, 9),
        **dict.fromkeys(("zs-dn-370M", "zs-dn-13B", "zs-gdn-370M", "zs-gdn-13B"), (41, 12)),
        **dict.fromkeys(
            ("recall-dn-370M", "recall-dn-13B", "recall-gdn-370M", "recall-gdn-13B"), (21, 9)
        ),
    }
    first = [line.boxes[0].text for line in grids["full_results_gdn_13B_paper"].rows]
    assert first == ["Rand", "L1", "S-Wanda", "Grad", "DRRQR", "Baseline"]
    names = to_rows(grids["zs-dn-370M"])[0]
    assert names[:5] == ["RFT", "Method", "Compr.", "Wiki ppl ↓", "LMB ppl ↓"]
    assert names[5:] == [
        *("ARC-e acc_n ↑", "ARC-c acc_n ↑", "Hella acc_n ↑", "Wino acc ↑", "PIQA acc_n ↑"),
        *("LMB acc ↑", "Avg ↑"),
    ]


# --- marks ---


@given(st.dictionaries(st.integers(), st.integers(0, 4).map(float), min_size=2), st.booleans())
def test_marks_go_by_value_and_ties_share_them(values: dict[int, float], lower: bool) -> None:
    marked = marks(values, lower=lower)
    for name, own in values.items():
        better = {other for other in values.values() if (other < own if lower else other > own)}
        mark = {0: "best", 1: "second"}.get(len(better), "")
        unmarked = own == 0 or len({*values.values()}) == 1
        assert marked.get(name, "") == ("" if unmarked else mark)


def test_one_value_alone_equal_values_and_zeros_are_not_marked() -> None:
    assert marks({"grad": 1.0}, lower=True) == {}
    assert marks({"grad": 1.0, "l1": 1.0}, lower=True) == {}
    assert marks({"grad": 1.0, "l1": 0.0, "rand": 0.0}, lower=False) == {"grad": "best"}


def test_marks_come_from_unrounded_numbers(paper: Config, published: list[Printed]) -> None:
    name = "pre_rft_50_gated_only"
    results = [
        result._replace(value={"grad": 31.44, "drrqr": 31.36}.get(result.key.method, result.value))
        for result in in_print(paper, name, published)
    ]
    grid = lay_out(paper, name, table_frame(paper, name, results))
    shown = {
        box.key.method: (box.text, box.mark)
        for _, _, box in numbers(grid)
        if box.key and (box.key.model, box.key.metric) == ("gated_deltanet_370M", "lambada_ppl")
    }
    assert shown["grad"] == ("31.4", "second")
    assert shown["drrqr"] == ("31.4", "best")


# --- what a run adds ---


def test_seeds_are_printed_as_mean_and_spread(demo: Config) -> None:
    results = [
        result._replace(value=30.0 + result.seed + (result.key.method == "rand"))
        for result in invented(demo, "by_model", (0, 2))
    ]
    grid = lay_out(demo, "by_model", to_frame(results))
    assert {box.text for _, _, box in numbers(grid)} == {"31.0 ± 1.4", "32.0 ± 1.4"}
    assert ("", "± one standard deviation over seeds") in grid.notes
    # So the paper's number, which has no spread, in its place.
    assert {box.form(31.04) for _, _, box in numbers(grid)} == {"31.0"}
    assert r"\textbf{31.0 $\pm$ 1.4}" in to_tex(grid, TEMPLATES)


def test_a_missing_cell_is_a_dash_with_its_reason(demo: Config) -> None:
    results = invented(demo, "by_model")
    why = "out of memory & 100 % sure"
    gone = results[3]._replace(value=None, stderr=None, source="", reason=why)
    grid = lay_out(demo, "by_model", to_frame([*results[:3], gone, *results[4:]]))
    [(line, column, box)] = [number for number in numbers(grid) if number[2].key == gone.key]
    assert (box.text, box.mark, box.notes) == ("–", "", ("a",))
    written = to_tex(grid, TEMPLATES)
    assert r"--\textsuperscript{a}" in written
    assert r"\textsuperscript{a}~out of memory \& 100 \% sure" in written
    assert to_rows(grid)[1 + line][column] == f"– ({why})"
    assert "<sup>a</sup> out of memory &amp; 100 % sure" in to_html(grid, TEMPLATES)


def test_a_number_of_other_data_has_its_note_below_the_table(demo: Config) -> None:
    results = invented(demo, "by_model")
    noted = results[3]._replace(note="piqa: data at v2")
    grid = lay_out(demo, "by_model", to_frame([*results[:3], noted, *results[4:]]))
    assert [box.key for _, _, box in numbers(grid) if box.notes] == [noted.key]
    assert grid.notes[-1] == ("a", "piqa: data at v2")
    assert r"\textsuperscript{a}~piqa: data at v2" in to_tex(grid, TEMPLATES)


def test_a_table_of_nothing_is_dashes(demo: Config) -> None:
    for name in demo.tables:
        grid = lay_out(demo, name, table_frame(demo, name, []))
        assert {box.text for _, _, box in numbers(grid)} == {"–"}
        assert {text.split(": ")[-1] for _, text in grid.notes} == {"not measured"}


def test_rows_of_another_protocol_say_so(demo: Config) -> None:
    results = invented(demo, "by_model")
    grid = lay_out(demo, "by_model", to_frame(results))
    assert grid.notes == (("", "protocol demo, not the paper's"),)
    mixed = [
        result if result.key.method == "grad" else result._replace(protocol="paper")
        for result in results
    ]
    grid = lay_out(demo, "by_model", to_frame(mixed))
    assert grid.notes == (("a", "protocol demo, not the paper's"),)
    noted = [line.boxes[0].text for line in grid.rows if line.boxes[0].notes]
    assert noted == ["Grad"]


def test_published_and_measured_numbers_never_share_a_table(
    paper: Config, published: list[Printed]
) -> None:
    results = in_print(paper, "pre_rft_50_gated_only", published)
    mixed = [results[0]._replace(source="results/x.json"), *results[1:]]
    with pytest.raises(InputError, match="may not share"):
        lay_out(paper, "pre_rft_50_gated_only", to_frame(mixed))


def test_a_frame_of_another_table_is_refused(demo: Config) -> None:
    with pytest.raises(InputError, match="no row for"):
        lay_out(demo, "summary", table_frame(demo, "by_model", []))


def test_the_recovered_baseline_has_a_row_of_its_own(demo: Config) -> None:
    grid = lay_out(demo, "summary", to_frame(invented(demo, "summary")))
    controls = [line for line in grid.rows if line.boxes[1].text == "Baseline, recovered"]
    assert len(controls) == 2
    for line in controls:
        assert {box.key.rft for box in line.boxes if box.key} == {"post"}


# --- languages ---


def test_stages_stand_side_by_side_with_the_state_that_is_left(demo: Config) -> None:
    grid = lay_out(demo, "small", table_frame(demo, "small", []))
    assert [box.text for box in grid.heads[0].boxes[4:]] == ["Sliced", "Refitted"]
    labels = [tuple(box.text for box in row.boxes[1:4]) for row in grid.rows[:9]]
    methods = ("L1", "Rand", "DRRQR", "Fisher")
    assert labels == [
        *(("75%", "48", method) for method in methods),
        *(("50%", "96", method) for method in methods),
        ("0%", "192", "Baseline"),
    ]
    stages = [box.key.rft for box in grid.rows[0].boxes if box.key]
    assert stages == ["pre", "refit"]
    both = lay_out(demo, "small_eps", table_frame(demo, "small_eps", []))
    assert [box.text for box in both.heads[0].boxes[4:]] == [
        "Sliced, eps kept", "Sliced, eps matched", "Refitted, eps kept", "Refitted, eps matched",
    ]  # fmt: skip
    shown = [(box.key.rft, box.key.eps) for box in both.rows[0].boxes if box.key]
    assert shown == [*product(("pre", "refit"), ("kept", "matched"))]


def test_tables_are_whole_in_every_language(demo: Config, grids: dict[str, Grid]) -> None:
    own = [lay_out(demo, name, to_frame(invented(demo, name))) for name in demo.tables]
    assert {grid.kind for grid in own} == {*VARIANT_TABLES, *TIMING_TABLES}
    for grid in [*own, *grids.values()]:
        wide = sum(grid.groups)
        root = ElementTree.fromstring(to_html(grid, TEMPLATES))
        for row in root.iter("tr"):
            assert sum(int(cell.get("colspan", "1")) for cell in row) == wide
        cells = [cell.get("data-cell") for cell in root.iter("td") if cell.get("data-cell")]
        assert len(cells) == sum(1 for _ in numbers(grid))
        for line in (*grid.heads, *grid.rows):
            assert sum(box.span for box in line.boxes) == wide
        written = to_tex(grid, TEMPLATES)
        marked = Counter(box.mark for _, _, box in numbers(grid))
        for mark, command, tag in (
            ("best", r"\textbf{", "strong"),
            ("second", r"\underline{", "u"),
        ):
            assert written.count(command) == len(list(root.iter(tag))) == marked[mark]
        assert written.isascii()


def test_latex_takes_no_text_for_a_command() -> None:
    assert escape_tex(r"50 % of a_b & {c} \d ~ ^ # $") == (
        r"50 \% of a\_b \& \{c\} \textbackslash{}d \textasciitilde{} \textasciicircum{} \# \$"
    )


def test_a_heading_keeps_the_gap_behind_its_columns() -> None:
    wide, narrow = Row((Box("a"), Box("b", 2), Box("c", 2))), Row((*map(Box, "defgh"),))
    written = to_tex(Grid("t", "sharing", "", (1, 2, 2), (wide, narrow), (), ()), TEMPLATES)
    assert written.split("\\toprule\n")[0].endswith(
        "\\begin{tabular}{l@{\\hskip 1.2em}cc@{\\hskip 1.2em}cc}\n"
    )
    assert written.split("\\toprule\n")[1].split("\n")[:4] == [
        r"a & \multicolumn{2}{c@{\hskip 1.2em}}{b} & \multicolumn{2}{c}{c} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}",
        r"d & e & f & g & h \\",
        r"\midrule",
    ]


needs_latex = pytest.mark.skipif(
    shutil.which("pdflatex") is None and not os.environ.get("CI"),
    reason="pdflatex is not installed (texlive-latex-base, texlive-latex-recommended)",
)


@needs_latex
def test_all_tables_and_figures_compile_to_one_pdf(
    demo: Config, grids: dict[str, Grid], tmp_path: Path
) -> None:
    from PIL import Image

    Image.new("RGB", (40, 30), "navy").save(tmp_path / "picture.png")
    own = [lay_out(demo, name, to_frame(invented(demo, name, (0, 1)))) for name in demo.tables]
    tables = []
    for grid in [*grids.values(), *own]:
        tables.append(tmp_path / "tables" / f"{grid.name}.tex")
        tables[-1].parent.mkdir(exist_ok=True)
        tables[-1].write_text(to_tex(grid, TEMPLATES))
    figure = demo.figures["filters"].model_copy(update={"caption": "With 50 % & more_of it."})
    config = demo.model_copy(update={"figures": {"p": figure}})
    document = tmp_path / "document.tex"
    write_document(config, tables, [tmp_path / "picture.png"], document, TEMPLATES)
    compile_document(document, tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.pdf", "document.tex", "picture.png", "tables"}


@needs_latex
def test_a_document_compiles_to_the_same_bytes(demo: Config, tmp_path: Path) -> None:
    config = demo.model_copy(update={"figures": {}})
    write_document(config, [], [], tmp_path / "document.tex", TEMPLATES)
    pdf, contents = tmp_path / "a.pdf", set()
    for _ in range(2):
        compile_document(tmp_path / "document.tex", pdf)
        contents.add(pdf.read_bytes())
    assert len(contents) == 1


@needs_latex
def test_a_document_that_does_not_compile_says_where(tmp_path: Path) -> None:
    (tmp_path / "document.tex").write_text(r"\documentclass{article}\begin{document}\nonsense")
    with pytest.raises(InputError, match="Undefined control sequence"):
        compile_document(tmp_path / "document.tex", tmp_path / "a.pdf")
    assert not (tmp_path / "a.pdf").exists()


def test_without_latex_the_document_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="texlive-latex-base"):
        compile_document(tmp_path / "document.tex", tmp_path / "a.pdf")


# --- the form of a kind ---


@pytest.mark.parametrize(
    ("table", "part", "content", "says"),
    [
        ("by_ratio", "models", ["delta_net", "gated_deltanet"], "one of models, not 2"),
        ("by_model", "ratios", [0.5, 0.75], "one of ratios, not 2"),
        ("targets", "columns", {"pre": ["ppl"], "post": ["ppl"]}, "one of columns, not 2"),
        ("breakdown", "kind", "sharing", "sharing has no methods"),
    ],
)
def test_a_table_without_a_place_for_its_cells_is_refused(
    table: str, part: str, content: object, says: str
) -> None:
    data = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text())
    name = next(name for name, spec in data["tables"].items() if spec["kind"] == table)
    data["tables"][name][part] = content
    with pytest.raises(InputError, match=says):
        parse_config(data, "a test")
