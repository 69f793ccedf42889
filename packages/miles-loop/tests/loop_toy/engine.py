"""An engine process without a model: tokens are a hash of seed, weight version and position."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
from typing import Any

from aiohttp import web

LETTERS = 256
"""The byte tokens of the tests' tokenizer."""


class FakeEngine:
    """The calls that a run makes."""

    def __init__(self) -> None:
        self.version: str = "default"
        self.pending: dict[str, str] = {}
        self.running = asyncio.Event()
        self.running.set()
        self.delay_s = float(os.environ.get("FAKE_TOKEN_S", "0.0005"))

    async def generate(self, request: web.Request) -> web.Response:
        """Sample one continuation, or one of each of a list."""
        body = await request.json()
        if isinstance(body["rid"], list):
            calls = zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True)
            return web.json_response(await asyncio.gather(*(self._sample(*call) for call in calls)))
        return web.json_response(await self._sample(body["rid"], body["input_ids"], body["sampling_params"]))

    async def _sample(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        seed = params.get("sampling_seed", 0)
        length = 1 + _hash(seed, "length") % params["max_new_tokens"]
        if "FAKE_EMPTY" in os.environ and _hash(seed, "empty") % 2:
            length = 0
        await asyncio.sleep(self.delay_s * length)
        await self.running.wait()
        ids = [_hash(seed, self.version, i) % LETTERS for i in range(length)]
        logprobs = [-(_hash(seed, self.version, i, "p") % 1000) / 256 for i in range(length)]
        stop = length < params["max_new_tokens"]
        meta = {
            "id": rid,
            "prompt_tokens": len(prompt),
            "completion_tokens": length,
            "cached_tokens": 0,
            "finish_reason": {"type": "stop" if stop else "length"},
            "weight_version": self.version,
            "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def health(self, request: web.Request) -> web.Response:
        """Well."""
        return web.Response()

    async def weight_version(self, request: web.Request) -> web.Response:
        """Served version."""
        return web.json_response({"weight_version": self.version})

    async def info(self, request: web.Request) -> web.Response:
        """It speaks the embedded engine's calls."""
        return web.json_response({"engine": "miles"})

    async def pause(self, request: web.Request) -> web.Response:
        """Hold answers back."""
        self.running.clear()
        return web.json_response({"success": True})

    async def resume(self, request: web.Request) -> web.Response:
        """Go on."""
        self.running.set()
        return web.json_response({"success": True})

    async def begin(self, request: web.Request) -> web.Response:
        """Open an update."""
        body = await request.json()
        self.pending[body["update_id"]] = str(body["manifest"]["version"])
        return web.json_response({"success": True})

    async def end(self, request: web.Request) -> web.Response:
        """Close an update."""
        body = await request.json()
        version = self.pending.pop(body["update_id"], None)
        if body["commit"] and version is not None:
            self.version = version
        return web.json_response({"success": True})


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    engine = FakeEngine()
    app = web.Application()
    app.add_routes(
        [
            web.post("/generate", engine.generate),
            web.get("/health", engine.health),
            web.get("/server_info", engine.info),
            web.get("/model_info", engine.weight_version),
            web.post("/pause_generation", engine.pause),
            web.post("/continue_generation", engine.resume),
            web.post("/begin_weight_update", engine.begin),
            web.post("/end_weight_update", engine.end),
            web.post("/abort_request", engine.health),
            web.post("/flush_cache", engine.health),
        ]
    )
    web.run_app(app, host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
