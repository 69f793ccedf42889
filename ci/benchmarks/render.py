"""What one more turn costs: tokenising what is new, against rendering and tokenising the whole conversation again.

    python ci/benchmarks/render.py [--turns 128] [--tokens 65536] [--model PATH --family F] [--repeats 3] [--json FILE]

One conversation grows to the given length. At every turn the same ids are made in four ways, which are compared: the
suffix behind the stored history; the family's rendering of the whole; a chat template in Jinja run over the whole and
encoded; the default family's suffix behind that template, which renders the history as text to prove that the
template extends it and tokenises only what is new. Without --model the tokenizer is a byte-level BPE trained here on
the standard library's sources, and the template is our own plain ChatML.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import random
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from miles_contracts import Message
from miles_rollout.renderers import Renderer, load_renderer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, vocabulary: int = 8192) -> None:
    """A ChatML tokenizer with merges learnt from source code, and a template for it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([inspect.getsource(m) for m in (argparse, inspect, textwrap, random)], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def pieces(renderer: Renderer, turns: int, tokens: int) -> list[tuple[Message, Message]]:
    """A question and an answer for each turn, which together come to about the given number of tokens."""
    source = inspect.getsource(inspect)
    per_turn = tokens // turns
    characters = int(per_turn / 2 * len(source) / len(renderer.vocabulary.encode(source)))
    rng = random.Random(0)

    def text() -> str:
        at = rng.randrange(len(source) - characters)
        return "Text " + source[at : at + characters] + "."

    return [(Message(role="user", content=text()), Message(role="assistant", content=text())) for _ in range(turns)]


def timed(make: Callable[[], list[int]], repeats: int) -> tuple[float, list[int]]:
    """Least milliseconds of several runs, and the ids."""
    best, ids = float("inf"), []
    for _ in range(repeats):
        start = time.perf_counter()
        ids = make()
        best = min(best, time.perf_counter() - start)
    return best * 1e3, ids


def measure(
    family: Renderer, template: Renderer | None, turns: int, tokens: int, repeats: int
) -> list[tuple[int, float, float, float, float]]:
    """Per turn: tokens of history, and milliseconds of the suffix, the whole, the template, the template's suffix."""
    messages: list[Message] = []
    history: list[int] = []
    rows = []
    stop = family.stop_token_ids[0]
    for question, answer in pieces(family, turns, tokens):
        everything = [*messages, question]
        fast, suffix = timed(lambda: family.render_suffix(messages, history, [question]), repeats)  # noqa: B023
        slow, whole = timed(lambda: family.render(everything), repeats)  # noqa: B023
        jinja = proven = float("nan")
        if template is not None:
            jinja, rendered = timed(lambda: template.render(everything), repeats)  # noqa: B023
            assert rendered == whole, "the template and the family differ"
            proven, rest = timed(lambda: template.render_suffix(messages, history, [question]), repeats)  # noqa: B023
            assert rest == suffix, "the template's suffix and the family's differ"
        assert history + suffix == whole, "the suffix is not the rest of the whole"
        rows.append((len(history), fast, slow, jinja, proven))
        messages = [*everything, answer]
        history = [*whole, *family.vocabulary.encode(answer.content or ""), stop]
        assert family.render(messages, add_generation_prompt=False)[: len(history)] == history
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--family")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            write_model(Path(folder))
            family, template = load_renderer(Path(folder), "chatml"), load_renderer(Path(folder), "default")
        else:
            family, template = load_renderer(arguments.model, arguments.family), None
    gc.disable()
    rows = measure(family, template, arguments.turns, arguments.tokens, arguments.repeats)
    print(f"{family.family}, {arguments.turns} turns, ms per turn (best of {arguments.repeats})")
    print(
        f"{'turn':>5} {'history':>8} {'suffix':>8} {'whole':>9} {'template':>9} {'its suffix':>10} {'whole/suffix':>13}"
    )
    shown = [i for i in (0, 1, 3, 7, 15, 31, 63, 127, 255, 511) if i < len(rows)]
    for index in sorted({*shown, len(rows) - 1}):
        tokens, fast, slow, jinja, proven = rows[index]
        print(
            f"{index + 1:>5} {tokens:>8} {fast:>8.3f} {slow:>9.3f} {jinja:>9.3f} {proven:>10.3f} {slow / fast:>13.1f}"
        )
    sums = [sum(row[i] for row in rows) for i in (1, 2, 3, 4)]
    quarter = max(len(rows) // 4, 1)
    early = statistics.median(r[1] for r in rows[1 : quarter + 1])
    late = statistics.median(r[1] for r in rows[-quarter:])
    parts = zip(("suffix", "whole", "template", "its suffix"), sums, strict=True)
    print("all turns: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in parts))
    print(f"whole/suffix over the conversation: {sums[1] / sums[0]:.1f}x")
    print(f"suffix, last quarter / first quarter of the turns: {late / early:.2f} (1 is independent of the history)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"family": family.family, "rows": rows, "late_to_early": late / early}))


if __name__ == "__main__":
    sys.exit(main())
