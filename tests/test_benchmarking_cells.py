from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reproduction.benchmarking.cell import measure
from reproduction.benchmarking.decoding import (
    FINENESS,
    Generation,
    first_guess,
    largest,
    many_first,
    state_size,
)
from reproduction.benchmarking.passes import cut_model, random_model
from reproduction.benchmarking.record import Runs, metrics, read
from reproduction.benchmarking.timing import FEWEST, time_runs
from reproduction.config import Config, load_config
from statecut.models.architectures import architecture

FOLDER = Path(__file__).parent.parent / "config"


@pytest.fixture(scope="module")
def demo() -> Config:
    """The demo with training passes too, and little of everything."""
    config = load_config(FOLDER / "demo.yaml")
    few = {"warmup": 1, "repeats": 2, "length": 80, "passes": ("forward", "training")}
    benchmarks = {
        "mixer": config.benchmarks["mixer"].model_copy(update=few),
        "model": config.benchmarks["model"].model_copy(update=few),
        "decoding": config.benchmarks["decoding"].model_copy(
            update={"tokens": 2, "prompt": 3, "batches": (1, 2)}
        ),
    }
    return config.model_copy(update={"benchmarks": benchmarks})


def one(config: Config, benchmark: str, mode: str, subject: str = ""):
    cells = config.measurements(benchmark)
    return next(c for c in cells if c.mode == mode and subject in c.subject)


@pytest.mark.parametrize("mode", ["forward", "training"])
@pytest.mark.parametrize("subject", ["delta_net", "gated_deltanet"])
@pytest.mark.parametrize("benchmark", ["mixer", "model"])
def test_a_cell_has_all_its_numbers_or_the_reason(demo, benchmark, subject, mode, tmp_path) -> None:
    cell = one(demo, benchmark, mode, subject)
    found = measure(demo, cell, tmp_path / "cell.json", own_process=False)
    assert tuple(found.results) == metrics(demo, cell)
    speed = found.results["tokens_per_s"]
    assert speed.value is not None
    assert speed.runs is not None
    assert speed.value == pytest.approx(2 * 80 / speed.runs.median)
    assert (speed.runs.repeats, speed.runs.warmup) == (2, 1)
    assert found.results["peak_memory_gib"].reason == "not measured: no GPU"
    assert found.machine["backend"] == "plain PyTorch"
    assert found.timed.startswith("forward" if mode == "forward" else "forward and backward")
    assert read(tmp_path / "cell.json") == found


@pytest.mark.parametrize("benchmark", ["model", "decoding"])
def test_a_model_is_timed_with_fewer_keys_and_values(demo, benchmark, tmp_path) -> None:
    widths = demo.benchmarks[benchmark].model_copy(update={"ratios": ("16x8",)})
    config = demo.model_copy(update={"benchmarks": {benchmark: widths}})
    whole, cut = (c for c in config.measurements() if c.subject == "delta_net" and not c.trains)
    assert (cut.ratio, cut.width) == ("16x8", 16)
    spec = config.models["delta_net"]
    shapes = [architecture(c).shape(c) for c in (cut_model(spec, one, "cpu").config.to_dict()
                                                 for one in (whole, cut))]  # fmt: skip
    assert [(s.width, s.value_width) for s in shapes] == [(32, 32), (16, 8)]
    found = measure(config, cut, tmp_path / "cell.json", own_process=False)
    assert read(tmp_path / "cell.json") == found
    if benchmark == "decoding":
        assert found.results["state_mib"].value > 0


def test_a_cell_in_a_process_of_its_own(demo: Config, tmp_path: Path) -> None:
    cell = one(demo, "mixer", "forward")
    found = measure(demo, cell, tmp_path / "cell.json", limit_s=300, own_process=True)
    assert found.results["tokens_per_s"].value is not None
    assert found.machine["device"] == "cpu"


def test_a_batch_that_does_not_fit_is_reported_as_such(demo: Config, tmp_path: Path) -> None:
    large = demo.benchmarks["mixer"].model_copy(update={"batch": 10**12})
    config = demo.model_copy(update={"benchmarks": {"mixer": large}})
    found = measure(
        config, one(config, "mixer", "forward"), tmp_path / "cell.json", own_process=False
    )
    assert {f.value for f in found.results.values()} == {None}
    assert found.results["tokens_per_s"].reason == (
        "not measured: out of memory at batch 1000000000000"
    )


# --- decoding ---


def lively(config: Config, subject: str):
    """A model whose tokens depend on its states; at a random start the last one is repeated."""
    model = random_model(config.models[subject], 16, "cpu").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("proj.weight"):
                weight.mul_(30)
    return model


@pytest.mark.parametrize("subject", ["delta_net", "gated_deltanet"])
def test_what_is_timed_is_greedy_generation(demo: Config, subject: str) -> None:
    model = lively(demo, subject)
    torch.manual_seed(3)
    prompt = torch.randint(0, model.config.vocab_size, (2, 5))
    torch.manual_seed(3)
    generation = Generation(model, 2, 5)
    found = torch.cat([generation.run(3)[0], generation.run(3)[0]], 1)  # the second goes on
    ids = prompt
    with torch.inference_mode():
        for _ in range(7):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids[:, 6:])


@pytest.mark.parametrize("subject", ["delta_net", "gated_deltanet"])
def test_the_state_is_counted_as_it_lies_in_the_cache(demo: Config, subject: str) -> None:
    model = random_model(demo.models[subject], 16, "cpu").eval()
    config = model.config.to_dict()
    shape = architecture(config).shape(config)
    assert shape.width == 16
    channels = shape.heads * (2 * shape.width + shape.value_width)
    filters = len(shape.layers) * channels * config["conv_size"] * 4
    found = state_size(model)
    assert found.value == (shape.state_bytes() + filters) / 2**20
    assert "recurrent_state" in found.note


def test_decoding_has_a_speed_for_each_batch(demo: Config, tmp_path: Path) -> None:
    cell = one(demo, "decoding", "decoding")
    found = measure(demo, cell, tmp_path / "cell.json", own_process=False)
    assert tuple(found.results) == metrics(demo, cell)
    assert many_first((1, 16, 2)) == [16, 2, 1]  # fla keeps the tiles of the first for all others
    assert {m for m, f in found.results.items() if f.value is not None} == {
        "tokens_per_s_1", "tokens_per_s_2", "state_mib",
    }  # fmt: skip
    assert {f.reason for f in found.results.values() if f.value is None} == {"not measured: no GPU"}


@given(limit=st.integers(0, 10**6), start=st.integers(1, 4096))
def test_the_largest_batch_is_found_to_its_fineness(limit: int, start: int) -> None:
    tried = []

    def misfit(batch: int) -> str:
        tried.append(batch)
        return "memory" if batch > limit else ""

    found, why = largest(misfit, start)
    assert why == "memory"
    assert found <= limit
    assert limit - found <= max(1, found // FINENESS)
    assert min(tried) >= 1
    assert len(tried) < 60


@given(each=st.integers(1000, 10**8), weights=st.integers(0, 10**10), lost=st.floats(0, 0.014))
def test_two_small_batches_tell_the_largest_to_three_tries(each, weights, lost) -> None:
    """Where memory grows with the batch, and a little of it cannot be used."""
    room = weights + 2000 * each
    tried = []

    def misfit(batch: int) -> str:
        tried.append(batch)
        return "memory" if batch > 2000 * (1 - lost) else ""

    start = first_guess(lambda batch: weights + each * batch, 256, room)
    assert start == pytest.approx(2000, abs=1)
    found, _ = largest(misfit, start)
    assert found == pytest.approx(2000 * (1 - lost), rel=1 / FINENESS)
    assert len(tried) <= 3


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
    found = runs.rate(100)
    assert found.value == 50
    assert found.stderr is not None
    assert found.stderr / 50 == pytest.approx(runs.stderr / 2)
    # Of normal draws: 1.25 times the standard error of the mean.
    assert runs.stderr == pytest.approx(1.2533 * (0.2 / 1.349) / 5)
