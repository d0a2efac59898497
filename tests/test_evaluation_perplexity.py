"""Perplexities through a suite against a page of plain PyTorch that shares no code with it."""

import math

import pytest
import torch
from evaluation_runs import WORDS, column, make_model, run_config, write_lines
from plain_perplexity import PlainModel, lambada, pages, wikitext

from reproduction.suites import data, language_model
from reproduction.suites.statistics import KEPT, resampled, spread
from reproduction.suites.suite import evaluate


def words(start: int, count: int) -> str:
    return " ".join(WORDS[(start + i * i) % len(WORDS)] for i in range(count))


def article(number: int, length: int) -> str:
    return (
        f" = Title {number} = \n \n {words(number, length)} , wide @-@ open ( {words(2, 3)} ) . \n"
        f" \n = = Section = = \n \n {words(number + 1, length)} . \n \n"
    )


ARTICLES = [article(1, 4), article(2, 33), article(3, 12)]
# The end of the line before a title belongs to neither article.
PAGES = [ARTICLES[0][:-1], ARTICLES[1][:-1], ARTICLES[2]]
PASSAGES = [words(i, 8 + 11 * i) for i in range(5)]


@pytest.fixture(scope="module", params=["delta_net", "gated"])
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "wiki.raw").write_text("".join(ARTICLES))
    write_lines(folder / "lambada.jsonl", [{"text": text} for text in PASSAGES])
    return folder


@pytest.fixture(scope="module")
def expected(model, files):
    """All three numbers, written out, by window."""
    plain = PlainModel(model)
    wiki, passages = files / "wiki.raw", files / "lambada.jsonl"
    return {n: (wikitext(plain, wiki, n), *lambada(plain, passages, n)) for n in (24, 200)}


@pytest.mark.parametrize(("window", "batch", "grain"), [(24, 1, 1), (24, None, 16), (200, 16, 1)])
def test_both_perplexities_are_those_of_plain_pytorch(
    model, files, expected, window, batch, grain, tmp_path, monkeypatch
):
    monkeypatch.setitem(language_model.GRAIN, "cpu", grain)  # widths are rounded up as on a GPU
    tasks = {
        "wiki": column("wikitext", "word_perplexity", files / "wiki.raw", version=2),
        "lambada": column("lambada_openai", "perplexity", files / "lambada.jsonl"),
        "accuracy": column("lambada_openai", "acc", files / "lambada.jsonl"),
    }
    config = run_config({"window": window, "batch": batch, "tasks": tasks})
    result = evaluate(model, "suite", config, tmp_path / "out.json", cache=tmp_path / "cache")
    assert abs(expected[24][0] / expected[200][0] - 1) > 1e-2  # the window matters
    values = [result["results"][name]["value"] for name in ("wiki", "lambada", "accuracy")]
    assert values == pytest.approx(expected[window], rel=1e-4)
    assert result["tasks"]["wiki"]["documents"] == 3
    documents = data.documents(config.evaluation.suites["suite"].tasks["wiki"])
    assert [document["page"] for document in documents] == pages(files / "wiki.raw") == PAGES


def test_a_bootstrapped_error_is_that_of_many_draws():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 500, (200,), generator=draw).tolist()
    nats = (3 + 0.5 * torch.randn(200, generator=draw)).tolist()
    pairs = [(-n * length, length) for n, length in zip(nats, lengths, strict=True)]
    # By the delta method: the error of a ratio of sums, times the perplexity.
    ratio = sum(n * length for n, length in zip(nats, lengths, strict=True)) / sum(lengths)
    nats_error = math.sqrt(
        sum((length * (n - ratio)) ** 2 for n, length in zip(nats, lengths, strict=True))
    ) / sum(lengths)
    error = math.exp(ratio) * nats_error
    assert spread("word_perplexity", pairs)[0] == pytest.approx(error, rel=0.1)
    assert spread("bits_per_byte", pairs)[0] == pytest.approx(nats_error / math.log(2), rel=0.1)


@pytest.mark.parametrize("metric", ["acc", "perplexity", "word_perplexity"])
def test_draws_spread_as_the_error_says_and_are_the_same_for_two_models(metric):
    draw = torch.Generator().manual_seed(1)
    hard = torch.randn(300, generator=draw)

    def items(shift: float) -> list:
        worse = hard + shift + 0.01 * torch.randn(300, generator=draw)
        if metric == "acc":
            return (worse < 0).double().tolist()
        if metric == "perplexity":
            return (-2 - worse).tolist()
        return [(float(-20 * (2 + one)), 20) for one in worse]

    one, other = items(0.0), items(0.1)
    error, kept = spread(metric, one)
    assert error == pytest.approx(float(resampled(metric, one).std()), rel=0.15)
    assert kept == pytest.approx(list(resampled(metric, one)[:KEPT]), rel=1e-6)
    apart = torch.tensor(kept) - torch.tensor(spread(metric, other)[1])
    assert apart.std() < error / 2
    assert spread(metric, one[:1]) == (None, None)
