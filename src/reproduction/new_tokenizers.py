"""New tokenizer folders: trained on a text, or converted from sentencepiece."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from statecut.data.progress import Progress
from statecut.data.tokenizer import Tokenizer, load_tokenizer
from statecut.errors import InputError
from statecut.files import atomic_write, write_json

END_OF_TEXT = "<|endoftext|>"
# Every character of the basic plane.
_CHARACTERS = "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x10000)]))


def train_tokenizer(
    documents: Iterable[str], out: Path | str, *, vocabulary_size: int
) -> Tokenizer:
    """Train a byte-level BPE on a stream. The same text gives the same bytes.

    `<|endoftext|>` is its only special token, both eos and bos: it ends every document, and so
    precedes the next.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    with atomic_write(out, force=True, folder=True) as aside:
        backend.train_from_iterator(_counted(documents), trainer)
        if backend.get_vocab_size() != vocabulary_size:  # never less than 257, all bytes and eos
            raise InputError(
                f"vocabulary_size {vocabulary_size}: the text gives {backend.get_vocab_size()} "
                "pieces; ask for so many, or give more text"
            )
        _save(backend, aside, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    return load_tokenizer(out)


def _counted(documents: Iterable[str]) -> Iterator[str]:
    progress = Progress("training the tokenizer")
    for text in documents:
        progress.add(documents=1)
        yield text


def convert_sentencepiece(model: Path | str, out: Path | str) -> Tokenizer:
    """Convert a sentencepiece BPE `.model` to a tokenizer folder that gives the same ids.

    The result is compared with sentencepiece on texts made to find a difference, and not written
    if there is one. Models that normalise text, that lose unknown characters, or that are no BPE
    are refused. The tokenizer adds no bos: `pack` does.
    """
    from sentencepiece import SentencePieceProcessor

    with atomic_write(out, force=True, folder=True) as aside:
        try:
            processor = SentencePieceProcessor(model_file=str(model))
        except (OSError, RuntimeError) as error:
            raise InputError(f"{model}: not a sentencepiece model ({error})") from None
        backend = _from_sentencepiece(processor, model)
        for text in _difficult_texts(processor):
            if backend.encode(text, add_special_tokens=False).ids != processor.encode(text):
                raise InputError(
                    f"{model}: not a BPE that can be converted exactly; it disagrees on {text!r}"
                )
        roles = {role: getattr(processor, f"{role}_id")() for role in ("bos", "eos", "unk")}
        pieces = {f"{r}_token": processor.id_to_piece(i) for r, i in roles.items() if i >= 0}
        _save(backend, aside, **pieces)
    return load_tokenizer(out)


def _from_sentencepiece(processor: Any, model: Path | str) -> tokenizers.Tokenizer:
    pieces = {i: processor.id_to_piece(i) for i in range(processor.vocab_size())}
    sample = " a  b\n\n\tc " + _CHARACTERS  # with the white space that normalisers like to touch
    prefix = processor.normalize("a").removesuffix("a")
    if prefix not in ("", "▁") or processor.normalize(sample) != prefix + sample.replace(" ", "▁"):
        raise InputError(f"{model}: it normalises text, which cannot be converted exactly")
    if sum(map(processor.is_byte, pieces)) != 256:
        raise InputError(f"{model}: it has no byte pieces, so it loses what it does not know")
    special = [i for i in pieces if processor.is_control(i) or processor.is_unknown(i)]
    scores = {
        piece: processor.get_score(i)
        for i, piece in pieces.items()
        if i not in special and not processor.is_byte(i)
    }
    # Every pair of pieces that forms a piece, the piece with the highest score first.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in pieces.items()},
            merges=merges,
            unk_token=pieces[processor.unk_id()],
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁")] * bool(prefix) + [normalizers.Replace(" ", "▁")]
    )
    if all("▁" not in piece.lstrip("▁") for piece in scores):
        # No piece spans two words, so splitting there changes nothing and lets words be cached.
        words = tokenizers.Regex("▁+[^▁]*|[^▁]+")
        backend.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", left=1)] * bool(prefix)
    )
    added = [tokenizers.AddedToken(pieces[i], normalized=False) for i in special]
    backend.add_special_tokens(added)
    backend.encode_special_tokens = True
    return backend


def _difficult_texts(processor: Any) -> Iterator[str]:
    """Texts on which two implementations of a BPE are likely to differ."""
    ids = [i for i in range(processor.vocab_size()) if not processor.is_control(i)]
    pieces = [processor.id_to_piece(i).replace("▁", " ") for i in ids]
    # Runs of one character, in which merges overlap.
    for run in sorted({piece[0] for piece in pieces if piece == piece[0] * len(piece) != piece[0]}):
        for length in range(1, 40):
            yield "a" + run * length + "b"
    # Random sequences of pieces, with byte pieces and "<unk>" spelled out.
    generator = random.Random(0)
    for _ in range(500):
        yield "".join(generator.choices(pieces, k=100))
    yield _CHARACTERS


def _save(backend: tokenizers.Tokenizer, folder: Path, **special: str) -> None:
    backend.save(str(folder / "tokenizer.json"))
    fixed = {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(folder / "tokenizer_config.json", {**special, **fixed})
