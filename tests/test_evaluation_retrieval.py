"""The retrieval protocol on documents made by hand: prompts, cuts and answers."""

from dataclasses import replace

import pytest
import tokenizers
from evaluation_runs import TEXT
from lm_eval.api.model import LM

from reproduction.new_tokenizers import train_tokenizer
from reproduction.suites.harness import make_task, measure
from reproduction.suites.retrieval import ANSWER_TOKENS, EXAMPLES, contains, cut

QA = {
    "context": "Paris is the capital. It is old.",
    "question": "The capital is",
    "answers": ["Paris"],
}
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
# Whose text is cut around the answer; of the others the beginning is kept.
SEEKING = ["based_fda", "based_nq", "based_squadv2", "based_swde"]


def long_text(task: str) -> str:
    return "context" if "context" in DOCUMENTS[task] else "text"


class Scripted(LM):
    """Answers every prompt by a function of it, and keeps the requests."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.requests = answer, []

    def generate_until(self, requests, **_):
        self.requests += [request.args for request in requests]
        return [self.answer(request.args[0]) for request in requests]

    loglikelihood = loglikelihood_rolling = None  # retrieval only generates


@pytest.mark.parametrize("task", DOCUMENTS)
def test_what_the_model_is_asked(task):
    """The prompt and nothing around it, greedily, to the end of the line, 48 tokens at most."""
    lm = Scripted(lambda prompt: "nothing")
    measure(lm, task, [DOCUMENTS[task]])
    ((prompt, settings),) = lm.requests
    assert prompt == PROMPTS[task]
    assert settings["until"] == ["\n"]
    assert (settings["max_gen_toks"], settings["do_sample"]) == (48, False)


@pytest.mark.parametrize(
    ("task", "text", "question", "prompt"),
    [
        # A question that ends the text already is not asked twice.
        ("based_swde", "a. Device:", "device", "a. Device:"),
        ("based_fda", "a. Device:", "device", "a. . Device:"),  # the space between them stays
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
    field = long_text(task)
    field_of_question = "question" if field == "context" else "key"
    document = {**DOCUMENTS[task], field: text, field_of_question: question}
    assert make_task(task, [document]).doc_to_text(document) == prompt


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    ("output", "right"),
    [("{}s", 1), (" it was {}, they say", 1), ("", 0), ("something else", 0)],
)
@pytest.mark.parametrize("answer", ["Paris", "K(0.4", "a+b?", "[x]*", "$5.00", "C:\\d"])
def test_an_answer_counts_wherever_it_is_in_whatever_case(listed, output, right, answer):
    document = {"answers": [answer]} if listed else {"value": answer}
    text = output.format(answer)
    for spelling in (text, text.upper(), text.lower()):
        assert contains(document, [spelling]) == {"contains": right}


@pytest.mark.parametrize(
    ("answers", "output", "right"),
    [(["3.5"], "315", 0), (["Paris", "Lutetia"], "lutetia", 1), (["", "Paris"], "anything", 0)],
)
def test_the_best_of_the_answers_that_are_not_empty_counts(answers, output, right):
    assert contains({"answers": answers}, [output]) == {"contains": right}


# Cuts, where a token is a byte: a window of ten tokens is ten letters.


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters") / "t"
    return train_tokenizer([TEXT], folder, vocabulary_size=257)


ALPHABET = "abcdefghijklmnopqrst"  # twenty letters


def ten_letters(tokenizer, task, text=ALPHABET, answer="absent", **more):
    field = long_text(task)
    document = {**DOCUMENTS[task], field: text, "key": "no such", **more}
    document |= {"answers": [answer], "value": answer}
    (short,) = cut([document], task, tokenizer, 10 + ANSWER_TOKENS)
    assert {**short, field: ""} == {**document, field: ""}
    return short[field]


@pytest.mark.parametrize("task", DOCUMENTS)
@pytest.mark.parametrize(
    ("answer", "around"),
    [("ab", "abcdefghij"), ("BC", "abcdefghij"), ("jk", "efghijklmn"), ("st", "nopqrst")],
)
def test_the_cut_is_centred_on_the_answer(letters, task, answer, around):
    """Half of the window before it and the rest from it on, or the beginning of the text."""
    assert ten_letters(letters, task, answer=answer) == (
        around if task in SEEKING else ALPHABET[:10]
    )


@pytest.mark.parametrize("task", ["based_fda", "based_swde"])
def test_key_and_value_both_draw_the_cut_and_the_first_wins(letters, task):
    assert ten_letters(letters, task, answer="qr", key="fg") == ALPHABET[:10]
    assert ten_letters(letters, task, answer="fg", key="qr") == ALPHABET[:10]


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


def test_an_absent_answer_may_be_there_under_another_name(letters):
    others = ["also absent", "jk"]
    assert ten_letters(letters, "based_nq", alt_answers=others) == "efghijklmn"


@pytest.mark.parametrize("task", DOCUMENTS)
def test_a_bos_is_one_of_the_tokens(letters, task):
    backend = tokenizers.Tokenizer.from_str(letters.backend.to_str())
    eos = backend.id_to_token(letters.eos)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{eos} $A", special_tokens=[(eos, letters.eos)]
    )
    with_bos = replace(letters, backend=backend)
    assert ten_letters(with_bos, task, answer="abc") == "abcdefghi"


def test_an_answer_of_one_character_is_left_out_where_it_is_looked_for(letters):
    assert cut([{**CLOZE, "value": "7"}], "based_squadv2", letters, 150) == []
    assert len(cut([{**QA, "answers": ["7"]}], "based_drop", letters, 150)) == 1


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
    for lm, score in ((knows, 1.0), (guesses, 0.0)):
        assert measure(lm, "demo_recall", documents)["metrics"]["contains"]["value"] == score
