from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.benchmarking import cell as cells
from reproduction.benchmarking.decoding import (
    FINENESS,
    largest,
    many_first,
    state_size,
)
from reproduction.benchmarking.passes import cut_model, random_model
from reproduction.benchmarking.record import CellRecord, Runs, from_json, metrics
from reproduction.benchmarking.timing import FEWEST, time_runs
from reproduction.config import Config, load_config
from statecut.files import read_json
from statecut.models.architectures import architecture

FOLDER = Path(__file__).parent.parent / "config"
NO_GPU = "not measured: no GPU"


@pytest.fixture(scope="module")
def demo() -> Config:
    """The demo with training passes too, and little of everything."""
    config = load_config(FOLDER / "demo.yaml")
    few = {"warmup": 1, "repeats": 2, "length": 80, "passes": ("forward", "training")}
    changes = {
        "mixer": few,
        "model": few,
        "decoding": {"tokens": 2, "prompt": 3, "batches": (1, 2)},
    }
    return changed(config, **changes)


def changed(config: Config, **changes: dict) -> Config:
    """With these benchmarks alone, and changes of each."""
    benchmarks = {
        name: config.benchmarks[name].model_copy(update=new) for name, new in changes.items()
    }
    return config.model_copy(update={"benchmarks": benchmarks})


def one(config: Config, benchmark: str, mode: str, subject: str = ""):
    cells = config.measurements(benchmark)
    return next(c for c in cells if c.mode == mode and subject in c.subject)


def measure(config: Config, cell, folder: Path, **how) -> CellRecord:
    record = cells.measure(config, cell, folder / "cell.json", device="cpu", **how)
    assert from_json(read_json(folder / "cell.json")) == record
    assert tuple(record.results) == metrics(config, cell)
    return record


@pytest.mark.parametrize("mode", ["forward", "training"])
@pytest.mark.parametrize("subject", ["delta_net", "gated_deltanet"])
@pytest.mark.parametrize("benchmark", ["mixer", "model"])
def test_a_cell_has_all_its_numbers_or_the_reason(demo, benchmark, subject, mode, tmp_path) -> None:
    record = measure(demo, one(demo, benchmark, mode, subject), tmp_path)
    speed = record.results["tokens_per_s"]
    assert speed.value == pytest.approx(2 * 80 / speed.runs.median)
    assert (speed.runs.repeats, speed.runs.warmup) == (2, 1)
    assert record.results["peak_memory_gib"].reason == NO_GPU
    assert record.machine["backend"] == "plain PyTorch"
    assert record.timed.startswith("forward" if mode == "forward" else "forward and backward")


@pytest.mark.parametrize("benchmark", ["model", "decoding"])
def test_a_model_is_timed_with_fewer_keys_and_values(demo, benchmark, tmp_path) -> None:
    config = changed(demo, **{benchmark: {"ratios": ("16x8",)}})
    whole, cut = (c for c in config.measurements() if c.subject == "delta_net" and not c.trains)
    assert (cut.ratio, cut.width) == ("16x8", 16)
    models = [cut_model(config.models["delta_net"], one, "cpu") for one in (whole, cut)]
    shapes = [architecture(c).shape(c) for c in (model.config.to_dict() for model in models)]
    assert [(s.width, s.value_width) for s in shapes] == [(32, 32), (16, 8)]
    measure(config, cut, tmp_path)


def test_a_cell_in_a_process_of_its_own(demo: Config, tmp_path: Path, monkeypatch) -> None:
    alone = partial(cells.run_work, own_process=True)
    monkeypatch.setattr(cells, "run_work", lambda *work, own_process, **how: alone(*work, **how))
    cell = one(demo, "mixer", "forward")
    record = measure(demo, cell, tmp_path, limit_s=300)
    assert record.results["tokens_per_s"].value is not None
    assert record.machine["device"] == "cpu"


def test_a_batch_that_does_not_fit_is_reported_as_such(demo: Config, tmp_path: Path) -> None:
    config = changed(demo, mixer={"batch": 10**12})
    record = measure(config, one(config, "mixer", "forward"), tmp_path)
    reasons = {(reading.value, reading.reason) for reading in record.results.values()}
    assert reasons == {(None, "not measured: out of memory at batch 1000000000000")}


# --- decoding ---


@pytest.mark.parametrize("subject", ["delta_net", "gated_deltanet"])
def test_the_state_is_counted_as_it_lies_in_the_cache(demo: Config, subject: str) -> None:
    model = random_model(demo.models[subject], 16, "cpu").eval()
    config = model.config.to_dict()
    shape = architecture(config).shape(config)
    assert shape.width == 16
    channels = shape.heads * (2 * shape.width + shape.value_width)
    filters = len(shape.layers) * channels * config["conv_size"] * 4
    size = state_size(model)
    assert size.value == (shape.state_bytes() + filters) / 2**20
    assert "recurrent_state" in size.note


def test_decoding_has_a_speed_for_each_batch(demo: Config, tmp_path: Path) -> None:
    results = measure(demo, one(demo, "decoding", "decoding"), tmp_path).results
    assert many_first((1, 16, 2)) == [16, 2, 1]  # fla keeps the tiles of the first for all others
    measured = {metric for metric, reading in results.items() if reading.value is not None}
    assert measured == {"tokens_per_s_1", "tokens_per_s_2", "state_mib"}
    assert {reading.reason for reading in results.values()} == {"", NO_GPU}


@given(limit=st.integers(0, 10**6), start=st.integers(1, 4096))
def test_the_largest_batch_is_found_to_its_fineness(limit: int, start: int) -> None:
    tried = []

    def misfit(batch: int) -> str:
        tried.append(batch)
        return "memory" if batch > limit else ""

    batch, why = largest(misfit, start)
    assert why == "memory"
    assert batch <= limit
    assert limit - batch <= max(1, batch // FINENESS)
    assert min(tried) >= 1
    assert len(tried) < 30


# --- timing ---


@given(warmup=st.integers(0, 5), repeats=st.integers(1, 9))
def test_the_first_run_and_the_warm_up_are_not_timed(warmup: int, repeats: int) -> None:
    calls = []
    runs = time_runs(lambda: calls.append(None), "cpu", warmup=warmup, repeats=repeats)
    assert len(calls) == 1 + warmup + repeats
    assert (runs.warmup, runs.repeats) == (warmup, repeats)
    assert 0 <= runs.lower <= runs.median <= runs.upper
    short = time_runs(lambda: None, "cpu", warmup=9, repeats=9, seconds=1e-9)
    assert (short.warmup, short.repeats) == (0, FEWEST)


def test_a_rate_has_the_relative_error_of_its_seconds() -> None:
    runs = Runs(median=2.0, lower=1.9, upper=2.1, repeats=25, warmup=1)
    # Of normal draws: 1.25 times the standard error of the mean.
    error = 1.2533 * (0.2 / 1.349) / 5
    rate = runs.rate(100)
    assert (rate.value, rate.stderr) == (50, pytest.approx(50 * error / 2))
