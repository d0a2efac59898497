"""The six retrieval tasks: how a document becomes a prompt, and when an answer counts.

The protocol is that of HazyResearch/prefix-linear-attention (7490f22), which the paper names: a
text is cut to the window around the first occurrence of its answer, the model reads it and a
question, writes one line of at most 48 tokens, and is right if the answer occurs in it. Prompts are
the reference's to the token, apparent oversights included, so that numbers can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from statecut.data.tokenizer import Tokenizer
from statecut.errors import InputError

Document = dict[str, Any]

# Tokens of the window kept free for the answer.
ANSWER_TOKENS = 50
# SWDE's texts go on with examples after these words; they count when a text is cut.
EXAMPLES = "Summary of information above..."


# The field of a task's long text, and those it is cut around; without any its beginning stays.
TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "based_drop": ("context", ()),
    "based_fda": ("text", ("key", "value")),
    "based_nq": ("context", ("answers",)),
    "based_squadv2": ("text", ("value",)),
    "based_swde": ("text", ("key", "value")),
    "based_triviaqa": ("context", ()),
}


def cut(documents: list[Document], task: str, tokenizer: Tokenizer, window: int) -> list[Document]:
    """The documents, their texts cut to the window less the answer.

    As in the reference, documents with an answer of fewer than two characters are left out where
    it is looked for: such an answer is found anywhere.
    """
    if window <= ANSWER_TOKENS:
        raise InputError(
            f"window {window}: {task} keeps {ANSWER_TOKENS} tokens of it for the answer"
        )
    field, around = TEXTS[task]
    shortened = []
    for document in documents:
        answers = [document[name] for name in around]
        sought = [answer if isinstance(answer, str) else answer[0] for answer in answers]
        if all(len(answer) > 1 for answer in sought):
            short = _cut(document, field, sought, tokenizer, window - ANSWER_TOKENS)
            shortened.append({**document, field: short})
    return shortened


def _cut(
    document: Document, field: str, sought: list[str], tokenizer: Tokenizer, length: int
) -> str:
    """At most `length` tokens: half of them before the answer, the others from there on.

    Near the beginning more than half are from there on; near the end there are fewer in all. A bos,
    where the tokenizer adds one, counts. An answer that does not occur has the place -1, before the
    last character; in a text of more than `length` tokens `tok_pos` replaces it.
    """
    encode, text = tokenizer.backend.encode, document[field].strip()
    place = _place(text, sought, document.get("alt_answers") or ()) if sought else 0
    middle = len(encode(text[:place]).ids)
    if place == -1 and middle > length:
        middle = document.get("tok_pos", middle)
    start = max(0, middle - length // 2)
    kept = encode(text).ids[start : start + length]
    return tokenizer.backend.decode(kept, skip_special_tokens=True)


def _place(text: str, sought: list[str], others: Iterable[str]) -> int:
    """The place in characters of the first text sought, or of the first other name of the answer
    that occurs; -1 if none does."""
    for candidates in (sought, *([other] for other in others)):
        places = [match.start() for answer in candidates if (match := _search(answer, text))]
        if places:
            return min(places)
    return -1


def _search(answer: str, text: str) -> re.Match[str] | None:
    return re.search(re.escape(answer), text, re.IGNORECASE)


# Prompts, as the task files name them.


def drop_prompt(document: Document) -> str:
    """`context. question`."""
    return _with_question(document["context"].strip(), document["question"].strip())


def triviaqa_prompt(document: Document) -> str:
    """The same without the marks of its paragraphs."""
    context = re.sub(r"\[(PAR|DOC|TLE)\]", "", document["context"].strip())
    return _with_question(context, document["question"].strip())


def nq_prompt(document: Document) -> str:
    """The same, but a question that ends the context goes once only, and as it is spelled."""
    question = document["question"].strip()
    return f"{document['context'].strip().removesuffix(question).strip().strip('.')}. {question}"


def fda_prompt(document: Document) -> str:
    """`text. Key:`, with the spaces that the text begins or ends with."""
    text = _without_ending(document["text"], f"{document['key']}:")
    return f"{text.strip(chr(10)).strip('.')}. {_capitalised(document['key'])}:"


def swde_prompt(document: Document) -> str:
    """`text. Key:`."""
    text = document["text"].split(EXAMPLES)[0]
    text = _without_ending(text, f"{document['key']}:")
    return f"{text.strip().strip('.')}. {_capitalised(document['key'])}:"


def squad_prompt(document: Document) -> str:
    """Its text ends where the answer begins."""
    return document["text"].strip()


def _with_question(context: str, question: str) -> str:
    return f"{_without_ending(context, question).strip().strip('.')}. {question}"


def _without_ending(text: str, question: str) -> str:
    """Some texts end with the question already."""
    while question and text.lower().endswith(question.lower()):
        text = text[: -len(question)]
    return text


def _capitalised(key: str) -> str:
    return key[0].upper() + key[1:]


# Answers


def answers(document: Document) -> list[str]:
    """What counts as right. Used as a target by the task files."""
    candidates = document["answers"] if "answers" in document else [document["value"]]
    # An empty one would be found in any output.
    return [answer for answer in candidates if answer]


def contains(document: Document, outputs: list[str]) -> dict[str, int]:
    """Whether one of the answers occurs in the output, in capitals or not."""
    (output,) = outputs
    return {"contains": int(any(_search(answer, output) for answer in answers(document)))}
