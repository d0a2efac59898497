"""What a report says first: a picture and sentences that follow from a run's numbers."""

from dataclasses import replace

import pytest
from reporting_runs import DEMO

from reproduction.config import BASELINE, Variant
from reproduction.reporting.frame import Cell, Draws, Key, variant_key
from reproduction.reporting.headline import Headline, format_bytes

STATE = DEMO.figures["state_recovered"].model_copy(update={"tables": ("by_model",)})
RUN = DEMO.model_copy(update={"figures": {"state": STATE}})


def perplexities(config, model, numbers):
    """By method, ratio and stage; the documents of all are the same, and add no noise."""
    cells = {}
    for (method, ratio, stage), value in {(BASELINE, 0.0, "none"): 100.0, **numbers}.items():
        target = "" if method == BASELINE else config.methods[method].target
        variant = Variant(model, method, target, ratio, 0, stage, config.eps if target else "kept")
        draws = value and Draws("d", (value - 1, value, value + 1))
        cell = Cell(value, None, 30.0, 1, frozenset({"demo"}), "", draws)
        cells[variant_key(config, variant, "prose_word_ppl")] = cell
    return cells


def headline(numbers, config=RUN, model="delta_net"):
    return Headline.of(config, perplexities(config, model, numbers))


def noisy(headline, spread):
    cells = {key: replace(cell, spread=spread) for key, cell in headline.cells.items()}
    return replace(headline, cells=cells)


def test_the_cost_is_that_of_every_stage_that_was_measured():
    stages = {"pre": 112.0, "refit": 104.0, "post": None}
    first = headline({("drrqr", 0.5, stage): value for stage, value in stages.items()})
    assert first.cost() == (
        "Cutting half of the state by DRRQR (of 1 methods the lowest perplexity refitted, mean "
        "over models) changes perplexity on Prose of DeltaNet by <strong>+12.0 %</strong> as "
        "sliced and <strong>+4.0 %</strong> refitted."
    )
    assert "<strong>+4.0 %</strong> (within the noise) refitted" in str(noisy(first, 3.0).cost())
    second = perplexities(RUN, "gated_deltanet", {("drrqr", 0.5, "pre"): 103.0})
    both = Headline.of(RUN, {**first.cells, **second})
    assert "; of Gated DeltaNet by <strong>+3.0 %</strong> as sliced." in str(both.cost())


def test_it_is_about_the_best_method_at_the_last_stage_that_several_reached_on_every_model():
    numbers = {("drrqr", 0.5, "pre"): 110.0, ("l1", 0.5, "pre"): 108.0}
    # Neither a further cut nor a repair that one of them alone had decides.
    numbers |= {("drrqr", 0.75, "pre"): 111.0, ("l1", 0.75, "pre"): 900.0}
    first = headline(numbers | {("drrqr", 0.5, "refit"): 101.0})
    assert first.method == "l1"
    assert first.chosen_by == "of 2 methods the lowest perplexity as sliced, mean over models"
    assert f"cut by L1: {first.chosen_by}." in first.caption
    assert noisy(first, 1.0).chosen_by.endswith("mean over models; too close to tell apart: DRRQR")
    repaired = headline(numbers | {("drrqr", 0.5, "refit"): 101.0, ("l1", 0.5, "refit"): 102.0})
    assert repaired.method == "drrqr"
    assert repaired.chosen_by.startswith("of 2 methods the lowest perplexity refitted")
    # Rand was measured on one model alone.
    others = {("drrqr", 0.5, "pre"): 110.0, ("l1", 0.5, "pre"): 130.0}
    second = perplexities(RUN, "gated_deltanet", others)
    both = Headline.of(RUN, {**headline(numbers | {("rand", 0.5, "pre"): 101.0}).cells, **second})
    assert both.method == "drrqr"
    assert both.chosen_by.startswith("of 2 methods the lowest perplexity as sliced")


def test_sentences_are_about_cuts_with_the_runs_own_eps():
    first = headline({("drrqr", 0.75, "pre"): 112.0})
    kept = RUN.model_copy(update={"eps": "kept"})
    other = perplexities(kept, "delta_net", {("drrqr", 0.5, "pre"): 190.0})
    assert Headline.of(RUN, {**first.cells, **other}).sentences() == first.sentences()


def test_what_the_smaller_state_gives_is_bytes_and_what_was_timed():
    def timing(ratio, metric, value, stderr=0.0):
        width, method = (16, "") if ratio else (32, BASELINE)
        key = Key("delta_net", "none", method, "", ratio, width, "none", metric)
        return {key: Cell(value, None, stderr, 1, frozenset({"demo"}), "")}

    cells = perplexities(RUN, "delta_net", {("drrqr", 0.5, "pre"): 101.0})
    size = "With half cut, DeltaNet’s state is <strong>8 KiB</strong> a sequence instead of 16 KiB"
    assert Headline.of(RUN, cells).gain() == f"{size}."
    cells |= timing(0.0, "tokens_per_s", 100.0) | timing(0.5, "tokens_per_s", 125.0)
    cells |= timing(0.5, "decoding_tokens_per_s_1", 30.0)  # of the whole model it is missing
    for ratio, value in ((0.0, 40.0), (0.5, 42.0)):
        cells |= timing(ratio, "decoding_tokens_per_s_8", value, 1.0)
    assert Headline.of(RUN, cells).gain() == (
        f"{size}; the model runs <strong>1.25</strong> times as fast and generates text "
        "<strong>1.05</strong> times as fast at a batch of 8 (within the noise)."
    )
    # As a graph, where Python is no part of the time.
    cells |= timing(0.0, "graph_tokens_per_s", 200.0) | timing(0.5, "graph_tokens_per_s", 220.0)
    assert "the model runs <strong>1.10</strong> times" in str(Headline.of(RUN, cells).gain())
    assert [format_bytes(n) for n in (512, 8192, 3 << 20)] == ["512 bytes", "8 KiB", "3 MiB"]


@pytest.mark.parametrize("numbers", [{}, {("drrqr", 0.5, "pre"): None}])
def test_without_numbers_there_are_no_sentences_and_no_picture(numbers):
    assert headline(numbers) is None
    assert headline({("drrqr", 0.5, "pre"): 1.0}, RUN.model_copy(update={"figures": {}})) is None


def test_the_picture_names_the_stages_and_sizes_that_it_shows():
    numbers = {("drrqr", 0.75, "pre"): 120.0, ("drrqr", 0.5, "pre"): 105.0}
    pictures = headline(numbers | {("drrqr", 0.5, "post"): 102.0}).pictures()
    assert list(pictures) == ["delta_net"]
    for text in ("sliced", "recovered", "Baseline", "DRRQR", "16", "8", "4"):
        assert f">{text}<" in pictures["delta_net"], text
    assert ">refitted<" not in pictures["delta_net"]
