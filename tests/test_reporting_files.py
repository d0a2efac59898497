"""Reporting from files to files: what the rules of the workflow call."""

import math
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from reporting_runs import (
    DEMO,
    PAPERS_RUN,
    ROOT,
    evaluation,
    evaluation_files,
    frame_files,
    measurement_files,
)

from reproduction.config import QualityTable, load_config
from reproduction.reporting.archive import archived_content, write_archive
from reproduction.reporting.frame import (
    cells,
    make_frame,
    read_evaluation,
    read_results,
    table_results,
    timing_key,
    variant_key,
)
from reproduction.reporting.verdict import make_verdict
from reproduction.reporting.writing import write_document, write_table
from reproduction.rules import Inputs
from statecut.files import read_json, write_json
from statecut.pruning.selection import Selection, load_selection, save_selections


def test_the_labs_archives_give_its_numbers(tmp_path, monkeypatch):
    """The documents show the file of results; results/README.md says how to make it."""
    kept = ROOT / "results" / "lab" / "exact"
    for file in kept.glob("*.tar.xz"):
        with tarfile.open(file) as archive:
            archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    lab = load_config(ROOT / "config" / "lab.yaml").model_copy(update={"partial": "not run yet"})

    def values(file):
        return {row.place: row.value for row in read_results(file) if row.value is not None}

    found = {}
    for name in lab.tables:
        make_frame(lab, name, Inputs(lab).table_sources(name), "frame.parquet")
        found |= values("frame.parquet")
    assert len(found) > 1000
    assert found == values(kept / "results.parquet")


def test_archives_of_two_models_make_one_report(tmp_path, monkeypatch):
    """Each was measured on a machine that did not have the other, and their weights are gone."""
    monkeypatch.chdir(tmp_path)
    partial = DEMO.model_copy(update={"partial": "other machines"})
    paths = Inputs(DEMO).paths
    measured = {
        paths.evaluation(variant, suite): (variant, evaluation(DEMO, variant, suite))
        for variant, suite in DEMO.evaluations()
    }

    def table(name):
        make_frame(partial, name, Inputs(partial).table_sources(name), "frame.parquet")
        return read_results("frame.parquet")

    for path, (_, record) in measured.items():
        write_json(path, record)
    whole = {name: table(name) for name in DEMO.tables}
    for models in ({"delta_net"}, {*DEMO.models} - {"delta_net"}):
        shutil.rmtree("results")
        for path, (variant, record) in measured.items():
            if variant.model in models:
                write_json(path, record)
        verdict = paths.preflight(DEMO.trained_shapes()[len(models) == 1])
        write_json(verdict, {})
        write_archive(partial, f"{len(models)}.tar.xz")
    shutil.rmtree("results")
    for archive in tmp_path.glob("*.tar.xz"):
        with tarfile.open(archive) as results:
            results.extractall(filter="data")
    assert len([*Path(paths.root, "preflight").iterdir()]) == 2
    assert {name: table(name) for name in DEMO.tables} == whole
    reasons = {row.reason for rows in whole.values() for row in rows}
    assert reasons == {"", "not measured: other machines"}  # of what is timed


def test_a_partial_run_has_a_dash_and_a_reason_where_a_result_is_missing(tmp_path):
    partial = DEMO.model_copy(update={"partial": "no time"})
    evaluations = evaluation_files(DEMO, tmp_path)
    wanted = [evaluations[evaluation] for evaluation in DEMO.evaluations("summary")]
    some = [path if place % 2 else None for place, path in enumerate(wanted)]
    make_frame(partial, "summary", some, tmp_path / "summary.parquet")
    rows = read_results(tmp_path / "summary.parquet")
    measured = {str(path) for path in some if path}
    assert {row.source for row in rows if row.value is not None} == measured
    assert all(row.reason.endswith("not measured: no time") for row in rows if row.value is None)
    write_table(partial, "summary", tmp_path / "summary.parquet", tmp_path)
    assert "not measured: no time" in (tmp_path / "summary.tex").read_text()


def test_from_results_to_a_document_and_a_verdict(tmp_path):
    frames = frame_files(DEMO, tmp_path)
    for name, frame in frames.items():
        for result in read_results(frame):
            assert result.reason != "not measured"
            assert result.value is not None or not isinstance(DEMO.tables[name], QualityTable)
        write_table(DEMO, name, frame, tmp_path / "tables")
    tables = [tmp_path / "tables" / f"{name}.tex" for name in DEMO.tables]
    figures = [tmp_path / "figures" / f"{name}.pdf" for name in DEMO.figures]
    write_document(DEMO, tables, figures, tmp_path / "document.tex")
    text = (tmp_path / "document.tex").read_text()
    places = [text.index(rf"\input{{tables/{name}.tex}}") for name in DEMO.tables] + [
        text.index(f"{{figures/{name}.pdf}}") for name in DEMO.figures
    ]
    assert places == sorted(places)
    assert r"\caption{Convolution filters, head by head.}" in text
    make_verdict(DEMO, frames.values(), tmp_path / "verdict")
    assert "24 claims: " in (tmp_path / "verdict" / "verdict.txt").read_text()


def test_of_a_rotation_only_what_it_says_about_itself_is_archived(tmp_path):
    """That an archive renders the same bytes is tested on the demo (test_demo.py)."""
    about = {"method": "pca_proper", "width": 1, "full_width": 4}
    path, archived = tmp_path / "whole.safetensors", tmp_path / "archived.safetensors"
    save_selections([Selection({"kept": torch.tensor([[[2]]])}, about)], path)
    assert archived_content(path) == path.read_bytes()
    save_selections([Selection({"rotation": torch.randn(1, 1, 1, 4)}, about)], path)
    archived.write_bytes(archived_content(path))
    read = load_selection(archived, keys=1, values=4)
    assert (read.tensors, read.about) == ({}, about)


# --- what is read ---


def test_a_measurement_becomes_results_under_the_names_of_its_pass(tmp_path):
    files, timings = measurement_files(DEMO, tmp_path), DEMO.timings("decoding_speed")
    make_frame(DEMO, "decoding_speed", [files[cell] for cell in timings], tmp_path / "d")
    measured, stated = cells(read_results(tmp_path / "d")), read_json(files[timings[0]])["results"]
    speed = measured[timing_key(DEMO, timings[0], "tokens_per_s_8")]
    assert speed.value == stated["tokens_per_s_8"]["value"]
    assert speed.stderr == stated["tokens_per_s_8"]["stderr"]
    for metric in ("graph_tokens_per_s_8", "largest_batch"):
        without = measured[timing_key(DEMO, timings[0], metric)]
        assert (without.value, without.reason) == (None, "not measured: no GPU")


def test_a_ratio_says_whose_measurement_is_missing(tmp_path):
    files, timings = measurement_files(DEMO, tmp_path), DEMO.timings("mixer_speed")
    wide, narrow = timings[:2]
    record = read_json(files[wide])
    record["results"]["tokens_per_s"] = {"value": None, "stderr": None, "reason": "crashes"}
    write_json(files[wide], record)
    make_frame(DEMO, "mixer_speed", [files[cell] for cell in timings], tmp_path / "m")
    measured = cells(read_results(tmp_path / "m"))
    assert measured[timing_key(DEMO, wide, "speedup")].reason == "crashes"
    assert measured[timing_key(DEMO, narrow, "speedup")].reason == "at d_k 32: crashes"
    assert measured[timing_key(DEMO, narrow, "tokens_per_s")].value is not None


def test_a_table_of_one_pass_needs_no_other():
    shown = {name: PAPERS_RUN.timings(name) for name in ("mixer_scaling", "mixer_training")}
    assert {cell.mode for cell in shown["mixer_scaling"]} == {"forward"}
    assert sorted(shown["mixer_scaling"] + shown["mixer_training"]) == sorted(
        PAPERS_RUN.measurements("mixer")
    )


def recorded(suite, numbers):
    """An evaluation, as far as results are made of it."""
    tasks = {name: {"documents": 9, "data": {"name": name, "revision": "1"}} for name in numbers}
    return {"suite": suite, "protocol": "demo", "results": numbers, "tasks": tasks}


def test_an_evaluation_becomes_results_in_the_papers_units(tmp_path):
    variant = next(v for v, _ in DEMO.cells("zero_shot") if v.method == "grad")
    path = tmp_path / "zero_shot.json"
    numbers = {
        "choice_acc_norm": {"value": 0.4, "stderr": 0.03, "draws": [0.4, 0.5]},
        "last_word_acc": {"value": 0.1, "stderr": None, "draws": [0.1, 0.3], "note": "other data"},
        "zero_shot_avg": {"value": 0.25, "stderr": None},
    }
    write_json(path, recorded("zero_shot", numbers))
    results = list(read_evaluation(DEMO, variant, "zero_shot", path))
    assert [(result.key.metric, result.value, result.stderr) for result in results] == [
        ("choice_acc_norm", 40.0, 3.0),
        ("last_word_acc", 10.0, None),
    ]
    assert {(result.protocol, result.source) for result in results} == {("demo", path.as_posix())}
    assert [result.note for result in results] == ["", "other data"]
    measured = cells(table_results(DEMO, "zero_shot", results))
    mean = measured[variant_key(DEMO, variant, "zero_shot_avg")]
    assert mean.value == 25.0
    assert mean.draws.values == pytest.approx([25.0, 40.0])
    alone = measured[variant_key(DEMO, variant, "choice_acc_norm")]
    assert alone.draws.documents != mean.draws.documents


def test_a_perplexity_without_bound_is_a_gap_with_its_reason(tmp_path):
    variant = next(v for v, _ in DEMO.cells("by_model"))
    numbers = {
        "prose_word_ppl": {"value": math.inf, "stderr": None, "draws": None},
        "last_word_ppl": {"value": 12.5, "stderr": 0.5, "draws": None},
    }
    write_json(tmp_path / "a", recorded("ppl", numbers))
    results = list(read_evaluation(DEMO, variant, "ppl", tmp_path / "a"))
    assert [(result.value, result.reason) for result in results] == [
        (None, "the model is broken: inf"),
        (12.5, ""),
    ]
