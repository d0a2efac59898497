"""Results in one form: what a file of them accepts, what a table's holds, what is derived."""

import math
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting_runs import DEMO, PRINTED, ROOT

from reproduction.config import Config, load_config
from reproduction.reporting.frame import (
    Draws,
    Key,
    Result,
    cells,
    make_union,
    read_results,
    table_results,
    timing_key,
    variant_key,
    write_results,
)
from statecut.errors import InputError

KEY = Key("m", "none", "grad", "kq", 0.5, None, "pre", "wikitext_word_ppl")
RESULT = Result(KEY, 0, 31.7, 0.2, "paper", "results/m.json", "")


def test_the_papers_numbers_kept_eps():
    assert {printed.key.eps for printed in PRINTED} == {"kept"}


def test_a_result_with_eps_kept_does_not_stand_in_for_one_with_eps_matched():
    keys = cells(table_results(DEMO, "small_eps", []))
    results = [RESULT._replace(key=key) for key in keys if key.eps == "kept"]
    measured = cells(table_results(DEMO, "small_eps", results))
    reasons = {(key.eps, cell.reason) for key, cell in measured.items()}
    assert reasons == {("kept", ""), ("matched", "not measured")}


@pytest.mark.parametrize(
    "wrong",
    [
        [RESULT._replace(reason="but why")],
        [RESULT._replace(value=None)],
        [RESULT._replace(source="")],
        [RESULT._replace(value=math.inf)],
        [RESULT._replace(value=math.nan)],
        [RESULT, RESULT._replace(value=1.0)],
    ],
)
def test_a_file_of_results_refuses(wrong, tmp_path):
    with pytest.raises(InputError):
        write_results(tmp_path / "t.parquet", wrong)
    assert not (tmp_path / "t.parquet").exists()


def test_the_union_has_every_number_once_and_no_number_twice(tmp_path):
    other = RESULT._replace(seed=1)
    gap = Result(KEY._replace(head_k_dim=64, compression=None), 1, reason="no GPU")
    results = {"a": [RESULT], "b": [RESULT, other, gap], "c": [RESULT._replace(value=31.8)]}
    for name, part in results.items():
        write_results(tmp_path / name, part)
    make_union([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert read_results(tmp_path / "all") == [RESULT, other, gap]
    with pytest.raises(InputError, match="two values of"):
        make_union([tmp_path / "a", tmp_path / "c"], tmp_path / "two")


@pytest.mark.parametrize(
    ("table", "digits"),
    [
        ("zs-dn-370M", {0.1}),
        ("ablation_kq_targets", {0.1, 0.01}),  # one number has two decimals
        ("mixer_scaling", {1e5, 0.01}),
        ("speedup_whole_model", {1e2, 0.01}),
        ("adv_vs_non_adv", {1e4, 1e3, 0.1, 0.01}),
    ],
)
def test_the_last_printed_digit(table, digits):
    assert {printed.digit for printed in PRINTED if printed.table == table} == digits


def test_a_missing_mean_is_that_of_its_tasks_with_its_error():
    variant = next(v for v, column in DEMO.cells("zero_shot") if column == "zero_shot_avg")
    parts = [
        Result(variant_key(DEMO, variant, metric), 0, value, stderr, "demo", "a.json", note=metric)
        for metric, value, stderr in [("choice_acc_norm", 40.0, 3.0), ("last_word_acc", 10.0, 4.0)]
    ]
    key = variant_key(DEMO, variant, "zero_shot_avg")
    mean = cells(table_results(DEMO, "zero_shot", parts))[key]
    assert (mean.value, mean.stderr) == (25.0, 2.5)
    assert mean.note == "choice_acc_norm; last_word_acc"
    incomplete = cells(table_results(DEMO, "zero_shot", parts[:1]))[key]
    assert incomplete.reason == "last_word_acc: not measured"


def test_a_missing_speedup_is_the_ratio_to_the_first_width():
    measured = [
        Result(timing_key(DEMO, cell, "tokens_per_s"), 0, 3200 / cell.width, 1.0, "demo", "b")
        for cell in DEMO.timings("mixer_speed")
    ]
    table = cells(table_results(DEMO, "mixer_speed", measured))
    speedups = {key: cell for key, cell in table.items() if key.metric == "speedup"}
    assert {(key.head_k_dim, cell.value) for key, cell in speedups.items()} == {(32, 1), (16, 2)}
    for key, cell in speedups.items():
        assert cell.stderr == (
            pytest.approx(2 * math.hypot(1 / 100, 1 / 200)) if key.head_k_dim == 16 else 0.0
        )
    ratios = [cell.reason for key, cell in table.items() if key.metric == "memory_ratio"]
    assert set(ratios) == {"not measured"}


def test_what_is_left_out_says_why():
    raw = load_config(ROOT / "config" / "lab.yaml").model_dump(mode="json")
    raw["evaluation"]["suites"]["zero_shot"]["tasks"]["piqa_acc_norm"]["not_attempted"] = "data"
    measured = cells(table_results(Config(**raw), "sharing", []))
    reasons = {key.metric: cell.reason for key, cell in measured.items()}
    assert reasons["piqa_acc_norm"] == reasons["zero_shot_avg"] == "not attempted: data"
    assert reasons["lambada_acc"] == "not measured"


@given(st.lists(st.floats(-1e30, 1e30), min_size=1), st.text("abc0+:"))
def test_draws_come_back_from_text_to_seven_digits(values, documents):
    draws = Draws.from_text(Draws(documents, tuple(values)).to_text())
    assert draws.documents == documents
    assert draws.values == pytest.approx(values, rel=1e-6, abs=1e-30)


def test_seeds_give_mean_spread_and_what_is_missing():
    results = [RESULT._replace(seed=seed, value=value) for seed, value in enumerate((30.0, 34.0))]
    gap = RESULT._replace(seed=2, value=None, stderr=None, source="", reason="out of memory")
    cell = cells([*results, gap])[KEY]
    assert (cell.value, cell.seeds, cell.reason) == (32.0, 2, "seed 2: out of memory")
    assert cell.spread == pytest.approx(math.sqrt(8))
    assert cell.stderr == pytest.approx(0.2)


def test_trainings_count_alike_however_often_each_was_drawn(tmp_path):
    draws = {0: (30.0, 34.0), 1: (35.0,), 2: (38.0, 40.0, 42.0)}
    results = [
        RESULT._replace(seed=seed, training=training, value=value)
        for training, values in draws.items()
        for seed, value in enumerate(values)
    ]
    write_results(tmp_path / "several", results)
    assert read_results(tmp_path / "several") == results
    cell = cells(results)[KEY]
    assert (cell.value, cell.trainings, cell.seeds, cell.count) == (pytest.approx(107 / 3), 3, 1, 3)
    assert cell.spread == pytest.approx(stdev((32.0, 35.0, 40.0)))
    missing = results[-1]._replace(value=None, stderr=None, source="", reason="no time")
    assert cells([*results[:-1], missing])[KEY].reason == "training 2, seed 2: no time"


@pytest.mark.parametrize(("last", "mean"), [("a", Draws("a", (1.0, 2.0))), ("b", None), ("", None)])
def test_seeds_of_the_same_documents_have_the_mean_of_their_draws(last, mean):
    results = [
        RESULT._replace(seed=seed, draws=Draws(documents, (seed, 2)).to_text() if documents else "")
        for seed, documents in enumerate(("a", "a", last))
    ]
    assert cells(results)[KEY].draws == mean
