"""Perplexities through a suite against a page of plain PyTorch that shares no code with it."""

import math

import pytest
import torch
from evaluation_runs import WORDS, column, make_model, run_config, write_lines
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from plain_model import plain_logits

from keycut.data.tokenizer import load_tokenizer
from keycut.evaluation import evaluate
from keycut.evaluation.statistics import standard_error
from keycut.models import load


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


def log_likelihoods(model, ids: list[int], first: int) -> list[float]:
    """Of ids[first:], each given all before it."""
    with torch.no_grad():
        logits = plain_logits(model, torch.tensor(ids[:-1])).double()
    scores = torch.log_softmax(logits, -1)
    return [float(scores[i - 1, ids[i]]) for i in range(first, len(ids))]


def rolling(model, ids: list[int], bos: int, window: int) -> float:
    """Every token once: full windows end to end, the last pushed back to be full as well."""
    row, total = [bos, *ids], 0.0
    done = 1
    while done < len(row):
        end = min(done + window, len(row))
        start = max(0, end - window - 1)
        total += sum(log_likelihoods(model, row[start:end], done - start))
        done = end
    return total


@pytest.fixture(scope="module")
def expected(model):
    """Both perplexities, written out, by window."""
    plain, tokenizer = load(model), load_tokenizer(model)

    def at(window: int) -> tuple[float, float]:
        total = sum(
            rolling(
                plain, list(tokenizer.encode(wikitext_detokenizer({"page": page}))),
                tokenizer.bos, window,
            )
            for page in PAGES
        )  # fmt: skip
        # lm-eval counts the nothing before a leading and after a trailing space as words.
        wiki = math.exp(-total / sum(len(page.split()) + 2 for page in PAGES))
        nats = []
        for text in PASSAGES:
            context, word = text.rsplit(" ", 1)
            seen = list(tokenizer.encode(context))
            ids = [*seen, *tokenizer.encode(" " + word)][-window - 1 :]
            nats.append(
                sum(log_likelihoods(plain, ids, len(ids) - len(tokenizer.encode(" " + word))))
            )
        return wiki, math.exp(-sum(nats) / len(nats))

    return {window: at(window) for window in (24, 200)}


@pytest.mark.parametrize("batch", [1, 16, None])
@pytest.mark.parametrize("window", [24, 200])
def test_both_perplexities_are_those_of_plain_pytorch(
    model, files, expected, window, batch, tmp_path
):
    config = run_config(
        {
            "window": window,
            "batch": batch,
            "tasks": {
                "wiki": column("wikitext", "word_perplexity", files / "wiki.raw", version=2),
                "lambada": column("lambada_openai", "perplexity", files / "lambada.jsonl"),
            },
        }
    )
    result = evaluate(model, "suite", config, tmp_path / "out.json", cache=tmp_path / "cache")
    wiki, lambada = expected[window]
    assert result["results"]["wiki"]["value"] == pytest.approx(wiki, rel=1e-4)
    assert result["results"]["lambada"]["value"] == pytest.approx(lambada, rel=1e-4)
    assert result["tasks"]["wiki"]["documents"] == 3
    assert result["window"] == window


def test_the_two_windows_differ(expected):
    """Or the comparison would say nothing of the window."""
    assert abs(expected[24][0] / expected[200][0] - 1) > 1e-2


def test_a_bootstrapped_error_is_that_of_many_draws():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 500, (200,), generator=draw).tolist()
    nats = (3 + 0.5 * torch.randn(200, generator=draw)).tolist()
    pairs = [(-n * length, length) for n, length in zip(nats, lengths, strict=True)]
    # By the delta method: the error of a ratio of sums, times the perplexity.
    ratio = sum(n * length for n, length in zip(nats, lengths, strict=True)) / sum(lengths)
    spread = math.sqrt(
        sum((length * (n - ratio)) ** 2 for n, length in zip(nats, lengths, strict=True))
    ) / sum(lengths)
    assert standard_error("word_perplexity", pairs) == pytest.approx(
        math.exp(ratio) * spread, rel=0.1
    )
    assert standard_error("bits_per_byte", pairs) == pytest.approx(spread / math.log(2), rel=0.1)


def test_the_error_of_an_accuracy_and_of_a_single_document():
    assert standard_error("acc", [0, 1, 1, 1]) == pytest.approx(0.25)
    assert standard_error("perplexity", [-2.0]) is None
