"""What a report says first: a picture and sentences that follow from a run's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reporting_runs import ROOT

from reproduction.config import BASELINE, Config, Stage, Variant, load_config
from reproduction.reporting.frame import Cell, Draws, Key, variant_key
from reproduction.reporting.headline import Headline, format_bytes
from reproduction.reporting.picture import describe_headline, draw_headline

CELL = Cell(None, None, None, 1, frozenset({"demo"}), "")


@pytest.fixture(scope="module")
def demo() -> Config:
    config = load_config(ROOT / "config" / "demo.yaml")
    state = config.figures["state_recovered"].model_copy(update={"tables": ("by_model",)})
    return config.model_copy(update={"figures": {"state": state}})


def perplexities(
    config: Config, model: str, numbers: dict[tuple[str, float, Stage], float | None]
) -> dict[Key, Cell]:
    """By method, ratio and stage; the documents of all are the same, and add no noise."""
    cells = {}
    for (method, ratio, stage), value in {(BASELINE, 0.0, "none"): 100.0, **numbers}.items():
        target = "" if method == BASELINE else config.methods[method].target
        variant = Variant(model, method, target, ratio, 0, stage, config.eps if target else "kept")
        draws = value and Draws("d", (value - 1, value, value + 1))
        cell = replace(CELL, value=value, stderr=30.0, draws=draws or None)
        cells[variant_key(config, variant, "prose_word_ppl")] = cell
    return cells


def timing(ratio: float, metric: str, value: float, stderr: float = 0.0) -> dict[Key, Cell]:
    width, method = (16, "") if ratio else (32, BASELINE)
    key = Key("delta_net", "none", method, "", ratio, width, "none", metric)
    return {key: replace(CELL, value=value, stderr=stderr)}


def headline(config: Config, cells: dict[Key, Cell]) -> Headline:
    subject = Headline.of(config, cells)
    assert subject is not None
    return subject


def test_the_cost_is_that_of_every_stage_that_was_measured(demo: Config) -> None:
    cells = perplexities(
        demo,
        "delta_net",
        {
            ("drrqr", 0.5, "pre"): 112.0,
            ("drrqr", 0.5, "refit"): 104.0,
            ("drrqr", 0.5, "post"): None,
        },
    )
    assert headline(demo, cells).cost() == (
        "Cutting half of the state by DRRQR changes perplexity on Prose of DeltaNet by "
        "<strong>+12.0 %</strong> as sliced and <strong>+4.0 %</strong> refitted."
    )
    cells |= perplexities(demo, "gated_deltanet", {("drrqr", 0.5, "pre"): 103.0})
    assert "; of Gated DeltaNet by <strong>+3.0 %</strong> as sliced." in str(
        headline(demo, cells).cost()
    )


def test_sentences_are_about_cuts_with_the_runs_own_eps(demo: Config) -> None:
    cells = perplexities(demo, "delta_net", {("drrqr", 0.75, "pre"): 112.0})
    kept = demo.model_copy(update={"eps": "kept"})
    both = cells | perplexities(kept, "delta_net", {("drrqr", 0.5, "pre"): 190.0})
    assert headline(demo, both).sentences() == headline(demo, cells).sentences()


def test_a_difference_within_the_noise_says_so(demo: Config) -> None:
    cells = perplexities(demo, "delta_net", {("drrqr", 0.5, "pre"): 101.0})
    noisy = {key: replace(cell, spread=1.0) for key, cell in cells.items()}
    assert "(within the noise)" not in str(headline(demo, cells).cost())
    assert "<strong>+1.0 %</strong> (within the noise)" in str(headline(demo, noisy).cost())


def test_the_best_method_is_named_with_those_that_may_be_as_good(demo: Config) -> None:
    numbers = {("drrqr", 0.75, "pre"): 110.0, ("l1", 0.75, "pre"): 120.0}
    assert headline(demo, perplexities(demo, "delta_net", numbers)).best_method() is None
    # Of the same target alone: rotations by keys are another matter.
    numbers |= {("rand", 0.75, "pre"): 1500.0, ("pca_proper", 0.75, "pre"): 1e6}
    cells = perplexities(demo, "delta_net", numbers)
    assert headline(demo, cells).best_method() == (
        "With three quarters cut and nothing repaired, <strong>DRRQR</strong> is the best of 3 "
        "methods for DeltaNet (<strong>+10.0 %</strong>) and Rand the worst "
        "(<strong>×15.0</strong>)."
    )
    # And of an algorithm with several settings the first alone.
    again = {**demo.methods, "again": demo.methods["drrqr"]}
    settings = demo.model_copy(update={"methods": again})
    cells |= perplexities(settings, "delta_net", {("again", 0.75, "pre"): 105.0})
    assert "<strong>DRRQR</strong> is the best of 3" in str(headline(settings, cells).best_method())
    noisy = {key: replace(cell, spread=5.0) for key, cell in cells.items()}
    assert "; L1 is too close to tell apart)" in str(headline(demo, noisy).best_method())


def test_what_the_smaller_state_gives_is_bytes_and_what_was_timed(demo: Config) -> None:
    cells = perplexities(demo, "delta_net", {("drrqr", 0.5, "pre"): 101.0})
    size = "With half cut, DeltaNet’s state is <strong>8 KiB</strong> a sequence instead of 16 KiB"
    assert headline(demo, cells).gain() == f"{size}."
    cells |= timing(0.0, "tokens_per_s", 100.0) | timing(0.5, "tokens_per_s", 125.0)
    cells |= timing(0.5, "decoding_tokens_per_s_1", 30.0)  # of the whole model it is missing
    for ratio, value in ((0.0, 40.0), (0.5, 42.0)):
        cells |= timing(ratio, "decoding_tokens_per_s_8", value, 1.0)
    assert headline(demo, cells).gain() == (
        f"{size}; the model runs <strong>1.25</strong> times as fast and generates text "
        "<strong>1.05</strong> times as fast at a batch of 8 (within the noise)."
    )
    # As a graph, where Python is no part of the time.
    cells |= timing(0.0, "graph_tokens_per_s", 200.0) | timing(0.5, "graph_tokens_per_s", 220.0)
    assert "the model runs <strong>1.10</strong> times" in str(headline(demo, cells).gain())


def test_without_numbers_there_are_no_sentences_and_no_picture(demo: Config) -> None:
    empty = headline(demo, {})
    assert (empty.sentences(), draw_headline(empty)) == ([], {})
    whole = headline(demo, perplexities(demo, "delta_net", {("drrqr", 0.5, "pre"): None}))
    assert (whole.cost(), whole.best_method(), draw_headline(whole)) == (None, None, {})


def test_the_picture_names_the_stages_and_sizes_that_it_shows(demo: Config) -> None:
    numbers = {
        ("drrqr", 0.75, "pre"): 120.0,
        ("drrqr", 0.5, "pre"): 105.0,
        ("drrqr", 0.5, "post"): 102.0,
    }
    first = headline(demo, perplexities(demo, "delta_net", numbers))
    assert list(draw_headline(first)) == ["delta_net"]
    svg = draw_headline(first)["delta_net"]
    for text in ("sliced", "recovered", "whole", "16 KiB", "8 KiB", "4 KiB", "75 % cut"):
        assert f">{text}</text>" in svg or f">{text}<" in svg, text
    assert ">refitted<" not in svg
    assert "Recovered, the paper’s way" in describe_headline(first)
    assert "Statecut’s way" not in describe_headline(first)
    assert draw_headline(first)["delta_net"] == svg


def test_sizes_have_units() -> None:
    assert [format_bytes(n) for n in (512, 8192, 3 << 20)] == ["512 bytes", "8 KiB", "3 MiB"]
