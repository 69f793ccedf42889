"""The conformance suite passes for the embedded engine on both of its paths, and catches engines that break promises.

Set MILES_ENGINE_URL to run it against another engine, for example an SGLang server.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from miles_contracts import GenerateResult, SamplingParams
from miles_rollout.engine.conformance import CHECKS, Check, main, run_all, run_check
from miles_rollout.engine_client import EngineClient


@pytest.mark.parametrize("options", [{}, {"dtype": "float32", "chunked_prefill_size": 16}])
async def test_the_embedded_engine_keeps_every_promise(models, serve, options: dict[str, object]) -> None:
    engine = await serve(models("qwen3"), **options)
    outcomes = await run_all(engine.url)
    assert [(o.name, o.failure) for o in outcomes if o.failure or o.skipped] == []


async def test_the_native_path_keeps_all_but_the_cache(models, serve) -> None:
    engine = await serve(models("qwen3"), force_native_cache=True)
    broken = {o.name for o in await run_all(engine.url) if o.failure}
    assert broken == {"prefixes are cached", "siblings share their prompt"}


@pytest.mark.skipif("MILES_ENGINE_URL" not in os.environ, reason="MILES_ENGINE_URL names no engine")
async def test_another_engine() -> None:
    assert [o for o in await run_all(os.environ["MILES_ENGINE_URL"]) if o.failure] == []


async def test_lies_are_caught(shared_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EngineClient.generate

    async def renormalised(self: EngineClient, ids, params: SamplingParams, **rest) -> GenerateResult:
        """Log-probs on the truncated support, as some engines give them."""
        result = await original(self, ids, params, **rest)
        import msgspec

        return msgspec.structs.replace(result, logprobs=np.zeros_like(result.logprobs)) if params.top_k == 1 else result

    monkeypatch.setattr(EngineClient, "generate", renormalised)
    check = next(c for c in CHECKS if c.name == "truncation leaves log-probs alone")
    outcome = await run_check(check, shared_engine.client)
    assert outcome.failure == "truncation changes the log-probs"


async def test_checks_for_the_embedded_engine_are_skipped_elsewhere(shared_engine, monkeypatch) -> None:
    async def sglang(_: EngineClient) -> dict[str, object]:
        return {"version": "0.5.23"}

    async def never(_: EngineClient) -> None:
        raise AssertionError("must not run")

    monkeypatch.setattr(EngineClient, "server_info", sglang)
    assert (await run_check(Check("x", never, embedded_only=True), shared_engine.client)).skipped


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
