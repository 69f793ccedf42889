"""Real engines, each in its own process, on a tiny random model whose tokens are bytes + 1."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from miles_rollout.engine_client import EngineClient

READY = "miles-engine ready: "


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 with 257 tokens (0 stops) and 2,048 positions."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


class EngineProcess:
    """One engine process; it can be killed, stopped and started again on its port."""

    def __init__(self, folder: Path, *, weight_version: str = "0") -> None:
        self.folder = folder
        self.weight_version = weight_version
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start the process; `wait_ready` must follow."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "miles_rollout.engine", "--model-path", str(self.folder)]
        command += ["--port", str(self.port), "--weight-version", self.weight_version]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def wait_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(READY):
                self.port = int(line.split("http://127.0.0.1:")[1].split()[0])
                return
        raise AssertionError(f"the engine ended with status {self.process.wait()}")

    def kill(self) -> None:
        """SIGKILL, and wait."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.thaw()
            self.kill()

    async def client(self) -> EngineClient:
        """A client of the running engine, with nothing left over from another test."""
        client = EngineClient(self.url)
        await client.resume()
        await client.flush_cache()
        return client


async def until(condition, seconds: float = 60.0) -> None:
    """Wait for `condition()` to be true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.01)
