"""A suite from a model folder to its JSON: what is refused, what is resumed, what is written."""

import json
import math
import os
import signal
import socket
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from evaluation_runs import TEXT, WORDS, column, make_model, run_config, write_lines
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate as run_lm_eval

from reproduction.config import Task, load_config, parse_config
from reproduction.config.evaluation import DATA_SETS, TASKS
from reproduction.suites import data, suite
from reproduction.suites.demo import make_demo_tasks
from reproduction.suites.harness import (
    SHIPPED,
    Requests,
    make_requests,
    make_task,
    measure,
    task_file,
)
from reproduction.suites.language_model import Encoder, LanguageModel
from reproduction.suites.protocol import COLUMNS, SUITES, check_protocol, check_task_file
from reproduction.suites.statistics import standard_error
from reproduction.suites.suite import evaluate
from statecut.data.packing import pack
from statecut.data.sources import Source
from statecut.data.tokenizer import load_tokenizer
from statecut.errors import InputError
from statecut.files import canonical_json, sha256

TASK_FIELDS = {
    "demo_prose": [{"page": line} for line in TEXT.split("\n")[:4]],
    "demo_last_word": [{"text": line[:60].rsplit(" ", 1)[0]} for line in TEXT.split("\n")[:6]],
    "demo_choice": [
        {"query": "the state of", "choices": [f"a {w}", f"{w} a key", f"run {w}"], "gold": i % 3}
        for i, w in enumerate(WORDS[:8])
    ],
    "demo_recall": [
        {"context": f"The {a} is {b}.", "question": f"The {a} is", "answers": [b]}
        for a, b in zip(WORDS[:5], WORDS[5:10], strict=True)
    ],
}
METRICS = {"demo_prose": "word_perplexity", "demo_last_word": "acc", "demo_choice": "acc_norm",
           "demo_recall": "contains"}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, documents in TASK_FIELDS.items():
        write_lines(folder / f"{name}.jsonl", documents)
    return folder


def all_four(files, **more):
    tasks = {name: column(name, METRICS[name], files / f"{name}.jsonl") for name in TASK_FIELDS}
    return run_config({"window": 40, "tasks": tasks, **more})


def accuracies(files, **changes):
    """All but the perplexity, with their mean; changes are of one task."""
    names = [name for name in METRICS if METRICS[name] != "word_perplexity"]
    tasks = {name: column(name, METRICS[name], files / f"{name}.jsonl") for name in names}
    tasks["demo_choice"] |= changes
    return run_config({"window": 40, "mean": "avg", "tasks": tasks})


def one(task, metric, file, **more):
    return run_config({"window": 40, "tasks": {"it": column(task, metric, file, **more)}})


def no_network(*_):
    raise AssertionError("a network was asked for")


# What is written


def test_the_json_says_what_was_measured_on_what(model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", no_network)
    result = evaluate(model, "suite", all_four(files), tmp_path / "out.json", cache=tmp_path / "c")
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert (result["suite"], result["protocol"], result["window"]) == ("suite", "test", 40)
    assert (result["device"], result["dtype"]) == ("cpu", "float32")
    assert result["versions"]["lm-eval"] == "0.4.13"
    assert "unknown" not in result["versions"].values()
    assert result["bootstrap"] == {"resamples": 1000, "seed": 0}
    for name, metric in METRICS.items():
        column = result["results"][name]
        assert (column["task"], column["metric"]) == (name, metric)
        assert column["stderr"] >= 0
        task = result["tasks"][name]
        assert (task["version"], task["shots"]) == (1, 0)
        assert task["documents"] == len(TASK_FIELDS[name])
        assert task["data"]["revision"].startswith("sha256:")


def test_the_mean_is_of_all_columns_or_of_none(model, files, tmp_path):
    results = evaluate(model, "suite", accuracies(files), tmp_path / "o", cache=tmp_path)["results"]
    values = [results[name]["value"] for name in results if name != "avg"]
    assert len(values) == 3
    assert results["avg"]["value"] == pytest.approx(sum(values) / 3)
    without = accuracies(files, not_attempted="no data")
    result = evaluate(model, "suite", without, tmp_path / "o", cache=tmp_path)
    for name in ("demo_choice", "avg"):
        assert result["results"][name] == {"not_attempted": "no data"}
    assert "demo_choice" not in result["tasks"]


# The language model


def generation(text, until="\n", limit=12):
    settings = {"until": [until], "max_gen_toks": limit, "do_sample": False}
    return Instance("generate_until", {}, (text, settings), 0, ("t", 0, 1))


PROMPTS = ["the state", TEXT[:90], "narrow heads run faster on", "a"]


@pytest.mark.parametrize("name", ["delta_net", "gated", "shared_head"])
def test_generation_from_the_state_is_that_from_the_whole_prefix(name, tmp_path):
    """Prompts of several lengths in one batch, against one at a time, read again for each token."""
    lm = LanguageModel(make_model(tmp_path, name), window=60)
    expected = []
    for text in PROMPTS:
        ids = lm.tok_encode(text)[12 - 60 :]
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(lm.model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(lm.tokenizer.backend.decode(ids[-12:]))
    assert len(set(expected)) > 1
    assert lm.generate_until([generation(text, until="\0") for text in PROMPTS]) == expected


@pytest.mark.parametrize("name", ["delta_net", "gated"])
def test_wider_batches_say_the_same(name, tmp_path):
    """As on a GPU, where widths and numbers of tokens are rounded up."""
    lm = LanguageModel(make_model(tmp_path, name), window=60)
    pairs = [Instance("loglikelihood", {}, (text, " a key"), 0) for text in PROMPTS]
    prompts = [generation(text, until="\0") for text in PROMPTS]
    shapes = []
    lm.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append((args[0].shape, kwargs.get("attention_mask"))),
        with_kwargs=True,
    )
    expected = lm.loglikelihood(pairs), lm.generate_until(prompts)
    lm.grain, shapes[:] = 16, []
    wide = lm.loglikelihood(pairs), lm.generate_until(prompts)
    assert wide[1] == expected[1]
    for scored, other in zip(wide[0], expected[0], strict=True):
        assert scored == (pytest.approx(other[0]), other[1])
    (scored, _), (read, mask), *steps = shapes
    assert scored[1] % 16 == read[1] % 16 == 0
    assert int(mask.sum()) % read[1] == 0
    assert all(step[1] == 1 for step, _ in steps)


def test_generation_ends_before_the_stop_and_at_the_end_of_text(model):
    lm = LanguageModel(model, window=60)
    letter, newline = (lm.tok_encode(text)[0] for text in ("a", "\n"))
    for tokens, text in [
        ([letter, newline, letter], "a"),
        ([letter, lm.tokenizer.eos], "a"),
        ([lm.tokenizer.eos], ""),
        ([letter] * 12, "a" * 12),
    ]:
        tokens = iter(tokens)
        lm.model.lm_head.forward = lambda states, tokens=tokens: torch.nn.functional.one_hot(
            torch.tensor([next(tokens)]), 300
        )
        assert lm.generate_until([generation("x")]) == [text]


def test_a_batch_that_does_not_fit_is_halved(model):
    requests = [
        Instance("loglikelihood", {}, (" ".join(WORDS[:n]), " a key"), 0) for n in range(1, 9)
    ]
    lm = LanguageModel(model, window=60)
    expected = lm.loglikelihood(requests)
    compute, sizes = lm._scores, []

    def small(rows):
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        sizes.append(len(rows))
        return compute(rows)

    lm._scores = small
    for halved, whole in zip(lm.loglikelihood(requests), expected, strict=True):
        assert halved == (pytest.approx(whole[0]), whole[1])
    assert max(sizes) == 2
    lm.batch = 4
    with pytest.raises(InputError, match=r"4 requests of .* do not fit into the memory of cpu"):
        lm.loglikelihood(requests)


def test_what_cannot_be_scored_or_generated_is_refused(model):
    lm = LanguageModel(model, window=8)
    with pytest.raises(InputError, match="tokens cannot be scored in a window of 8"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("a", TEXT[:200]), 0)])
    with pytest.raises(InputError, match="12 tokens to generate leave no room"):
        lm.generate_until([generation("x")])


def test_a_model_of_no_numbers_has_no_results(model, files, tmp_path, monkeypatch):
    """Scored by comparisons, it would look like chance."""

    def broken(*args, **kwargs):
        lm = LanguageModel(*args, **kwargs)
        lm.model.model.norm.weight.data[0] = float("nan")
        return lm

    monkeypatch.setattr(suite, "LanguageModel", broken)
    result = evaluate(model, "suite", all_four(files), tmp_path / "o.json", cache=tmp_path / "c")
    for name in METRICS:
        assert math.isnan(result["results"][name]["value"])
        assert result["results"][name]["stderr"] is None
    mean = evaluate(model, "suite", accuracies(files), tmp_path / "mean.json", cache=tmp_path / "c")
    assert math.isnan(mean["results"]["avg"]["value"])
    assert math.isnan(json.loads((tmp_path / "mean.json").read_text())["results"]["avg"]["value"])


# The guard


def edited_paper(path, value):
    data = yaml.safe_load(Path("config/paper.yaml").read_text())
    *parents, last = path.split("/")
    place = data["evaluation"]
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    # Tables would complain of a column that is gone; the guard has to.
    data["tables"], data["figures"] = {}, {}
    return parse_config(data, "mine.yaml")


DEVIATIONS = [
    ("suites/ppl/window", 2048, "suites.ppl.window: 2048, the paper's is 10000"),
    ("suites/ppl/tasks/lambada_ppl/metric", "acc", "lambada_ppl.metric: acc"),
    ("suites/ppl/tasks/wikitext_word_ppl/version", 1, "wikitext_word_ppl.version: 1"),
    ("suites/ppl/tasks/lambada_ppl/shots", 5, "lambada_ppl.shots: 5, the paper's is 0"),
    ("suites/ppl/tasks/lambada_ppl/file", "my.jsonl", "file without `sha256`: my.jsonl"),
    ("suites/ppl/tasks/more", column("lambada_openai", "acc"), "tasks.more.task:"),
    ("suites/ppl/tasks/lambada_ppl", column("demo_last_word", "perplexity", "x.jsonl"),
     "lambada_ppl.task: demo_last_word"),
    ("suites/ppl/tasks/lambada_ppl", None, "tasks.lambada_ppl.task: None"),
    ("suites/zero_shot/mean", "average", "zero_shot.mean: average, the paper's is zero_shot_avg"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), DEVIATIONS)
def test_a_deviation_from_the_paper_is_named(path, value, message):
    evaluation = edited_paper(path, value).evaluation
    with pytest.raises(InputError) as caught:
        check_protocol(evaluation)
    assert message in str(caught.value)
    check_protocol(evaluation.model_copy(update={"protocol": "mine"}))


def test_data_from_elsewhere_is_still_the_papers_protocol_if_it_is_pinned():
    stated = {"label": "L", "task": "lambada_openai", "metric": "perplexity", "version": 1}
    for more, note in [
        ({"revision": "refs/pr/1"}, "lambada_openai: data at refs/pr/1"),
        ({"file": "my.jsonl", "sha256": "ab" * 32}, "lambada_openai: from my.jsonl, abababababab"),
        ({}, ""),
    ]:
        config = edited_paper("suites/ppl/tasks/lambada_ppl", stated | more)
        check_protocol(config.evaluation)
        assert config.evaluation.suites["ppl"].tasks["lambada_ppl"].note == note


def test_a_file_with_another_hash_is_refused_and_one_with_its_hash_is_said(model, files, tmp_path):
    file = files / "demo_prose.jsonl"
    digest = sha256(file)
    for known, message in [
        (digest, ""),
        ("ab" * 32, f"its sha256 is {digest}, the configuration"),
    ]:
        stated = column("demo_prose", "word_perplexity", file, sha256=known)
        config = run_config({"window": 40, "tasks": {"it": stated}})
        if message:
            with pytest.raises(InputError, match=message):
                evaluate(model, "suite", config, tmp_path / "o.json", cache=tmp_path / "c")
        else:
            result = evaluate(model, "suite", config, tmp_path / "o.json", cache=tmp_path / "c")
            assert result["results"]["it"]["note"] == f"demo_prose: from {file}, {digest[:12]}"


def test_the_papers_own_configuration_passes():
    evaluation = load_config("config/paper.yaml").evaluation
    check_protocol(evaluation)
    assert {(name, key) for name in SUITES for key in evaluation.suites[name].tasks} == {*COLUMNS}
    for stated in evaluation.suites.values():
        for key, task in stated.tasks.items():
            check_task_file(key, task, task_file(task.task))


@pytest.mark.parametrize("change", [{"version": 3}, {"shots": 5}])
def test_what_lm_eval_would_run_otherwise_is_refused(files, tmp_path, change, model):
    stated = {**column("demo_prose", "word_perplexity", files / "demo_prose.jsonl"), **change}
    config = run_config({"window": 40, "tasks": {"it": stated}})
    with pytest.raises(InputError, match="is stated, lm-eval would run version 1 with none"):
        evaluate(model, "suite", config, tmp_path / "out.json", cache=tmp_path / "c")


@pytest.mark.parametrize("task", SHIPPED)
def test_the_data_sets_are_those_of_lm_eval(task):
    file = task_file(task)
    split = file.get("test_split") or file["validation_split"]
    assert DATA_SETS[task] == (file["dataset_path"], file["dataset_name"], split)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_file_that_reports_its_metrics(task):
    reported = {entry["metric"] for entry in task_file(task)["metric_list"]}
    assert reported >= set(TASKS[task])
    assert task in data.FORMS


# Killed and resumed


def killed(function) -> None:
    """Run in a process of its own, which has to end by SIGKILL."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        torch.set_num_threads(1)
        function()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("within", [False, True])
def test_a_killed_evaluation_goes_on_and_ends_the_same(model, files, tmp_path, within, monkeypatch):
    config = all_four(files, batch=1)
    whole = evaluate(model, "suite", config, tmp_path / "whole.json", cache=tmp_path / "other")
    cache, out = tmp_path / "cache", tmp_path / "out.json"
    measure, scores = suite.measure, LanguageModel._scores

    def run():
        calls = []

        def third(lm, name, documents):
            calls.append(name)
            if len(calls) == 3:
                if not within:
                    die()
                LanguageModel._scores = lambda self, rows: (
                    die() if calls[3:] else (calls.append("row") or scores(self, rows))
                )
            return measure(lm, name, documents)

        suite.measure = third
        evaluate(model, "suite", config, out, cache=cache)

    killed(run)
    assert not out.exists()
    assert len(list(cache.glob("*.json"))) == 2
    again = []
    monkeypatch.setattr(
        suite, "measure", lambda lm, name, d: again.append(name) or measure(lm, name, d)
    )
    evaluate(model, "suite", config, out, cache=cache)
    assert again == ["demo_choice", "demo_recall"]
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert json.loads(out.read_text()) == whole


def test_another_window_or_file_is_another_result(model, files, tmp_path):
    cache, file = tmp_path / "cache", tmp_path / "p.jsonl"
    write_lines(file, TASK_FIELDS["demo_prose"])
    config = one("demo_prose", "word_perplexity", file)
    first = evaluate(model, "suite", config, tmp_path / "1.json", cache=cache)
    write_lines(file, TASK_FIELDS["demo_prose"][:2])
    second = evaluate(model, "suite", config, tmp_path / "2.json", cache=cache)
    assert first["results"] != second["results"]
    assert len(list(cache.glob("*.json"))) == len(list((cache / "requests").iterdir())) == 2


ARC = {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
HELLASWAG = {"ctx_a": "a", "ctx_b": "b", "activity_label": "c", "endings": ["d", "e"], "label": "1"}
PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
WINOGRANDE = {"sentence": "The _ is.", "option1": "a", "option2": "b", "answer": "2"}
QA = {"context": "c", "question": "q", "answers": ["a"]}
FDA = {"text": "t", "key": "k", "value": "v"}

NONE = "has no right answer among its choices: {"
WRONG = [
    ("arc_easy", ARC, {"answerKey": "E"}, NONE),
    (
        "arc_challenge",
        ARC,
        {"choices": "B"},
        "arc_challenge needs the field 'choices' of type dict",
    ),
    ("hellaswag", HELLASWAG, {"label": "2"}, NONE),
    ("piqa", PIQA, {"label": -1}, NONE),
    ("winogrande", WINOGRANDE, {"sentence": "no gap"}, NONE),
    ("based_drop", QA, {"answers": [""]}, NONE),
    ("based_nq", QA, {"tok_pos": "7"}, "based_nq needs the field 'tok_pos' of type int"),
    ("based_swde", FDA, {"value": None}, "based_swde needs the field 'value' of type str"),
    ("demo_choice", TASK_FIELDS["demo_choice"][0], {"gold": 3}, NONE),
]


@pytest.mark.parametrize(("task", "right", "change", "message"), WRONG)
def test_a_wrong_document_is_one_line_with_its_place(task, right, change, message, tmp_path):
    def check():
        stated = parse_task(task, file=str(tmp_path / "x.jsonl"))
        return len(data.documents(stated))

    # Fields that the task does not read may be anything.
    write_lines(tmp_path / "x.jsonl", [right, {**right, "id": 1}, {**right, "id": ["a", None]}])
    assert check() == 3
    write_lines(tmp_path / "x.jsonl", [right, {**right, **change}])
    with pytest.raises(InputError) as caught:
        check()
    assert str(caught.value).startswith(f"{tmp_path}/x.jsonl, line 2: {message}")
    assert "\n" not in str(caught.value)


def parse_task(task, **more):
    return Task(label="L", task=task, metric=TASKS[task][0], version=1, **more)


DOCUMENTS = {
    **TASK_FIELDS,
    "wikitext": TASK_FIELDS["demo_prose"],
    "lambada_openai": [*TASK_FIELDS["demo_last_word"], {"text": "faster"}],  # an empty context
    "arc_easy": [ARC, {**ARC, "answerKey": "A"}],
    "arc_challenge": [ARC, {**ARC, "question": "what is a key"}],
    "hellaswag": [HELLASWAG, {**HELLASWAG, "ctx_b": " it [title] runs"}],
    "piqa": [PIQA, {**PIQA, "goal": "a wide key "}],
    "winogrande": [WINOGRANDE, {**WINOGRANDE, "option1": "state of"}],
    **{f"based_{name}": [QA, {**QA, "answers": ["b"]}] for name in ("drop", "nq", "triviaqa")},
    **{f"based_{name}": [FDA, {**FDA, "value": "a"}] for name in ("fda", "swde", "squadv2")},
}


@pytest.fixture(scope="module")
def lm(model):
    return LanguageModel(model, window=200)


@pytest.mark.parametrize("task", TASKS)
def test_the_numbers_are_those_of_lm_evals_evaluator(lm, task):
    """Which makes texts of the documents, and tokens of the texts, for each model anew."""
    documents = DOCUMENTS[task]
    plain = run_lm_eval(
        lm=lm,
        task_dict={"tasks": {task: make_task(task, documents)}, "groups": {}, "group_map": {}},
        bootstrap_iters=0,
    )
    samples = plain["samples"][task]
    requests = make_requests(task, documents, Encoder(lm.tokenizer))
    kept = Requests(**json.loads(canonical_json(vars(requests))))
    record = measure(lm, task, kept)
    assert record == measure(lm, task, requests)
    assert (record["documents"], record["shots"]) == (len(samples), plain["n-shot"][task])
    assert list(record["metrics"]) == samples[0]["metrics"]
    for metric, measured in record["metrics"].items():
        assert measured["value"] == plain["results"][task][f"{metric},none"]
        assert measured["stderr"] == standard_error(metric, [one[metric] for one in samples])


def test_what_a_task_asks_is_read_and_tokenised_for_the_first_model_alone(
    model, files, tmp_path, monkeypatch
):
    def again(*_, **__):
        raise AssertionError("it was made again")

    def results(out, **more):
        made = evaluate(model, "suite", all_four(files, **more), tmp_path / out, cache=tmp_path)
        return made["results"]["demo_prose"]["value"]

    first = results("first.json")
    monkeypatch.setattr(data, "documents", again)
    monkeypatch.setattr(type(load_tokenizer(model)), "encode", again)
    assert results("second.json", batch=64) == pytest.approx(first)
    with pytest.raises(AssertionError, match="made again"):
        results("third.json", window=50)


def test_a_downloaded_data_set_is_read_by_its_card(model, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", no_network)
    folder = tmp_path / ("c" * 40)
    (folder / "sub").mkdir(parents=True)
    rows = [{"goal": f"to {w}", "sol1": "a key", "sol2": w, "label": i % 2}
            for i, w in enumerate(WORDS[:6])]  # fmt: skip
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "sub/validation-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: validation\n    path: sub/validation-*\n---\n"
    )
    monkeypatch.setattr(data, "resolve", lambda *_, **__: folder)
    config = run_config({"window": 40, "tasks": {"it": column("piqa", "acc_norm")}})
    result = evaluate(model, "suite", config, tmp_path / "o.json", cache=tmp_path / "cache")
    assert result["tasks"]["it"]["documents"] == 6
    assert result["tasks"]["it"]["data"] == {
        "name": "baber/piqa/validation",
        "revision": "c" * 40,
    }
    assert len(data.documents(parse_task("piqa"))) == 6
    wrong = pyarrow.Table.from_pylist([*rows, {**rows[0], "label": -1}])
    pyarrow.parquet.write_table(wrong, folder / "sub/validation-00000-of-00001.parquet")
    with pytest.raises(InputError, match=f"{folder}, validation row 7: has no right answer"):
        evaluate(model, "suite", config, tmp_path / "o.json", cache=tmp_path / "cache2")
    (folder / "sub/validation-00000-of-00001.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        evaluate(model, "suite", config, tmp_path / "o.json", cache=tmp_path / "cache2")


# The demo's tasks


@pytest.fixture(scope="module")
def tokens(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("tokens") / "t"
    sentences = [f"When {line[:-2]}. Then {line[:-2]}." for line in TEXT.split("\n")]
    sentences = [" ".join(sentence.split()[:30]) + ". " + sentence for sentence in sentences]
    pack(
        [f"{s}\n\n{s}" for s in sentences], load_tokenizer(model), out, sequence_length=64,
        sequences={"held_out": 60}, source=Source("t", "1"), seed=0,
    )  # fmt: skip
    return out


def test_demo_tasks_are_the_same_every_time_and_of_the_right_shape(model, tokens, tmp_path):
    for name in "ab":
        make_demo_tasks(tokens, model, tmp_path / name, slice_name="held_out", force=False)
    for name in TASK_FIELDS:
        text = (tmp_path / "a" / f"{name}.jsonl").read_bytes()
        assert text == (tmp_path / "b" / f"{name}.jsonl").read_bytes()
        documents = [json.loads(line) for line in text.splitlines()]
        for document in documents:
            data._checked(name, document, "")
    choices = [
        json.loads(line) for line in (tmp_path / "a/demo_choice.jsonl").read_text().splitlines()
    ]
    for document in choices:
        assert len({" ".join(sorted(choice.split())) for choice in document["choices"]}) == 1
        assert len(set(document["choices"])) == 4
    golds = {document["gold"] for document in choices}
    assert len(golds) > 1
    assert golds <= {0, 1, 2, 3}
    recall = [
        json.loads(line) for line in (tmp_path / "a/demo_recall.jsonl").read_text().splitlines()
    ]
    for document in recall:
        assert f"{document['question']} {document['answers'][0]}." in document["context"]


def test_without_a_card_a_configuration_is_a_folder(tmp_path, monkeypatch):
    """The hub's branch of converted files has one for each, and no card: never all of them."""
    for name, count in (("default", 3), ("de", 5)):
        (tmp_path / name / "test").mkdir(parents=True)
        table = pyarrow.table({"text": [f"{name} {n}" for n in range(count)]})
        pyarrow.parquet.write_table(table, tmp_path / name / "test" / "0000.parquet")
    monkeypatch.setattr(data, "resolve", lambda *_, **__: tmp_path)
    task = parse_task("lambada_openai")
    assert len(data.documents(task)) == 3
