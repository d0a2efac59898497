"""Reporting from files to files: what the rules of the workflow call."""

import tarfile
from pathlib import Path

import pytest
from reporting_runs import (
    DEMO,
    PAPERS_RUN,
    PUBLISHED,
    ROOT,
    TEMPLATES,
    evaluation_files,
    frame_files,
    measurement_files,
)

from reproduction.config import QualityTable, load_config
from reproduction.reporting.frame import cells, from_frame, make_frame, read_frame, timing_key
from reproduction.reporting.verdict import make_verdict, verify
from reproduction.reporting.writing import write_document, write_table
from reproduction.rules import Inputs
from statecut.errors import InputError
from statecut.files import read_json, write_json


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """A frame of every table of the demo, from files."""
    return frame_files(DEMO, tmp_path_factory.mktemp("run"))


def test_every_cell_of_every_table_is_measured_or_says_why(frames):
    for name, path in frames.items():
        for result in from_frame(read_frame(path)):
            assert result.reason != "not measured"
            if isinstance(DEMO.tables[name], QualityTable):
                assert result.value is not None


def test_the_labs_results_still_give_its_tables(tmp_path, monkeypatch):
    archive = ROOT / "results" / "lab" / "h200"
    with tarfile.open(archive / "results.tar.xz") as results:
        results.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    measured = {"partial": "the GPU's time was up", "eps": "kept"}
    lab = load_config(ROOT / "config" / "lab.yaml").model_copy(update=measured)
    for name in lab.tables:
        if name == "eps" or name.startswith("values-"):
            continue  # younger than these results
        make_frame(lab, name, Inputs(lab).table_sources(name), "frame.parquet")
        write_table(lab, name, "frame.parquet", tmp_path, TEMPLATES)
        for path in (Path(f"{name}.csv"), Path(f"{name}.tex")):
            assert path.read_bytes() == (archive / "tables" / path).read_bytes()


def test_a_partial_run_has_a_dash_and_a_reason_where_a_result_is_missing(tmp_path):
    partial = DEMO.model_copy(update={"partial": "no time"})
    evaluations = evaluation_files(DEMO, tmp_path)
    wanted = [evaluations[evaluation] for evaluation in DEMO.evaluations("summary")]
    some = [path if place % 2 else None for place, path in enumerate(wanted)]
    make_frame(partial, "summary", some, tmp_path / "summary.parquet")
    rows = from_frame(read_frame(tmp_path / "summary.parquet"))
    measured = {str(path) for path in some if path}
    assert {row.source for row in rows if row.value is not None} == measured
    assert all(row.reason.endswith("not measured: no time") for row in rows if row.value is None)
    write_table(partial, "summary", tmp_path / "summary.parquet", tmp_path, TEMPLATES)
    assert "not measured: no time" in (tmp_path / "summary.tex").read_text()


def test_a_run_that_is_not_partial_misses_nothing(tmp_path):
    nothing = [None] * len(DEMO.evaluations("summary"))
    with pytest.raises(InputError, match="results are missing, and the run is not `partial`"):
        make_frame(DEMO, "summary", nothing, tmp_path / "summary.parquet")


def test_from_frames_to_a_document_and_a_verdict(frames, tmp_path):
    for name, frame in frames.items():
        write_table(DEMO, name, frame, tmp_path / "tables", TEMPLATES)
    tables = [tmp_path / "tables" / f"{name}.tex" for name in DEMO.tables]
    figures = [tmp_path / "figures" / f"{name}.pdf" for name in DEMO.figures]
    write_document(DEMO, tables, figures, tmp_path / "document.tex", TEMPLATES)
    text = (tmp_path / "document.tex").read_text()
    places = [text.index(rf"\input{{tables/{name}.tex}}") for name in DEMO.tables] + [
        text.index(f"{{figures/{name}.pdf}}") for name in DEMO.figures
    ]
    assert places == sorted(places)
    assert r"\caption{Convolution filters, head by head.}" in text
    make_verdict(
        DEMO,
        list(frames.values()),
        tmp_path / "verdict",
        PUBLISHED,
        ROOT / "config" / "claims.yaml",
    )
    verify(tmp_path / "verdict" / "cells.csv")
    with pytest.raises(InputError, match="made of 8 figures, not of 7"):
        write_document(DEMO, tables, figures[1:], tmp_path / "document.tex", TEMPLATES)


# --- what is read ---


def test_a_measurement_becomes_results_under_the_names_of_its_pass(tmp_path):
    files = measurement_files(DEMO, tmp_path)
    cell = DEMO.timings("decoding_speed")[0]
    make_frame(
        DEMO,
        "decoding_speed",
        [files[cell] for cell in DEMO.timings("decoding_speed")],
        tmp_path / "d.parquet",
    )
    measured = cells(read_frame(tmp_path / "d.parquet"))
    stated = read_json(files[cell])["results"]
    speed = measured[timing_key(DEMO, cell, "tokens_per_s_8")]
    assert speed.value == stated["tokens_per_s_8"]["value"]
    assert speed.stderr == stated["tokens_per_s_8"]["stderr"]
    for metric in ("graph_tokens_per_s_8", "largest_batch"):
        without = measured[timing_key(DEMO, cell, metric)]
        assert (without.value, without.reason) == (None, "not measured: no GPU")


def test_a_ratio_says_whose_measurement_is_missing(tmp_path):
    files = measurement_files(DEMO, tmp_path)
    wide, narrow = DEMO.timings("mixer_speed")[:2]
    record = read_json(files[wide])
    record["results"]["tokens_per_s"] = {"value": None, "stderr": None, "reason": "crashes"}
    write_json(files[wide], record)
    sources = [files[cell] for cell in DEMO.timings("mixer_speed")]
    make_frame(DEMO, "mixer_speed", sources, tmp_path / "m.parquet")
    measured = cells(read_frame(tmp_path / "m.parquet"))
    assert measured[timing_key(DEMO, wide, "speedup")].reason == "crashes"
    assert measured[timing_key(DEMO, narrow, "speedup")].reason == "at d_k 32: crashes"
    assert measured[timing_key(DEMO, narrow, "tokens_per_s")].value is not None


def test_a_table_of_one_pass_needs_no_other():
    shown = {name: PAPERS_RUN.timings(name) for name in ("mixer_scaling", "mixer_training")}
    assert {cell.mode for cell in shown["mixer_scaling"]} == {"forward"}
    assert sorted(shown["mixer_scaling"] + shown["mixer_training"]) == sorted(
        PAPERS_RUN.measurements("mixer")
    )


def test_wrong_sources_are_refused(tmp_path):
    evaluations = evaluation_files(DEMO, tmp_path / "e")
    measurements = measurement_files(DEMO, tmp_path / "m")
    right = [evaluations[evaluation] for evaluation in DEMO.evaluations("sharing")]
    with pytest.raises(InputError, match="table sharing is made of 6 evaluations, not of 5"):
        make_frame(DEMO, "sharing", right[1:], tmp_path / "x")
    with pytest.raises(InputError, match="suite 'zero_shot', expected 'ppl'"):
        make_frame(DEMO, "sharing", right[::-1], tmp_path / "x")
    timed = [measurements[cell] for cell in DEMO.timings("mixer_speed")]
    with pytest.raises(InputError, match=r"it measured .*width=16.*, expected .*width=32"):
        make_frame(DEMO, "mixer_speed", timed[::-1], tmp_path / "x")
    with pytest.raises(InputError, match="is not a measurement"):
        make_frame(DEMO, "mixer_speed", right[: len(timed)], tmp_path / "x")
    assert not (tmp_path / "x").exists()
