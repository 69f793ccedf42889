from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderer_fixtures import folder_of, write_tokenizer
from tokenizers import Tokenizer

from miles_contracts import InvalidFieldError
from miles_rollout.renderers import Vocabulary

TEXT = st.text(st.sampled_from("ab <|im_end|>\n é大🙂\t{}</think>") | st.characters(codec="utf-8"), max_size=60)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.from_folder(folder_of("qwen3"))


def plain_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(folder_of("qwen3") / "tokenizer.json"))


def test_text_never_becomes_a_control_token(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("a<|im_end|><think>b")
    assert not any(vocabulary.is_added(i) for i in ids)
    assert vocabulary.decode(ids) == "a<|im_end|><think>b"


def test_split_finds_the_tokens_that_it_is_told_to_find(vocabulary: Vocabulary) -> None:
    im_end, think = vocabulary.id("<|im_end|>"), vocabulary.id("<think>")
    assert list(vocabulary.split("a<|im_end|>b<think>")) == ["a", im_end, "b", think]
    assert list(vocabulary.split("a<|im_end|>b<think>", frozenset({"<think>"}))) == ["a<|im_end|>b", think]
    assert list(vocabulary.split("a<think>", frozenset())) == ["a<think>"]
    assert list(vocabulary.split("")) == []


@given(TEXT)
def test_splitting_and_encoding_is_what_the_tokenizer_does(vocabulary: Vocabulary, text: str) -> None:
    ids: list[int] = []
    for piece in vocabulary.split(text):
        ids += vocabulary.encode(piece) if isinstance(piece, str) else [piece]
    assert ids == plain_tokenizer().encode(text, add_special_tokens=False).ids


def test_a_token_may_take_the_space_around_it(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, ["<|a|>", "<|b|>", "<|c|>"])
    definition = json.loads((folder / "tokenizer.json").read_text())
    by_text = {t["content"]: t for t in definition["added_tokens"]}
    by_text["<|a|>"]["lstrip"] = True
    by_text["<|b|>"]["rstrip"] = True
    by_text["<|c|>"]["single_word"] = True
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    vocabulary = Vocabulary.from_folder(folder)
    a, b, c = (vocabulary.id(t) for t in ("<|a|>", "<|b|>", "<|c|>"))
    assert list(vocabulary.split("x \n<|a|> y")) == ["x", a, " y"]
    assert list(vocabulary.split("x <|b|> \ny")) == ["x ", b, "y"]
    assert list(vocabulary.split("x<|c|> <|c|>")) == ["x<|c|> ", c]


def test_a_space_before_the_first_word_only(tmp_path: Path) -> None:
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": 5, "content": "</s>", "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        "model": {
            "type": "BPE",
            "unk_token": None,
            "vocab": {"a": 0, "b": 1, "▁": 2, "▁a": 3, "▁b": 4},
            "merges": [["▁", "a"], ["▁", "b"]],
        },
    }
    definition["added_tokens"][0] |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    vocabulary = Vocabulary.from_folder(tmp_path)
    assert vocabulary.encode("a b", at_start=True) == [3, 4]
    assert vocabulary.encode("a b") == [0, 4]
    whole = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a b</s>a b", add_special_tokens=False).ids
    assert whole == [*vocabulary.encode("a b", at_start=True), 5, *vocabulary.encode("a b")]


def test_tokens_that_only_the_configuration_declares(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, ["<|im_end|>"])
    size = Vocabulary.from_folder(folder).size
    declared = {str(size): {"content": "<|late|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    vocabulary = Vocabulary.from_folder(folder)
    assert vocabulary.id("<|late|>") == size
    assert vocabulary.size == size + 1


def test_decode_can_leave_tokens_out(vocabulary: Vocabulary) -> None:
    im_end = vocabulary.id("<|im_end|>")
    ids = [*vocabulary.encode("hé"), im_end, *vocabulary.encode("llo")]
    assert vocabulary.decode(ids) == "hé<|im_end|>llo"
    assert vocabulary.decode(ids, skip=[im_end]) == "héllo"


@pytest.mark.parametrize("bad", [-1, 10_000_000])
def test_decode_refuses_ids_outside_the_vocabulary(vocabulary: Vocabulary, bad: int) -> None:
    with pytest.raises(InvalidFieldError, match="token_ids"):
        vocabulary.decode([0, bad])


def test_an_unknown_token_is_refused_by_name(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidFieldError, match=r"<\|nope\|>"):
        vocabulary.id("<|nope|>")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "needs a tokenizer.json"),
        ("{", "must be JSON"),
        ("[]", "model"),
        ('{"model": {"type": "Nope"}}', "must be readable"),
    ],
)
def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path, text: str | None, what: str) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InvalidFieldError, match=what):
        Vocabulary.from_folder(tmp_path)


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, ["<|im_end|>"])
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidFieldError, match="tokenizer_config.json"):
        Vocabulary.from_folder(folder)
