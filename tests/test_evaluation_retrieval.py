"""The retrieval protocol on documents made by hand: prompts, cuts and answers."""

from dataclasses import replace

import pytest
import tokenizers
from evaluation_runs import TEXT
from lm_eval.api.model import LM

from reproduction.new_tokenizers import train_tokenizer
from reproduction.suites.harness import make_requests, make_task, measure
from reproduction.suites.retrieval import ANSWER_TOKENS, EXAMPLES, contains, cut
from statecut.data.tokenizer import load_tokenizer

CAPITAL = "Paris is the capital. It is old."
QA = {"context": CAPITAL, "question": "The capital is", "answers": ["Paris"]}
FIELD = {"text": "510(k) number K042. Device: lamp.", "key": "device", "value": "lamp"}
CLOZE = {"text": "The Normans came from Denmark.\nThe Normans came from ", "value": "Denmark"}

DOCUMENTS = {
    "based_drop": QA,
    "based_fda": FIELD,
    "based_nq": QA,
    "based_squadv2": CLOZE,
    "based_swde": FIELD,
    "based_triviaqa": {**QA, "context": "[DOC] [TLE] Paris is the capital. [PAR] It is old."},
}

PROMPTS = {
    "based_drop": "Paris is the capital. It is old. The capital is",
    "based_fda": "510(k) number K042. Device: lamp. Device:",
    "based_nq": "Paris is the capital. It is old. The capital is",
    "based_squadv2": "The Normans came from Denmark.\nThe Normans came from",
    "based_swde": "510(k) number K042. Device: lamp. Device:",
    "based_triviaqa": "Paris is the capital.  It is old. The capital is",
}

# What the text is in, and the field that holds what is looked for; None: the beginning is kept.
PLACES = {
    "based_drop": ("context", None),
    "based_fda": ("text", "value"),
    "based_nq": ("context", "answers"),
    "based_squadv2": ("text", "value"),
    "based_swde": ("text", "value"),
    "based_triviaqa": ("context", None),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    train_tokenizer([TEXT], folder, vocabulary_size=300)
    return load_tokenizer(folder)


class Scripted(LM):
    """Answers every prompt by a function of it, and keeps the requests."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.requests = answer, []

    def generate_until(self, requests, **_):
        self.requests += [request.args for request in requests]
        return [self.answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests, **_):
        raise AssertionError("retrieval only generates")

    loglikelihood_rolling = loglikelihood


@pytest.mark.parametrize("task", DOCUMENTS)
def test_what_the_model_is_asked(task):
    """The prompt and nothing around it, greedily, to the end of the line, 48 tokens at most."""
    lm = Scripted(lambda prompt: "nothing")
    measure(lm, task, make_requests(task, [DOCUMENTS[task]]))
    ((prompt, settings),) = lm.requests
    assert prompt == PROMPTS[task]
    assert settings["until"] == ["\n"]
    assert (settings["max_gen_toks"], settings["do_sample"]) == (48, False)


@pytest.mark.parametrize("task", DOCUMENTS)
def test_a_question_that_ends_the_text_already_is_not_asked_twice(task):
    document = DOCUMENTS[task]
    if task == "based_squadv2":
        return  # its text is the question
    field, _ = PLACES[task]
    ending = document.get("question", "device:")
    repeated = {**document, field: f"{document[field]} {ending}"}
    expected = PROMPTS[task]
    if task == "based_fda":
        expected = "510(k) number K042. Device: lamp. . Device:"  # the space between them stays
    assert make_task(task, [repeated]).doc_to_text(repeated) == expected


@pytest.mark.parametrize(
    ("task", "text", "question", "prompt"),
    [
        # FDA's spaces stay, which every other task strips.
        ("based_fda", "\n a \n b \n", "key", " a \n b . Key:"),
        ("based_swde", "\n a \n b \n", "key", "a \n b. Key:"),
        ("based_squadv2", "\n a \n b \n", None, "a \n b"),
        ("based_drop", "\n a \n b \n", " q ", "a \n b. q"),
        # What is compared with the ending is the key as it is, the prompt's begins with a capital.
        ("based_fda", "a ßk:ßK:", "ßk", "a . SSk:"),
        ("based_swde", "a KEY:key:", "key", "a. Key:"),
        # A question that ends the context: any number in any case, but in NQ one as it is.
        ("based_drop", "a Why?WHY?", "Why?", "a. Why?"),
        ("based_triviaqa", "a Why?WHY?", "Why?", "a. Why?"),
        ("based_nq", "a WHY?Why?", "Why?", "a WHY?. Why?"),
        # The marks of paragraphs are TriviaQA's, and hide a question that they stand around.
        ("based_triviaqa", "[DOC] a [PAR] Why? [PAR]", "Why?", "a  Why?. Why?"),
        ("based_nq", "[DOC] a [PAR]", "Why?", "[DOC] a [PAR]. Why?"),
        ("based_drop", "[DOC] a [PAR]", "Why?", "[DOC] a [PAR]. Why?"),
    ],
)
def test_what_a_prompt_keeps_of_its_text(task, text, question, prompt):
    field, _ = PLACES[task]
    field_of_question = "question" if field == "context" else "key"
    document = {**DOCUMENTS[task], field: text, field_of_question: question}
    assert make_task(task, [document]).doc_to_text(document) == prompt


@pytest.mark.parametrize("task", DOCUMENTS)
@pytest.mark.parametrize(
    ("output", "right"),
    [("{}s", 1), (" it was {}, they say", 1), ("", 0), ("something else", 0)],
)
@pytest.mark.parametrize("answer", ["Paris", "K(0.4", "a+b?", "[x]*", "$5.00", "C:\\d"])
def test_an_answer_counts_wherever_it_is_in_whatever_case(task, output, right, answer):
    listed = "answers" in DOCUMENTS[task]
    document = DOCUMENTS[task] | ({"answers": [answer]} if listed else {"value": answer})
    text = output.format(answer)
    for spelling in (text, text.upper(), text.lower()):
        assert contains(document, [spelling]) == {"contains": right}


@pytest.mark.parametrize(
    ("answers", "output", "right"),
    [(["3.5"], "315", 0), (["Paris", "Lutetia"], "lutetia", 1), (["", "Paris"], "anything", 0)],
)
def test_the_best_of_the_answers_that_are_not_empty_counts(answers, output, right):
    assert contains({"answers": answers}, [output]) == {"contains": right}


def filler(count: int) -> str:
    return " ".join(["the"] * count)


@pytest.mark.parametrize("task", DOCUMENTS)
@pytest.mark.parametrize(
    ("before", "after"), [(0, 400), (10, 400), (200, 200), (390, 10), (400, 0)]
)
@pytest.mark.parametrize("answer", ["zebra", "z(0.4+?"])
def test_the_cut_is_centred_on_the_answer(tokenizer, task, before, after, answer):
    """Half of the window before it and the rest after it, or the beginning of the text."""
    field, sought = PLACES[task]
    document = {**DOCUMENTS[task], field: f"{filler(before)} {answer} {filler(after)}".strip()}
    if "key" in document:
        document["key"] = "not in the text"
    if sought:
        document[sought] = [answer] if sought == "answers" else answer
    window = 150
    (short,) = cut([document], task, tokenizer, window)
    tokens = len(tokenizer.encode(short[field]))
    assert tokens <= window - 50
    assert {**short, field: ""} == {**document, field: ""}
    if sought is None:
        assert document[field].startswith(short[field])
        assert tokens == window - 50
        return
    left, _, right = short[field].partition(answer)
    assert answer in short[field]
    # The space before an answer may be a token of its own.
    assert len(left.split()) == pytest.approx(min(before, 50), abs=1)
    room = window - 50 - min(before, 50) - len(tokenizer.encode(f" {answer}"))
    assert len(right.split()) == pytest.approx(min(after, room), abs=1)


@pytest.mark.parametrize("task", ["based_fda", "based_swde"])
def test_key_and_value_both_draw_the_cut_and_the_first_wins(tokenizer, task):
    text = f"{filler(100)} size {filler(300)} zebra {filler(100)}"
    (short,) = cut([{"text": text, "key": "size", "value": "zebra"}], task, tokenizer, 150)
    assert "size" in short["text"]
    assert "zebra" not in short["text"]


# Where a token is a byte, a window of ten tokens is ten letters.


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters") / "t"
    return train_tokenizer([TEXT], folder, vocabulary_size=257)


ALPHABET = "abcdefghijklmnopqrst"  # twenty letters


def ten_letters(tokenizer, task, text=ALPHABET, answer="absent", **more):
    field, _ = PLACES[task]
    document = {**DOCUMENTS[task], field: text, "key": "no such", **more}
    document |= {"answers": [answer], "value": answer}
    (short,) = cut([document], task, tokenizer, 10 + ANSWER_TOKENS)
    return short[field]


SEEKING = [task for task, (_, sought) in PLACES.items() if sought]


@pytest.mark.parametrize("task", SEEKING)
def test_an_absent_answer_is_before_the_last_letter(letters, task):
    """Letter 19 of 20: half of the window before it, and what comes after it, one letter."""
    assert ten_letters(letters, task) == "opqrst"
    assert ten_letters(letters, task, text=f" {ALPHABET}\n") == "opqrst"
    assert ten_letters(letters, task, text="abc") == "abc"


@pytest.mark.parametrize("task", SEEKING)
def test_an_absent_answer_is_where_the_document_says(letters, task):
    """Only if more tokens than the window has come before the last letter."""
    assert ten_letters(letters, task, tok_pos=8) == "defghijklm"
    assert ten_letters(letters, task, tok_pos=2) == "abcdefghij"
    assert ten_letters(letters, task, text=ALPHABET[:11], tok_pos=2) == "fghijk"
    assert ten_letters(letters, task, text=ALPHABET[:12], tok_pos=2) == "abcdefghij"
    assert ten_letters(letters, task, answer="OP", tok_pos=2) == "jklmnopqrs"


@pytest.mark.parametrize("task", DOCUMENTS)
def test_a_bos_is_one_of_the_tokens(letters, task):
    backend = tokenizers.Tokenizer.from_str(letters.backend.to_str())
    eos = backend.id_to_token(letters.eos)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{eos} $A", special_tokens=[(eos, letters.eos)]
    )
    with_bos = replace(letters, backend=backend)
    assert ten_letters(with_bos, task, answer="abc") == "abcdefghi"
    assert ten_letters(letters, task, answer="abc") == "abcdefghij"


def test_an_absent_answer_may_be_there_under_another_name(tokenizer):
    text = f"{filler(100)} Lutetia {filler(300)}"
    document = {**QA, "context": text, "alt_answers": ["Parisii", "Lutetia"]}
    (short,) = cut([document], "based_nq", tokenizer, 150)
    assert "Lutetia" in short["context"]


def test_an_answer_of_one_character_is_left_out_where_it_is_looked_for(tokenizer):
    assert cut([{**CLOZE, "value": "7"}], "based_squadv2", tokenizer, 150) == []
    assert len(cut([{**QA, "answers": ["7"]}], "based_drop", tokenizer, 150)) == 1


def test_swde_is_cut_with_its_examples_and_asked_without(letters):
    text = f"{ALPHABET}{EXAMPLES} zebra is {ALPHABET}"
    (whole,) = cut([{**FIELD, "text": text}], "based_swde", letters, 2048)
    assert whole["text"] == text
    assert make_task("based_swde", [whole]).doc_to_text(whole) == f"{ALPHABET}. Device:"
    assert ten_letters(letters, "based_swde", text=text, answer="zebra") == "e... zebra"


def test_recall_tells_a_model_that_knows_from_one_that_does_not():
    documents = [
        {"context": f"The cat is {a}. The dog is {b}.", "question": "The dog is", "answers": [b]}
        for a, b in [("red", "blue"), ("tall", "small"), ("here", "there")]
    ]
    knows = Scripted(lambda prompt: f" {prompt.split('The dog is ')[1].split('.')[0]}.")
    guesses = Scripted(lambda prompt: " red.")
    silent = Scripted(lambda prompt: "")
    requests = make_requests("demo_recall", documents)
    scores = [
        measure(lm, "demo_recall", requests)["metrics"]["contains"]["value"]
        for lm in (knows, guesses, silent)
    ]
    assert scores == [1.0, 0.0, 0.0]
