"""Tokenizers as folders: `tokenizer.json`, and `tokenizer_config.json` with the special tokens.

Such a folder loads with `AutoTokenizer.from_pretrained`. Here it is read with the `tokenizers`
library, which imports in 0.05 s where transformers takes five.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from statecut.errors import InputError
from statecut.files import read_json, sha256


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer. Its ids lie in [0, vocabulary_size)."""

    name: str
    digest: str
    backend: tokenizers.Tokenizer
    vocabulary_size: int
    bos: int | None
    eos: int

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int64, without bos and eos; a text that spells a special token has none."""
        # Unlike encode(), this releases the GIL.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer in a folder with `tokenizer.json`."""
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{folder}: no tokenizer.json: copy it and tokenizer_config.json from the original "
            "model; for one that has tiktoken.model instead, docs/reference/architectures.md says "
            "how it is made"
        )
    backend = load_backend(file)
    eos = _special(folder, backend, "eos_token")
    if eos is None:
        raise InputError(
            f"{folder}: tokenizer_config.json names no eos_token, which ends documents: name it "
            "there, or copy the file from the original model"
        )
    return Tokenizer(
        name=folder.resolve().name,
        digest=sha256(file),
        backend=backend,
        # Not the number of pieces: ids may have gaps.
        vocabulary_size=max(backend.get_vocab().values()) + 1,
        bos=_special(folder, backend, "bos_token"),
        eos=eos,
    )


def load_backend(file: Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json` without truncation, padding and special tokens."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{file}: not a tokenizer ({error})") from None
    backend.no_truncation()
    backend.no_padding()
    # A document that spells "</s>" has those four characters, not the end of a document.
    backend.encode_special_tokens = True
    return backend


def _special(folder: Path, backend: tokenizers.Tokenizer, role: str) -> int | None:
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        token = read_json(file).get(role) if file.is_file() else None
        if token is not None:
            piece = token["content"] if isinstance(token, dict) else token
            number = backend.token_to_id(piece)
            if number is None:
                raise InputError(f"{file}: {role} {piece!r} is not in tokenizer.json")
            return number
    return None


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """An error if the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocabulary_size > vocab_size:
        raise InputError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocabulary_size} ids, the model's "
            f"vocab_size is {vocab_size}: it must be at least as large"
        )
