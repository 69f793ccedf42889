"""The tokenizer writes any text, and its chat format is Qwen3's and append-only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import Message
from miles_qwen3.tokenizer import MARKUP, SPECIAL, make_tokenizer, write_tokenizer
from miles_rollout.renderers import detect_family, load_renderer

TOKENIZER = make_tokenizer()


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    encoded = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(encoded, skip_special_tokens=False) == text


@pytest.mark.parametrize("token", [*SPECIAL, *MARKUP, "user", "assistant", "system", "tool"])
def test_frame_of_a_message_costs_single_tokens(token: str) -> None:
    assert len(TOKENIZER.encode(token, add_special_tokens=False).ids) == 1


def test_no_other_token_holds_a_digit() -> None:
    """Else the default task's exploration would find parts of answers inside of longer tokens."""
    assert len(TOKENIZER.encode("21021", add_special_tokens=False).ids) == 5
    assert sorted(token for token in TOKENIZER.get_vocab() if any(c in "0123456789" for c in token)) == list(
        "0123456789"
    )


def test_only_what_ends_an_answer_is_invisible() -> None:
    ids = TOKENIZER.encode("<|im_start|>1<think>2<|im_end|>", add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<|im_start|>1<think>2"


def test_folder_is_recognised_as_qwen3_and_agrees_with_its_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    found = detect_family(tmp_path)
    assert (found.family, found.disagreements) == ("qwen3", ())


def test_template_and_renderer_agree_on_tools_and_reasoning(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    messages = [
        Message(role="system", content="be brief"),
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="2", reasoning_content="easy"),
        Message(role="user", content="and é?"),
    ]
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(
        [m.to_dict() for m in messages], tools=[tool], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert load_renderer(tmp_path).render(messages, [tool]) == expected
