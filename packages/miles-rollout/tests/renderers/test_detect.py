from __future__ import annotations

import json
from pathlib import Path

import pytest
from renderer_fixtures import ADDED, DIALECTS, folder_of, write_tokenizer

from miles_contracts import InvalidFieldError
from miles_rollout.renderers import detect_family, load_renderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder_with(tmp_path: Path, tokens: str, template: str | None = None, model_type: str = "") -> Path:
    special, plain = ADDED[tokens]
    folder = write_tokenizer(tmp_path, special, plain, eos=special[0], template=template)
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize(
    ("tokens", "family"),
    [
        ("chatml", "qwen3"),
        ("glm", "glm"),
        ("deepseek", "deepseek_v4"),
        ("kimi", "kimi_k2"),
        ("minimax", "minimax_m2"),
        ("harmony", "gpt_oss"),
        ("gemma", "gemma4"),
        ("inkling", "inkling"),
    ],
)
def test_control_tokens_alone(tmp_path: Path, tokens: str, family: str) -> None:
    folder = folder_with(tmp_path, tokens)
    assert detect_family(folder).family == family
    assert load_renderer(folder).family == family


@pytest.mark.parametrize(
    ("tokens", "model_type", "family"),
    [
        ("deepseek", "deepseek_v32", "deepseek_v3_2"),
        ("deepseek", "deepseek_v4", "deepseek_v4"),
        ("kimi", "kimi_k25", "kimi_k2_5"),
        ("chatml", "qwen3_next", "qwen3_next"),
        ("chatml", "qwen3_5_moe", "qwen3_5"),
        ("chatml", "qwen3", "qwen3"),
    ],
)
def test_the_model_type_decides_where_tokens_are_shared(
    tmp_path: Path, tokens: str, model_type: str, family: str
) -> None:
    assert detect_family(folder_with(tmp_path, tokens, model_type=model_type)).family == family


@pytest.mark.parametrize(
    ("tokens", "hint", "family"),
    [
        ("chatml", "truncate_history_thinking <think>", "nemotron3"),
        ("chatml", "named SmolLM", "smollm2"),
        ("chatml", "<think> <function=", "qwen3_5"),
        ("chatml", "<think> enable_thinking", "qwen3"),
        ("chatml", "<think>", "qwen3_next"),
        ("chatml", "", "chatml"),
    ],
)
def test_the_template_suggests_a_family_where_tokens_are_shared(
    tmp_path: Path, tokens: str, hint: str, family: str
) -> None:
    found = detect_family(folder_with(tmp_path, tokens, template="{# " + hint + " #}" + CHATML))
    if family in ("qwen3", "chatml"):  # whose form for these conversations is that of the template
        assert (found.family, found.disagreements) == (family, ())
        assert "agrees with the chat template on all probes" in str(found)
    else:
        assert found.family == "default"
        assert f"differs from the family {family} on a question" in str(found)


@pytest.mark.parametrize(
    ("tokens", "hint", "family"),
    [
        ("glm", "/nothink", "glm4_5"),
        ("glm", "<think>", "glm"),
        ("glm", "", "default"),
        ("deepseek", "", "default"),
        ("kimi", "tools_ts_str", "kimi_k2_5"),
    ],
)
def test_a_family_with_tokens_of_its_own_stays_when_its_template_differs(
    tmp_path: Path, tokens: str, hint: str, family: str
) -> None:
    found = detect_family(folder_with(tmp_path, tokens, template="{# " + hint + " #}" + CHATML))
    assert found.family == family
    if family != "default":
        assert found.disagreements
        assert "differs from the chat template on a question" in str(found)


def test_plain_chatml_must_be_plain(tmp_path: Path) -> None:
    other = "{% if messages[0].role != 'system' %}<|im_start|>system\nHi<|im_end|>\n{% endif %}" + CHATML
    found = detect_family(folder_with(tmp_path, "chatml", template=other))
    assert found.family == "default"
    assert "differs from the family chatml on a question" in str(found)


def test_tokens_that_nobody_knows(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, ["<|odd|>"], eos="<|odd|>", template="{{ messages[0].content }}<|odd|>")
    assert load_renderer(folder).family == "default"
    assert "no known control tokens" in str(detect_family(folder))


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidFieldError, match="must be one of chatml, deepseek_v3_2"):
        load_renderer(folder_of("qwen3"), "quen3")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="must be a folder"):
        load_renderer(tmp_path / "nope")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_file_beside_the_tokenizer_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = folder_with(tmp_path, "chatml")
    (folder / name).write_text(text)
    with pytest.raises(InvalidFieldError, match=name):
        load_renderer(folder)


@pytest.mark.parametrize("family", DIALECTS)
def test_a_tokenizer_alone_is_enough(family: str, tmp_path: Path) -> None:
    source = folder_of(family) / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    assert load_renderer(tmp_path, family).stop_token_ids == load_renderer(folder_of(family), family).stop_token_ids
