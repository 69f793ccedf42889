"""The seam inside plain text, which control tokens do not protect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderer_fixtures import folder_of

from miles_rollout.renderers import RenderRefusedError, Vocabulary
from miles_rollout.renderers.seam import check_seam

VOCABULARY = Vocabulary.from_folder(folder_of("qwen3"))
END = VOCABULARY.id("<|im_end|>")


def check(history: list[int], leading: str) -> None:
    check_seam(VOCABULARY, history, VOCABULARY.encode(leading), leading, message_index=4)


def test_a_control_token_protects_the_seam() -> None:
    check([*VOCABULARY.encode("the"), END], " user")
    check_seam(VOCABULARY, VOCABULARY.encode("the"), [END], "", message_index=1)


def test_text_that_does_not_merge_is_accepted() -> None:
    check(VOCABULARY.encode("the"), " user")
    check([END, *VOCABULARY.encode("the")], "\n\n# Tools")


def test_text_that_merges_is_refused_with_token_and_message() -> None:
    history = [END, *VOCABULARY.encode("us")]
    assert VOCABULARY.encode("user") != [*VOCABULARY.encode("us"), *VOCABULARY.encode("er")]
    with pytest.raises(RenderRefusedError, match="merges text across the end of the history") as caught:
        check(history, "er")
    assert caught.value.message_index == 4
    assert caught.value.position == len(history)
    assert "user" in caught.value.token


def test_sampled_tokens_need_not_be_the_usual_spelling() -> None:
    letters = [i for c in "the" for i in VOCABULARY.encode(c)]
    assert letters != VOCABULARY.encode("the")
    check([END, *letters], " user")


@given(before=st.text("abuser the\n ", max_size=8), leading=st.text("abuser the\n ", min_size=1, max_size=8))
def test_what_is_accepted_is_what_the_whole_has(before: str, leading: str) -> None:
    history = [END, *VOCABULARY.encode(before)]
    whole = [END, *VOCABULARY.encode(before + leading)]
    suffix = VOCABULARY.encode(leading)
    # The tokens behind the seam must be those of the whole. How the text before it is spelled was the policy's choice:
    # two spaces are one token alone and two tokens before a letter.
    if whole[-len(suffix) :] == suffix and VOCABULARY.decode(whole[1 : -len(suffix)]) == before:
        check(history, leading)
    elif len(history) > 1:
        with pytest.raises(RenderRefusedError):
            check(history, leading)
