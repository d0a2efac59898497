"""Results in one form: what a frame accepts, what a table's frame holds, what is derived."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting_runs import DEMO, PAPERS_RUN, PRINTED, ROOT, in_print

from reproduction.config import Config, load_config
from reproduction.reporting.frame import (
    Draws,
    Key,
    Result,
    cells,
    from_frame,
    make_union,
    read_evaluation,
    read_frame,
    table_frame,
    timing_key,
    to_frame,
    variant_key,
    write_frame,
)
from statecut.errors import InputError
from statecut.files import write_json

FOLDER = ROOT / "config"
KEY = Key("m", "none", "grad", "kq", 0.5, None, "pre", "wikitext_word_ppl")
RESULT = Result(KEY, 0, 31.7, 0.2, "paper", "results/m.json", "")


def test_what_does_not_say_its_eps_kept_it():
    before = FOLDER.parent / "results/lab/h200/results.parquet"
    assert "eps" not in pd.read_parquet(before)
    assert set(read_frame(before)["eps"]) == {"kept"}
    assert {printed.key.eps for printed in PRINTED} == {"kept"}


def test_a_result_with_eps_kept_does_not_stand_in_for_one_with_eps_matched():
    keys = cells(table_frame(DEMO, "small_eps", []))
    results = [RESULT._replace(key=key) for key in keys if key.eps == "kept"]
    measured = cells(table_frame(DEMO, "small_eps", results))
    reasons = {(key.eps, cell.reason) for key, cell in measured.items()}
    assert reasons == {("kept", ""), ("matched", "not measured")}


def test_a_frame_comes_back_from_its_file(tmp_path):
    gap = Result(KEY._replace(head_k_dim=64, compression=None), 1, None, None, "", "", "no GPU")
    frame = to_frame([RESULT, gap])
    write_frame(tmp_path / "t.parquet", frame)
    assert from_frame(read_frame(tmp_path / "t.parquet")) == [RESULT, gap]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([RESULT._replace(reason="but why")], "a value or a reason"),
        ([RESULT._replace(value=None)], "a value or a reason"),
        ([RESULT._replace(source="")], "a value has a source"),
        ([RESULT._replace(value=math.inf)], "value"),
        ([RESULT._replace(stderr=-0.1)], "stderr"),
        ([RESULT._replace(key=KEY._replace(target="v"))], "target"),
        ([RESULT._replace(key=KEY._replace(compression=50.0))], "compression"),
        ([RESULT, RESULT._replace(value=1.0)], "unique"),
    ],
)
def test_a_frame_refuses(wrong, says):
    with pytest.raises(InputError, match=says):
        to_frame(wrong)


def test_the_union_has_every_number_once_and_no_number_twice(tmp_path):
    other = RESULT._replace(seed=1)
    results = {"a": [RESULT], "b": [RESULT, other], "c": [RESULT._replace(value=31.8)]}
    for name, part in results.items():
        write_frame(tmp_path / name, to_frame(part))
    make_union([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert from_frame(read_frame(tmp_path / "all")) == [RESULT, other]
    with pytest.raises(InputError, match="two: not a frame of results"):
        make_union([tmp_path / "a", tmp_path / "c"], tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_every_printed_number_is_a_cell_of_its_table():
    assert len(PRINTED) == 2497
    for table in dict.fromkeys(printed.table for printed in PRINTED):
        printed = {printed.key: printed.value for printed in PRINTED if printed.table == table}
        frame = table_frame(PAPERS_RUN, table, in_print(PAPERS_RUN, table))
        measured = {key: cell.value for key, cell in cells(frame).items()}
        # Beyond the paper's, only the recovered unpruned model, which is ours.
        extra = {key for key in measured if key not in printed}
        assert {(key.method, key.rft) for key in extra} <= {("baseline", "post")}
        assert all(measured[key] is None for key in extra)
        assert {key: measured[key] for key in printed} == pytest.approx(printed)


def test_the_last_printed_digit():
    def digits(table):
        return {printed.digit for printed in PRINTED if printed.table == table}

    assert digits("zs-dn-370M") == {0.1}
    assert digits("ablation_kq_targets") == {0.1, 0.01}  # one number has two decimals
    assert digits("mixer_scaling") == {1e5, 0.01}
    assert digits("speedup_whole_model") == {1e2, 0.01}
    assert digits("adv_vs_non_adv") == {1e4, 1e3, 0.1, 0.01}


def test_a_missing_mean_is_that_of_its_tasks_with_its_error():
    variant = next(v for v, column in DEMO.cells("zero_shot") if column == "zero_shot_avg")
    parts = [
        Result(variant_key(DEMO, variant, "choice_acc_norm"), 0, 40.0, 3.0, "demo", "a.json", ""),
        Result(variant_key(DEMO, variant, "last_word_acc"), 0, 10.0, 4.0, "demo", "a.json", ""),
    ]
    measured = cells(table_frame(DEMO, "zero_shot", parts))
    mean = measured[variant_key(DEMO, variant, "zero_shot_avg")]
    assert (mean.value, mean.stderr) == (25.0, 2.5)
    noted = [part._replace(note=f"{part.key.metric}: elsewhere") for part in parts]
    mean = cells(table_frame(DEMO, "zero_shot", noted))[variant_key(DEMO, variant, "zero_shot_avg")]
    assert mean.note == "choice_acc_norm: elsewhere; last_word_acc: elsewhere"
    incomplete = cells(table_frame(DEMO, "zero_shot", parts[:1]))
    why = incomplete[variant_key(DEMO, variant, "zero_shot_avg")].reason
    assert why == "last_word_acc: not measured"


def test_a_missing_speedup_is_the_ratio_to_the_first_width():
    measured = [
        Result(
            timing_key(DEMO, cell, "tokens_per_s"), 0, 100.0 * 32 / cell.width, 1.0, "demo", "b", ""
        )
        for cell in DEMO.timings("mixer_speed")
    ]
    table = cells(table_frame(DEMO, "mixer_speed", measured))
    speedups = {key: cell for key, cell in table.items() if key.metric == "speedup"}
    assert {(key.head_k_dim, cell.value) for key, cell in speedups.items()} == {(32, 1), (16, 2)}
    for key, cell in speedups.items():
        assert cell.stderr == (
            pytest.approx(2 * math.hypot(1 / 100, 1 / 200)) if key.head_k_dim == 16 else 0.0
        )
    ratios = [cell.reason for key, cell in table.items() if key.metric == "memory_ratio"]
    assert set(ratios) == {"not measured"}


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
    frame = cells(table_frame(DEMO, "zero_shot", results))
    mean = frame[variant_key(DEMO, variant, "zero_shot_avg")]
    assert mean.value == 25.0
    assert mean.draws is not None
    assert mean.draws.values == pytest.approx([25.0, 40.0])
    draws = frame[variant_key(DEMO, variant, "choice_acc_norm")].draws
    assert draws is not None
    assert draws.documents != mean.draws.documents


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


def test_what_is_left_out_says_why():
    raw = load_config(FOLDER / "lab.yaml").model_dump(mode="json")
    raw["evaluation"]["suites"]["zero_shot"]["tasks"]["piqa_acc_norm"]["not_attempted"] = "data"
    measured = cells(table_frame(Config(**raw), "sharing", []))
    reasons = {key.metric: cell.reason for key, cell in measured.items()}
    assert reasons["piqa_acc_norm"] == reasons["zero_shot_avg"] == "not attempted: data"
    assert reasons["lambada_acc"] == "not measured"


@given(st.lists(st.floats(-1e30, 1e30), min_size=1), st.text("abc0+:"))
def test_draws_come_back_from_text_to_seven_digits(values, documents):
    draws = Draws.from_text(Draws(documents, tuple(values)).to_text())
    assert draws is not None
    assert draws.documents == documents
    assert draws.values == pytest.approx(values, rel=1e-6, abs=1e-30)


def test_seeds_give_mean_spread_and_what_is_missing():
    results = [RESULT._replace(seed=seed, value=value) for seed, value in enumerate((30.0, 34.0))]
    gap = RESULT._replace(seed=2, value=None, stderr=None, source="", reason="out of memory")
    cell = cells(to_frame([*results, gap]))[KEY]
    assert (cell.value, cell.seeds, cell.reason) == (32.0, 2, "seed 2: out of memory")
    assert cell.spread == pytest.approx(math.sqrt(8))
    assert cell.stderr == pytest.approx(0.2)


def test_seeds_of_the_same_documents_have_the_mean_of_their_draws():
    def drawn(documents, *values):
        return Draws(documents, values).to_text()

    results = [RESULT._replace(seed=seed, draws=drawn("a", seed, 2)) for seed in range(3)]
    assert cells(to_frame(results))[KEY].draws == Draws("a", (1.0, 2.0))
    other = [*results[:2], results[2]._replace(draws=drawn("b", 1, 2))]
    assert cells(to_frame(other))[KEY].draws is None
    without = [*results[:2], results[2]._replace(draws="")]
    assert cells(to_frame(without))[KEY].draws is None
