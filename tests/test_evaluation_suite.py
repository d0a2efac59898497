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
from reproduction.suites.harness import SHIPPED, make_task, measure, task_file
from reproduction.suites.language_model import LanguageModel
from reproduction.suites.protocol import SUITES, check_protocol, check_task_file
from reproduction.suites.statistics import spread
from reproduction.suites.suite import evaluate
from statecut.data.packing import pack
from statecut.data.sources import Source
from statecut.data.tokenizer import load_tokenizer
from statecut.errors import InputError
from statecut.files import sha256

LINES = TEXT.split("\n")
ARC = {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
HELLASWAG = {"ctx_a": "a", "ctx_b": "b", "activity_label": "c", "endings": ["d", "e"], "label": "1"}
PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
WINOGRANDE = {"sentence": "The _ is.", "option1": "a", "option2": "b", "answer": "2"}
QA = {"context": "c", "question": "q", "answers": ["a"]}
FDA = {"text": "t", "key": "k", "value": "v"}
DEMO = {
    "demo_prose": [{"page": line} for line in LINES[:4]],
    "demo_last_word": [{"text": line[:60].rsplit(" ", 1)[0]} for line in LINES[:6]],
    "demo_choice": [
        {"query": "the state of", "choices": [f"a {w}", f"{w} a key", f"run {w}"], "gold": i % 3}
        for i, w in enumerate(WORDS[:8])
    ],
    "demo_recall": [
        {"context": f"The {a} is {b}.", "question": f"The {a} is", "answers": [b]}
        for a, b in zip(WORDS[:5], WORDS[5:10], strict=True)
    ],
}
DOCUMENTS = {
    **DEMO,
    "wikitext": DEMO["demo_prose"],
    "lambada_openai": [*DEMO["demo_last_word"], {"text": "faster"}],  # an empty context
    "arc_easy": [ARC, {**ARC, "answerKey": "A"}],
    "arc_challenge": [ARC, {**ARC, "question": "what is a key"}],
    "hellaswag": [HELLASWAG, {**HELLASWAG, "ctx_b": " it [title] runs"}],
    "piqa": [PIQA, {**PIQA, "goal": "a wide key "}],
    "winogrande": [WINOGRANDE, {**WINOGRANDE, "option1": "state of"}],
    **{f"based_{name}": [QA, {**QA, "answers": ["b"]}] for name in ("drop", "nq", "triviaqa")},
    **{f"based_{name}": [FDA, {**FDA, "value": "a"}] for name in ("fda", "swde", "squadv2")},
}
METRICS = {"demo_prose": "word_perplexity", "demo_last_word": "acc", "demo_choice": "acc_norm",
           "demo_recall": "contains"}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def lm(model):
    return LanguageModel(model, window=200)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, documents in DEMO.items():
        write_lines(folder / f"{name}.jsonl", documents)
    return folder


def suite_of(files, *names, **more):
    """These of the demo's tasks, or all four."""
    tasks = {n: column(n, METRICS[n], files / f"{n}.jsonl") for n in names or METRICS}
    return run_config({"window": 40, "tasks": tasks, **more})


def one(task, metric, file=None, **more):
    return run_config({"window": 40, "tasks": {"it": column(task, metric, file, **more)}})


def parse_task(task, **more):
    return Task(label="L", task=task, metric=TASKS[task][0], version=1, **more)


def no_network(*_):
    raise AssertionError("a network was asked for")


# What is written


def test_the_json_says_what_was_measured_on_what(model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", no_network)
    result = evaluate(model, "suite", suite_of(files), tmp_path / "out.json")
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert (result["suite"], result["protocol"], result["window"]) == ("suite", "test", 40)
    assert (result["device"], result["dtype"]) == ("cpu", "float32")
    assert result["versions"]["lm-eval"] == "0.4.13"
    assert result["bootstrap"] == {"resamples": 1000, "seed": 0}
    for name, metric in METRICS.items():
        column = result["results"][name]
        assert (column["task"], column["metric"]) == (name, metric)
        assert column["stderr"] >= 0
        task = result["tasks"][name]
        assert (task["version"], task["shots"], task["documents"]) == (1, 0, len(DEMO[name]))
        assert task["data"]["revision"].startswith("sha256:")


def test_the_mean_is_of_all_columns_or_of_none(model, files, tmp_path):
    config = suite_of(files, "demo_last_word", "demo_choice", "demo_recall", mean="avg")
    results = evaluate(model, "suite", config, tmp_path / "o", cache=tmp_path)["results"]
    values = [results[name]["value"] for name in results if name != "avg"]
    assert len(values) == 3
    assert results["avg"]["value"] == pytest.approx(sum(values) / 3)
    left_out = config.model_dump()
    left_out["evaluation"]["suites"]["suite"]["tasks"]["demo_choice"]["not_attempted"] = "no data"
    result = evaluate(model, "suite", parse_config(left_out, "t"), tmp_path / "o", cache=tmp_path)
    for name in ("demo_choice", "avg"):
        assert result["results"][name] == {"not_attempted": "no data"}
    assert "demo_choice" not in result["tasks"]


@pytest.mark.parametrize("task", TASKS)
def test_the_numbers_are_those_of_lm_evals_evaluator(lm, task, tmp_path):
    file = write_lines(tmp_path / "task.jsonl", DOCUMENTS[task])
    documents = data.documents(parse_task(task, file=str(file)))
    plain = run_lm_eval(
        lm=lm,
        task_dict={"tasks": {task: make_task(task, documents)}, "groups": {}, "group_map": {}},
        bootstrap_iters=0,
    )
    samples = plain["samples"][task]
    record = measure(lm, task, documents)
    assert (record["documents"], record["shots"]) == (len(samples), plain["n-shot"][task])
    assert list(record["metrics"]) == samples[0]["metrics"]
    assert set(record["metrics"]) >= set(TASKS[task])
    for metric, measured in record["metrics"].items():
        assert measured["value"] == plain["results"][task][f"{metric},none"]
        assert measured["stderr"] == spread(metric, [one[metric] for one in samples])[0]


# The language model


def generation(text, until="\n"):
    settings = {"until": [until], "max_gen_toks": 12, "do_sample": False}
    return Instance("generate_until", {}, (text, settings), 0, ("t", 0, 1))


PROMPTS = ["the state", TEXT[:90], "narrow heads run faster on", "a"]


@pytest.mark.parametrize("grain", [1, 16])
@pytest.mark.parametrize("name", ["delta_net", "gated", "shared_head"])
def test_generation_from_the_state_is_that_from_the_whole_prefix(name, grain, tmp_path):
    """Prompts of several lengths in one batch, its width and number of tokens rounded up as on a
    GPU, against one at a time, read again for each token."""
    lm = LanguageModel(make_model(tmp_path, name), window=60)
    expected, shapes = [], []
    for text in PROMPTS:
        ids = lm.tok_encode(text)[12 - 60 :]
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(lm.model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(lm.tokenizer.backend.decode(ids[-12:]))
    assert len(set(expected)) > 1
    lm.grain = grain
    lm.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append((args[0].shape, kwargs.get("attention_mask"))),
        with_kwargs=True,
    )
    assert lm.generate_until([generation(text, until="\0") for text in PROMPTS]) == expected
    (read, mask), *steps = shapes
    assert read[1] % grain == 0
    assert grain == 1 or int(mask.sum()) % read[1] == 0
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


def test_a_batch_that_does_not_fit_is_halved_unless_its_size_was_asked_for(model):
    texts = [" ".join(WORDS[:n]) for n in range(1, 9)]
    requests = [Instance("loglikelihood", {}, (text, " a key"), 0) for text in texts]
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
    with pytest.raises(InputError, match="give the suite a smaller batch or window"):
        lm.loglikelihood(requests)


def test_a_text_longer_than_the_window_cannot_be_scored(lm):
    with pytest.raises(InputError, match="tokens cannot be scored in a window of 200"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("a", TEXT[:2000]), 0)])


def test_a_model_of_no_numbers_has_no_results(model, files, tmp_path, monkeypatch):
    """Scored by comparisons, it would look like chance."""

    def broken(*args, **kwargs):
        lm = LanguageModel(*args, **kwargs)
        lm.model.model.norm.weight.data[0] = float("nan")
        return lm

    monkeypatch.setattr(suite, "LanguageModel", broken)
    names = ("demo_last_word", "demo_choice", "demo_recall")
    for config in (suite_of(files), suite_of(files, *names, mean="avg")):
        evaluate(model, "suite", config, tmp_path / "o.json", cache=tmp_path / "c")
        results = json.loads((tmp_path / "o.json").read_text())["results"]
        assert all(math.isnan(result["value"]) for result in results.values())
        assert {result["stderr"] for name, result in results.items() if name != "avg"} == {None}


# The guard


def edited_paper(path, value):
    data = yaml.safe_load(Path("config/paper.yaml").read_text())
    *parents, last = path.split("/")
    place = data["evaluation"]["suites"]
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    # Tables would complain of a column that is gone; the guard has to.
    data["tables"], data["figures"] = {}, {}
    return parse_config(data, "mine.yaml")


LAMBADA = "('lambada_openai', 'perplexity', 1, 0)"
DEVIATIONS = [
    ("ppl/window", 2048, "suites.ppl, window: 2048, the paper's is 10000"),
    ("ppl/tasks/lambada_ppl/metric", "acc", f"'acc', 1, 0), the paper's is {LAMBADA}"),
    ("ppl/tasks/wikitext_word_ppl/version", 1, "wikitext_word_ppl: ('wikitext', 'word_perplexity'"),
    ("ppl/tasks/lambada_ppl/shots", 5, f"'perplexity', 1, 5), the paper's is {LAMBADA}"),
    ("ppl/tasks/lambada_ppl/file", "my.jsonl", "lambada_ppl.file without `sha256`: my.jsonl"),
    ("ppl/tasks/more", column("lambada_openai", "acc"), "more: ('lambada_openai', 'acc', 1, 0)"),
    ("ppl/tasks/lambada_ppl", None, f"lambada_ppl: None, the paper's is {LAMBADA}"),
    ("zero_shot/mean", "average", "zero_shot, mean: average, the paper's is zero_shot_avg"),
]


@pytest.mark.parametrize(("path", "value", "message"), DEVIATIONS)
def test_a_deviation_from_the_paper_is_named(path, value, message):
    evaluation = edited_paper(path, value).evaluation
    with pytest.raises(InputError) as caught:
        check_protocol(evaluation)
    assert message in str(caught.value)
    check_protocol(evaluation.model_copy(update={"protocol": "mine"}))


def test_data_from_elsewhere_is_still_the_papers_protocol_if_it_is_pinned():
    for more, note in [
        ({"revision": "refs/pr/1"}, "lambada_openai: data at refs/pr/1"),
        ({"file": "my.jsonl", "sha256": "ab" * 32}, "lambada_openai: from my.jsonl, abababababab"),
        ({}, ""),
    ]:
        stated = column("lambada_openai", "perplexity", **more)
        config = edited_paper("ppl/tasks/lambada_ppl", stated)
        check_protocol(config.evaluation)
        assert config.evaluation.suites["ppl"].tasks["lambada_ppl"].note == note


def test_the_papers_own_configuration_passes():
    evaluation = load_config("config/paper.yaml").evaluation
    check_protocol(evaluation)
    assert {*evaluation.suites} == {*SUITES}
    for stated in evaluation.suites.values():
        for key, task in stated.tasks.items():
            check_task_file(key, task, task_file(task.task))


def test_a_file_with_another_hash_is_refused_and_one_with_its_hash_is_said(model, files, tmp_path):
    file = files / "demo_prose.jsonl"
    digest = sha256(file)
    config = one("demo_prose", "word_perplexity", file, sha256=digest)
    result = evaluate(model, "suite", config, tmp_path / "o.json")
    assert result["results"]["it"]["note"] == f"demo_prose: from {file}, {digest[:12]}"
    config = one("demo_prose", "word_perplexity", file, sha256="ab" * 32)
    with pytest.raises(InputError, match=f"its sha256 is {digest}, the configuration"):
        evaluate(model, "suite", config, tmp_path / "o.json")


@pytest.mark.parametrize("change", [{"version": 3}, {"shots": 5}])
def test_what_lm_eval_would_run_otherwise_is_refused(files, tmp_path, change, model):
    config = one("demo_prose", "word_perplexity", files / "demo_prose.jsonl", **change)
    with pytest.raises(InputError, match="is stated, lm-eval would run version 1 with none"):
        evaluate(model, "suite", config, tmp_path / "out.json")


@pytest.mark.parametrize("task", SHIPPED)
def test_the_data_sets_are_those_of_lm_eval(task):
    file = task_file(task)
    split = file.get("test_split") or file["validation_split"]
    assert DATA_SETS[task] == (file["dataset_path"], file["dataset_name"], split)


# Killed and resumed


def killed(function) -> None:
    """Run in a process of its own, which has to end by SIGKILL."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        torch.set_num_threads(1)
        function()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_killed_evaluation_goes_on_and_ends_the_same(model, files, tmp_path, monkeypatch):
    config = suite_of(files, batch=1)
    evaluate(model, "suite", config, tmp_path / "whole.json")
    cache, out, begun = tmp_path / "cache", tmp_path / "out.json", []
    measure, scores = suite.measure, LanguageModel._scores

    def noted(lm, name, documents):
        begun.append(name)
        return measure(lm, name, documents)

    def scores_until_the_third_task(self, rows):
        if len(begun) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores(self, rows)

    monkeypatch.setattr(suite, "measure", noted)
    monkeypatch.setattr(LanguageModel, "_scores", scores_until_the_third_task)
    killed(lambda: evaluate(model, "suite", config, out, cache=cache))
    assert not out.exists()
    assert len(list(cache.glob("*.json"))) == 2
    evaluate(model, "suite", config, out, cache=cache)
    assert begun == ["demo_choice", "demo_recall"]
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_another_file_is_another_result(model, tmp_path):
    cache, file = tmp_path / "cache", tmp_path / "p.jsonl"
    config = one("demo_prose", "word_perplexity", file)
    for count in (4, 2):
        write_lines(file, DEMO["demo_prose"][:count])
        result = evaluate(model, "suite", config, tmp_path / "o.json", cache=cache)
        assert result["tasks"]["it"]["documents"] == count


# Documents

NONE = "has no right answer among its choices: {"
WRONG = [
    ("arc_easy", {"answerKey": "E"}, NONE),
    ("arc_challenge", {"choices": "B"}, "arc_challenge needs the field 'choices' of type dict"),
    ("hellaswag", {"label": "2"}, NONE),
    ("piqa", {"label": -1}, NONE),
    ("winogrande", {"sentence": "no gap"}, NONE),
    ("based_drop", {"answers": [""]}, NONE),
    ("based_nq", {"tok_pos": "7"}, "based_nq needs the field 'tok_pos' of type int"),
]


@pytest.mark.parametrize(("task", "change", "message"), WRONG)
def test_a_wrong_document_is_one_line_with_its_place(task, change, message, tmp_path):
    right, file = DOCUMENTS[task][0], tmp_path / "x.jsonl"
    stated = parse_task(task, file=str(file))
    # Fields that the task does not read may be anything.
    write_lines(file, [right, {**right, "id": 1}, {**right, "id": ["a", None]}])
    assert len(data.documents(stated)) == 3
    write_lines(file, [right, {**right, **change}])
    with pytest.raises(InputError) as caught:
        data.documents(stated)
    assert str(caught.value).startswith(f"{file}, line 2: {message}")
    assert "\n" not in str(caught.value)


def test_a_downloaded_data_set_is_read_by_its_card(model, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", no_network)
    folder = tmp_path / ("c" * 40)
    file = folder / "sub/validation-00000-of-00001.parquet"
    file.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([PIQA] * 6), file)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: validation\n    path: sub/validation-*\n---\n"
    )
    monkeypatch.setattr(data, "resolve", lambda *_, **__: folder)
    result = evaluate(model, "suite", one("piqa", "acc_norm"), tmp_path / "o.json")
    assert result["tasks"]["it"]["documents"] == 6
    assert result["tasks"]["it"]["data"] == {"name": "baber/piqa/validation", "revision": "c" * 40}
    wrong = pyarrow.Table.from_pylist([PIQA, {**PIQA, "label": -1}])
    pyarrow.parquet.write_table(wrong, file)
    with pytest.raises(InputError, match=f"{folder}, validation row 2: has no right answer"):
        data.documents(parse_task("piqa"))


def test_without_a_card_a_configuration_is_a_folder(tmp_path, monkeypatch):
    """The hub's branch of converted files has one for each, and no card: never all of them."""
    for name, count in (("default", 3), ("de", 5)):
        (tmp_path / name / "test").mkdir(parents=True)
        table = pyarrow.table({"text": [f"{name} {n}" for n in range(count)]})
        pyarrow.parquet.write_table(table, tmp_path / name / "test" / "0000.parquet")
    monkeypatch.setattr(data, "resolve", lambda *_, **__: tmp_path)
    assert len(data.documents(parse_task("lambada_openai"))) == 3


def test_demo_tasks_are_the_same_every_time_and_of_the_right_shape(model, tmp_path):
    sentences = [f"When {line[:-2]}. Then {line[:-2]}." for line in LINES]
    sentences = [" ".join(sentence.split()[:30]) + ". " + sentence for sentence in sentences]
    texts, words = [f"{s}\n\n{s}" for s in sentences], load_tokenizer(model)
    sizes = {"sequence_length": 64, "sequences": {"h": 60}}
    pack(texts, words, tmp_path / "t", **sizes, source=Source("t", "1"), seed=0)
    for name in "ab":
        make_demo_tasks(tmp_path / "t", model, tmp_path / name, slice_name="h", force=False)
    made = {}
    for name in DEMO:
        file = tmp_path / "a" / f"{name}.jsonl"
        assert file.read_bytes() == (tmp_path / "b" / f"{name}.jsonl").read_bytes()
        made[name] = data.documents(parse_task(name, file=str(file)))
    for document in made["demo_choice"]:
        assert len({" ".join(sorted(choice.split())) for choice in document["choices"]}) == 1
        assert len(set(document["choices"])) == 4
    golds = {document["gold"] for document in made["demo_choice"]}
    assert 1 < len(golds) <= len(golds | {0, 1, 2, 3}) == 4
    for document in made["demo_recall"]:
        assert f"{document['question']} {document['answers'][0]}." in document["context"]
