"""Small tokenizers with the control tokens of each family, and messages from plain dictionaries."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from miles_contracts import Message
from miles_rollout.renderers import FAMILIES, Renderer, RenderOptions, load_renderer

GOLDEN = Path(__file__).parent / "golden"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the user asks the assistant to call a tool and the tool answers\n\n",
    "system\nuser\nassistant\nanalysis\ncommentary\nfinal\nthought\n",
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\n",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n<function=add>\n<parameter=a>\n1\n</parameter>\n',
    "  indented\n\n    code\t\tand   spaces \n \n\n",
    "Größe 大小 размер\n",
] * 4
# Token text -> does the tokenizer itself call it special? Real ones do not for the tokens of the second kind.
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
ADDED: dict[str, tuple[list[str], list[str]]] = {
    "chatml": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], PLAIN),
    "glm": (
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        [*PLAIN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ),
    "deepseek": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
        ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"],
    ),
    "kimi": (
        ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
        + [f"<|media_{part}|>" for part in ("begin", "content", "end", "pad")],
        [
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<think>",
            "</think>",
        ],
    ),
    "minimax": (["]~!b[", "]~b]", "[e~["], ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"]),
    "harmony": (
        [
            "<|startoftext|>",
            "<|endoftext|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|return|>",
            "<|call|>",
        ],
        [],
    ),
    "gemma": (
        [
            "<pad>",
            "<eos>",
            "<bos>",
            "<|tool>",
            "<tool|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
            "<|think|>",
            "<|channel>",
            "<channel|>",
            "<|turn>",
            "<turn|>",
        ],
        [],
    ),
    "inkling": (
        [
            "<|endoftext|>",
            "<|message_user|>",
            "<|message_model|>",
            "<|message_system|>",
            "<|message_tool|>",
            "<|content_text|>",
            "<|content_model_end_sampling|>",
            "<|content_thinking|>",
            "<|end_message|>",
            "<|content_xml|>",
            "<|content_invoke_tool_json|>",
            "<|content_image|>",
            "<|content_audio_input|>",
            "<|audio_end|>",
            "<|unused_200053|>",
            "<|unused_200054|>",
        ],
        [],
    ),
}
TOKENS_OF = {
    "chatml": "chatml",
    "smollm2": "chatml",
    "qwen3": "chatml",
    "qwen3_next": "chatml",
    "qwen3_5": "chatml",
    "nemotron3": "chatml",
    "glm": "glm",
    "glm4_5": "glm",
    "deepseek_v3_2": "deepseek",
    "deepseek_v4": "deepseek",
    "kimi_k2": "kimi",
    "kimi_k2_5": "kimi",
    "minimax_m2": "minimax",
    "gpt_oss": "harmony",
    "gemma4": "gemma",
    "inkling": "inkling",
}
DIALECTS = tuple(name for name in FAMILIES if name != "default")


def write_tokenizer(
    folder: Path, special: Sequence[str], plain: Sequence[str] = (), *, eos: str = "", template: str | None = None
) -> Path:
    """Writes a byte-level BPE tokenizer of about 600 tokens, with merges, as a Hugging Face folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    definition = json.loads(tokenizer.to_str())
    first = len(definition["model"]["vocab"])
    definition["added_tokens"] = [
        {"id": first + i, "content": text, "special": i < len(special)}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in enumerate([*special, *plain])
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if eos:
        config["eos_token"] = eos
    if "<bos>" in special:
        config["bos_token"] = "<bos>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


@functools.cache
def folder_of(family: str) -> Path:
    """A tokenizer folder for a family, made once a test run."""
    special, plain = ADDED[TOKENS_OF[family]]
    return write_tokenizer(Path(tempfile.mkdtemp(prefix=f"tokenizer-{family}-")), special, plain)


@functools.cache
def _loaded(family: str, hint: str | None) -> Renderer:
    folder = folder_of(family)
    if hint is not None:
        special, plain = ADDED[TOKENS_OF[family]]
        template = "{# " + hint + " #}"
        folder = write_tokenizer(
            Path(tempfile.mkdtemp(prefix=f"tokenizer-{family}-")), special, plain, template=template
        )
    return load_renderer(folder, family, options=RenderOptions())


def renderer_of(family: str, hint: str | None = None, **options: Any) -> Renderer:
    """A family's renderer on its small tokenizer, perhaps beside a template that contains `hint`."""
    return _loaded(family, hint).with_options(**options)


def messages_from(dicts: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages of the contracts from the OpenAI form."""
    return [msgspec.convert(dict(d), Message) for d in dicts]
