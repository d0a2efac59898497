"""Tokenizers: trained, converted, loaded, and what does not fit."""

import io
import json
import os
import random
import subprocess
import sys

import pytest
import sentencepiece

from reproduction.new_tokenizers import convert_sentencepiece, train_tokenizer
from statecut.data.tokenizer import load_tokenizer
from statecut.errors import InputError

HARD = [
    "two  spaces, three   of them",
    " leading and trailing ",
    "lines\nand\n\nparagraphs\r\n\ttabs",
    "naïve Ünïcode — “quoted” 你好 🤖 \u200b\u00a0\ufeff",
    "<s> </s> <unk> <0x0A> ▁ <|endoftext|>",
    "aaaaaaaaaaaaa -----------  ==",
    "\x00\x01\x7f",
]


def prose(seed, documents=300):
    draw = random.Random(seed)
    words = ["".join(draw.choices("aeinorst", k=draw.randint(1, 7))) for _ in range(400)]
    return [" ".join(draw.choices(words, k=40)) + "." for _ in range(documents)]


def spm(folder, **options):
    model = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True}
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*prose(1), "  ".join(prose(2, 20)), "-" * 30, "a" * 30]),
        model_writer=model,
        minloglevel=2,
        **(settings | options),
    )
    (folder / "tiny.model").write_bytes(model.getvalue())
    return folder / "tiny.model"


def test_a_trained_tokenizer_gives_every_text_back(tmp_path):
    tokenizer = train_tokenizer(iter(prose(1)), tmp_path / "bpe", vocabulary_size=500)
    assert tokenizer.vocabulary_size == 500
    assert tokenizer.bos == tokenizer.eos
    for text in HARD:
        ids = tokenizer.encode(text)
        assert tokenizer.eos not in ids
        assert tokenizer.backend.decode(ids.tolist()) == text


def test_training_is_the_same_in_every_process(tmp_path):
    program = (
        "import json, sys; from reproduction.new_tokenizers import train_tokenizer;"
        "text = json.load(open(sys.argv[1]));"
        "print(train_tokenizer(text, sys.argv[2], vocabulary_size=600).digest)"
    )
    (tmp_path / "text.json").write_text(json.dumps(prose(3)))
    digests = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program, tmp_path / "text.json", tmp_path / seed]
        digests.add(subprocess.check_output(command, env=os.environ | {"PYTHONHASHSEED": seed}))
    assert len(digests) == 1


def test_a_text_too_small_for_its_vocabulary_is_refused(tmp_path):
    with pytest.raises(InputError, match="the text gives 2"):
        train_tokenizer(["a few words"], tmp_path / "bpe", vocabulary_size=500)
    with pytest.raises(InputError, match="vocabulary_size 256: the text gives 257"):
        train_tokenizer(prose(1), tmp_path / "bpe", vocabulary_size=256)
    assert not (tmp_path / "bpe").exists()


@pytest.mark.parametrize("prefix", [True, False])
def test_a_converted_model_agrees_with_sentencepiece(tmp_path, prefix):
    model = spm(tmp_path, add_dummy_prefix=prefix)
    tokenizer = convert_sentencepiece(model, tmp_path / "converted")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert (tokenizer.bos, tokenizer.eos) == (reference.bos_id(), reference.eos_id())
    assert tokenizer.vocabulary_size == reference.vocab_size()
    for text in [*HARD, *prose(4), "\n\n".join(prose(5))]:
        ids = tokenizer.encode(text).tolist()
        assert ids == reference.encode(text)
        if "▁" not in text:
            assert tokenizer.backend.decode(ids) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "normalises text"),
        ({"remove_extra_whitespaces": True}, "normalises text"),
        ({"byte_fallback": False}, "no byte pieces"),
        ({"model_type": "unigram"}, "not a BPE that can be converted exactly"),
        ({"user_defined_symbols": ["nora"]}, "not a BPE that can be converted exactly"),
    ],
)
def test_a_model_that_cannot_be_converted_exactly_is_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        convert_sentencepiece(spm(tmp_path, **options), tmp_path / "converted")
    with pytest.raises(InputError, match="not a sentencepiece model"):
        convert_sentencepiece(tmp_path / "missing.model", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_a_tokenizer_folder_is_an_ordinary_one(tmp_path):
    """AutoTokenizer reads both kinds and gives the same ids."""
    from transformers import AutoTokenizer

    for tokenizer, folder in [
        (train_tokenizer(prose(1), tmp_path / "bpe", vocabulary_size=500), tmp_path / "bpe"),
        (convert_sentencepiece(spm(tmp_path), tmp_path / "spm"), tmp_path / "spm"),
    ]:
        auto = AutoTokenizer.from_pretrained(folder)
        assert (auto.bos_token_id, auto.eos_token_id) == (tokenizer.bos, tokenizer.eos)
        for text in [*HARD[:4], *prose(6, 20)]:
            assert auto(text)["input_ids"] == tokenizer.encode(text).tolist()


def test_special_tokens_may_be_written_as_the_hub_does(tmp_path):
    train_tokenizer(prose(1), tmp_path / "bpe", vocabulary_size=500)
    config = tmp_path / "bpe" / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<|endoftext|>", "lstrip": False}}))
    tokenizer = load_tokenizer(tmp_path / "bpe")
    assert (tokenizer.bos, tokenizer.eos) == (None, 0)
    for file, text, message in (
        (config, "{}", "names no eos_token"),
        (config, '{"eos_token": "</s>"}', r"eos_token '</s>' is not in tokenizer\.json"),
        (tmp_path / "bpe" / "tokenizer.json", "{}", "not a tokenizer"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            load_tokenizer(tmp_path / "bpe")
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_truncating_tokenizer_loses_no_text(tmp_path):
    tokenizer = train_tokenizer(prose(1), tmp_path / "bpe", vocabulary_size=500)
    expected = tokenizer.encode(prose(7, 1)[0])
    tokenizer.backend.enable_truncation(4)
    tokenizer.backend.enable_padding(length=64)
    tokenizer.backend.save(str(tmp_path / "bpe" / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "bpe").encode(prose(7, 1)[0]).tolist() == expected.tolist()
