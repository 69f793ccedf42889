"""A small engine process, a renderer of bytes and an episode with a heavy-tailed delay, for the async benchmarks."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_contracts import Generate, Message, SamplingParams, Task, Trajectory
from miles_rollout.engine_client import EngineClient
from miles_rollout.generate import single_turn
from miles_rollout.router import Router

READY = "miles-engine ready: "


def save_model(folder: Path) -> None:
    """A random Qwen3 of 257 tokens: bytes + 1, and 0 to stop."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


class EngineProcess:
    """An embedded engine in its own process."""

    def __init__(self, folder: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "miles_rollout.engine", "--model-path", str(folder)]
        command += ["--port", "0", "--weight-version", "0"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )

    def client(self) -> EngineClient:
        """A client, once the engine is ready."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(READY):
                return EngineClient(line.removeprefix(READY).split()[0])
        raise SystemExit(f"the engine ended with status {self._process.wait()}")

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


class ByteRenderer:
    """Tokens are bytes + 1; 0 stops."""

    stop_token_ids = (0,)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The bytes of all contents."""
        return [b + 1 for m in messages for b in (m.content or "").encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The bytes as text."""
        return bytes(i - 1 for i in token_ids if i > 0).decode(errors="replace")


class NumberedTasks:
    """An endless stream whose prompts are their ordinals."""

    size = 2**31

    def __init__(self) -> None:
        self._next = 0

    def at(self, prompt_index: int) -> Task:
        """Task `prompt_index`."""
        return Task(prompt_index=prompt_index, messages=(Message(role="user", content=f"problem {prompt_index}"),))

    def next(self) -> Task:
        """The next task."""
        self._next += 1
        return self.at(self._next - 1)

    def state(self) -> dict[str, Any]:
        """The position."""
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        self._next = int(state["next"])


def pareto_delay(prompt_index: int, member: int, *, scale_s: float, alpha: float, tail: float) -> float:
    """Seconds that the environment of one episode takes: Pareto, cut at `tail` times the scale."""
    uniform = random.Random(f"{prompt_index}-{member}").random()
    return scale_s * min((1.0 - uniform) ** (-1.0 / alpha), tail)


def delayed_generate(router: Router, *, scale_s: float, alpha: float, tail: float, max_new_tokens: int) -> Generate:
    """One answer of an engine, then an environment that takes its time. The same episode always takes the same."""
    answer = single_turn(
        renderer=ByteRenderer(),
        router=router,
        reward=lambda task, response: float(len(response) % 2),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        run_seed=0,
    )

    async def generate(task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        made = await answer(task, member, attempt)
        await asyncio.sleep(pareto_delay(task.prompt_index, member, scale_s=scale_s, alpha=alpha, tail=tail))
        return made

    return generate
