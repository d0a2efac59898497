"""The six retrieval tasks: how a document becomes a prompt, and when an answer counts.

The protocol is that of HazyResearch/prefix-linear-attention, which the paper names: a text is cut
to the window around the first place of its answer, the model reads it and a question, writes one
line of at most 48 tokens, and is right if the answer occurs in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keycut.data.tokenizer import Tokenizer
from keycut.errors import InputError

Document = dict[str, Any]

# Tokens of the window kept free for the answer.
ANSWER_TOKENS = 50
# SWDE's texts go on with examples after these words.
EXAMPLES = "Summary of information above..."


@dataclass(frozen=True)
class Text:
    """Where a task's long text is, and the fields it is cut around; none: its beginning stays."""

    field: str
    around: tuple[str, ...] = ()


TEXTS = {
    "based_drop": Text("context"),
    "based_fda": Text("text", around=("key", "value")),
    "based_nq": Text("context", around=("answers",)),
    "based_squadv2": Text("text", around=("value",)),
    "based_swde": Text("text", around=("key", "value")),
    "based_triviaqa": Text("context"),
}


def cut(
    documents: Iterable[Document], task: str, tokenizer: Tokenizer, window: int
) -> list[Document]:
    """The documents, their texts cut to the window less the answer.

    As in the reference, documents with an answer of fewer than two characters are left out where
    it is looked for: such an answer is found anywhere.
    """
    if window <= ANSWER_TOKENS:
        raise InputError(
            f"window {window}: {task} keeps {ANSWER_TOKENS} tokens of it for the answer"
        )
    where = TEXTS[task]
    shortened = []
    for document in documents:
        sought = [_first(document[field]) for field in where.around]
        if all(len(text) > 1 for text in sought):
            text = document[where.field].split(EXAMPLES)[0].strip()
            place = _place(text, sought, document.get("alt_answers") or ())
            text = _cut(text, place, tokenizer, window - ANSWER_TOKENS)
            shortened.append({**document, where.field: text})
    return shortened


def _first(answer: str | list[str]) -> str:
    return answer if isinstance(answer, str) else answer[0]


def _place(text: str, sought: list[str], others: Iterable[str]) -> int:
    """Where the first of the texts sought begins, in characters; 0 if none is sought."""
    if not sought:
        return 0
    for candidates in (sought, *([other] for other in others)):
        found = [match.start() for answer in candidates if (match := _search(answer, text))]
        if found:
            return min(found)
    # The reference then looks at the end of the text, without saying so.
    return len(text)


def _cut(text: str, place: int, tokenizer: Tokenizer, length: int) -> str:
    """At most `length` tokens: half of them before `place`, the others from there on.

    What half of the window does not reach before a place near the beginning is given to what
    comes after it; near the end nothing is given back. That is the reference's arithmetic.
    """
    tokens = tokenizer.encode(text)
    middle = len(tokenizer.encode(text[:place]))
    start = max(0, middle - length // 2)
    return tokenizer.backend.decode(list(tokens[start : start + length]), skip_special_tokens=True)


def _search(answer: str, text: str) -> re.Match[str] | None:
    return re.search(re.escape(answer), text, re.IGNORECASE)


# Prompts, as the task files name them.


def context_prompt(document: Document) -> str:
    """DROP, NQ and TriviaQA: `context. question`."""
    question = document["question"].strip()
    context = re.sub(r"\[(PAR|DOC|TLE)\]", "", document["context"])
    return f"{_without_ending(context.strip(), question).strip().strip('.')}. {question}"


def key_prompt(document: Document) -> str:
    """FDA and SWDE: `text. Key:`."""
    question = f"{document['key'][:1].upper()}{document['key'][1:]}:"
    return f"{_without_ending(document['text'], question).strip().strip('.')}. {question}"


def cloze_prompt(document: Document) -> str:
    """SQuAD: its text ends where the answer begins."""
    return document["text"].strip()


def _without_ending(text: str, question: str) -> str:
    """Some texts end with the question already."""
    while question and text.lower().endswith(question.lower()):
        text = text[: -len(question)]
    return text


# Answers


def answers(document: Document) -> list[str]:
    """What counts as right. Used as a target by the task files."""
    found = document["answers"] if "answers" in document else [document["value"]]
    if not any(found):
        raise InputError(f"no answer is given to {str(document.get('question'))[:80]!r}")
    return [answer for answer in found if answer]


def contains(document: Document, outputs: list[str]) -> dict[str, int]:
    """Whether one of the answers occurs in the output, in capitals or not."""
    (output,) = outputs
    return {"contains": int(any(_search(answer, output) for answer in answers(document)))}
