"""Figures: what is drawn is what was measured, the same bytes every time, readable for everyone."""

import itertools

import numpy as np
import pytest
from reporting_runs import DEMO, figure_sources

from reproduction.analysis.rank import RankAnalysis
from reproduction.reporting.figures import draw
from reproduction.reporting.figures.filters import pixels
from reproduction.reporting.figures.quality import Panel, draw_quality, draw_state, in_rows
from reproduction.reporting.figures.rank import draw_spectrum, draw_utilization
from reproduction.reporting.figures.sweep import draw_sweep
from reproduction.reporting.frame import read_frame, read_results, write_results
from reproduction.reporting.style import INK, KERNELS, drawing
from statecut.files import read_json, write_json
from statecut.pruning.methods import METHODS


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {name: figure_sources(DEMO, name, folder) for name in DEMO.figures}


@pytest.mark.parametrize("name", [*DEMO.figures])
def test_every_kind_of_figure_is_drawn_the_same_each_time(sources, name, tmp_path):
    for run in ("a", "b"):
        draw(DEMO, name, sources[name], [tmp_path / f"{run}.svg", tmp_path / f"{run}.pdf"])
    for ending in ("svg", "pdf"):
        first = (tmp_path / f"a.{ending}").read_bytes()
        assert first == (tmp_path / f"b.{ending}").read_bytes()
    svg = (tmp_path / "a.svg").read_text()
    assert INK not in svg
    assert "currentColor" in svg
    assert "<text" in svg  # letters, no outlines
    assert "<dc:date>" not in svg
    assert len(svg) < 120_000


def test_bars_of_a_spectrum_count_the_singular_values_of_a_state(sources):
    with drawing():
        figure = draw_spectrum(DEMO, "spectrum", sources["spectrum"])
    widths = [32, 8, 8, 8, 8]  # baseline, then two methods before and after recovery
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Baseline", "DRRQR", "DRRQR, recovered", "Grad", "Grad, recovered",
    ]  # fmt: skip
    for axes, d in zip(figure.axes, widths, strict=True):
        bars = axes.patches[0].get_data().values
        below = [float(t.get_text().split()[1]) for t in axes.texts if "below" in t.get_text()]
        assert bars.sum() + sum(below) == pytest.approx(d, abs=0.06)


def test_a_curve_of_utilization_is_the_mean_over_layers_and_heads(sources):
    with drawing():
        figure = draw_utilization(DEMO, "utilization", sources["utilization"])
    curves = figure.axes[0].lines
    assert len(curves) == len(DEMO.analyses("utilization")) == 4
    for curve, path in zip(curves, sources["utilization"], strict=True):
        analysis = RankAnalysis.load(path)
        expected = analysis.effective_rank.mean((0, 1)) / analysis.capacity
        np.testing.assert_allclose(curve.get_ydata(), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["utilization", "spectrum"])
def test_a_partial_run_draws_what_is_there_and_names_the_rest(sources, name, tmp_path):
    some = [None, *sources[name][1:]]
    draw(DEMO.model_copy(update={"partial": "no time"}), name, some, [tmp_path / "x.svg"])
    svg = (tmp_path / "x.svg").read_text()
    assert "not measured: Baseline (1 of 1 seeds)<" in svg
    assert svg.count("Baseline") == 1


def test_pixels_stand_by_layer_and_tap_down_and_by_head_and_channel_across():
    w = np.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4)
    image = pixels(w)
    for layer, head, channel, tap in itertools.product(*map(range, w.shape)):
        assert image[layer * 4 + tap, head * 5 + channel] == w[layer, head, channel, tap]


def test_a_width_without_a_number_is_a_cross(sources, tmp_path):
    record = read_json(sources["sweep"][0])
    record["results"]["tokens_per_s"] = {"value": None, "stderr": None, "reason": "crashes"}
    write_json(tmp_path / "failed.json", record)
    with drawing():
        figure = draw_sweep(DEMO, "sweep", [tmp_path / "failed.json", *sources["sweep"][1:]])
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[record["cell"]["width"]]]


def test_curves_of_quality_are_the_cells_of_their_table(sources):
    with drawing():
        figure = draw_quality(DEMO, "quality", sources["quality"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "DeltaNet\nsliced",
        "DeltaNet\nrecovered",
    ]
    frame = read_frame(sources["quality"][0]).query("metric == 'prose_word_ppl'")
    whole = frame.query("method == 'baseline'").set_index("rft")["value"]
    for axes, stage, start in zip(figure.axes, ("pre", "post"), ("none", "post"), strict=True):
        assert [*axes.lines[0].get_ydata()] == [whole["none"]] * 2
        assert axes.get_ylim()[1] <= 4.001 * whole["none"]
        for curve in axes.containers:
            method = next(n for n, m in DEMO.methods.items() if m.label == curve.get_label())
            rows = frame[frame["method"].eq(method) & frame["rft"].eq(stage)]
            rows = rows.sort_values("compression")
            assert [*curve.lines[0].get_xdata()] == [0, *(100 * rows["compression"])]
            assert [*curve.lines[0].get_ydata()] == [whole[start], *rows["value"]]


def test_curves_over_the_state_are_those_of_both_tables(sources):
    with drawing():
        figure = draw_state(DEMO, "state_recovered", sources["state_recovered"])
    (panel,) = figure.axes
    assert panel.get_title(loc="left") == "DeltaNet"
    # Two layers of two heads of 32 values and 32, 16 or 8 keys, in float32.
    assert [[*curve.lines[0].get_xdata()] for curve in panel.containers] == [
        *[[16, 8, 4]] * 2, *[[16, 4]] * 2,
    ]  # fmt: skip
    frame = read_frame(sources["state_recovered"][1]).query("metric == 'prose_word_ppl'")
    value = frame.set_index(["method", "rft"])["value"]
    for curve, stage in zip(panel.containers[2:], ("post", "refit_post"), strict=True):
        start = value["baseline", "post"]
        assert [*curve.lines[0].get_ydata()] == [start, value["drrqr", stage]]


def without(results, lost):
    """Results, and a gap in place of some."""
    gap = {"value": None, "stderr": None, "source": "", "reason": "not measured", "draws": ""}
    return [result._replace(**gap) if lost(result.key) else result for result in results]


def test_a_point_that_is_missing_is_left_out(sources, tmp_path):
    lost = ("grad", 0.5)
    results = read_results(sources["quality"][0])
    some = without(results, lambda key: (key.method, key.compression) == lost)
    write_results(tmp_path / "some.parquet", some)
    with drawing():
        figure = draw_quality(DEMO, "quality", [tmp_path / "some.parquet"])
    grad = next(curve for curve in figure.axes[0].containers if curve.get_label() == "Grad")
    assert [*grad.lines[0].get_xdata()] == [0, 75]


@pytest.mark.parametrize("name", ["quality", "state"])
def test_a_model_without_numbers_has_an_empty_panel(sources, tmp_path, name):
    empty = [tmp_path / f"{place}.parquet" for place, _ in enumerate(sources[name])]
    for out, source in zip(empty, sources[name], strict=True):
        write_results(out, without(read_results(source), lambda key: True))
    draw(DEMO, name, empty, [tmp_path / "x.svg"])
    assert (tmp_path / "x.svg").read_text().count("not measured") >= 1


# --- for every reader ---


def linear(colour):
    """Linear light of an sRGB colour."""
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """WCAG 2: of the relative luminances."""
    dark, light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#15181c"])
def test_colours_show_on_a_light_and_on_a_dark_page(page):
    for colour in {method.colour for method in METHODS.values()} | {*KERNELS.values()}:
        assert contrast(colour, page) >= 3, colour


def test_panels_of_a_model_stand_in_one_row_and_no_row_is_too_long():
    panels = [Panel(model, "pre", None, {}) for model in "aabbcde"]
    rows = ["".join(panel.model for panel in row) for row in in_rows(panels)]
    assert rows == ["aabb", "cde"]
