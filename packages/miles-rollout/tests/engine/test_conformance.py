"""The embedded engine passes the conformance suite on both of its paths, and the suite catches broken promises."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from miles_contracts import GenerateResult, SamplingParams
from miles_rollout.engine.conformance import CHECKS, Check, Subject, run_check, run_checks
from miles_rollout.engine.conformance.__main__ import main, model_sizes
from miles_rollout.engine_client import EngineClient
from miles_rollout.engine_http import EngineHttp
from miles_rollout.engine_identity import EngineIdentity, EngineKind

NOT_FOR_THE_EMBEDDED = {"weights from pickles are served"}


@pytest.fixture
async def http(shared_engine):
    client = EngineHttp(shared_engine.url, 10.0)
    yield client
    await client.close()


@pytest.fixture
def subject(shared_engine, http: EngineHttp) -> Subject:
    return Subject(shared_engine.client, http, EngineIdentity(kind=EngineKind.EMBEDDED))


def check_named(name: str) -> Check:
    return next(c for c in CHECKS if c.name == name)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_the_embedded_engine_keeps_every_promise(models, serve, family: str) -> None:
    folder, other = models(family), models(family, 1)
    engine = await serve(folder)
    outcomes = await run_checks(engine.url, CHECKS, weights=(folder, other), **model_sizes(folder))
    assert [(o.name, o.failure) for o in outcomes if o.failure] == []
    of_the_model = {c.name for c in CHECKS if "experts" in c.name}
    skipped = {o.name for o in outcomes if o.skipped}
    assert skipped >= NOT_FOR_THE_EMBEDDED
    assert skipped - NOT_FOR_THE_EMBEDDED < of_the_model


async def test_small_chunks_keep_every_promise(models, serve) -> None:
    engine = await serve(models("qwen3"), dtype="float32", chunked_prefill_size=16)
    assert [(o.name, o.failure) for o in await run_checks(engine.url, CHECKS) if o.failure] == []


async def test_the_native_path_keeps_all_but_the_cache(models, serve) -> None:
    engine = await serve(models("qwen3"), force_native_cache=True)
    broken = {o.name for o in await run_checks(engine.url, CHECKS) if o.failure}
    assert broken == {"prefixes are cached", "siblings share their prompt"}


def altered(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let `generate` give `change(result, params)`."""
    original = EngineClient.generate

    async def generate(self: EngineClient, ids, params: SamplingParams, **rest) -> GenerateResult:
        return change(await original(self, ids, params, **rest), params)

    monkeypatch.setattr(EngineClient, "generate", generate)


async def test_renormalised_logprobs_are_caught(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def renormalised(result: GenerateResult, params: SamplingParams) -> GenerateResult:
        zeros = np.zeros_like(result.logprobs)
        return msgspec.structs.replace(result, logprobs=zeros) if params.top_k == 1 else result

    altered(monkeypatch, renormalised)
    outcome = await run_check(check_named("truncation leaves log-probs alone"), subject)
    assert outcome.failure == "truncation changes the log-probs"


async def test_a_forgotten_stop_token_is_caught(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def trimmed(result: GenerateResult, params: SamplingParams) -> GenerateResult:
        return msgspec.structs.replace(result, output_ids=result.output_ids[:-1]) if params.stop_token_ids else result

    altered(monkeypatch, trimmed)
    outcome = await run_check(check_named("a stop token ends and is returned"), subject)
    assert outcome.failure == "does not end with the stop token"


async def test_stale_weights_are_caught(models, serve, http, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await serve(models("qwen3"))
    original = EngineClient.load_from_disk

    async def lazy(self: EngineClient, path, version: int) -> None:
        if version != 7:
            await original(self, path, version)

    monkeypatch.setattr(EngineClient, "load_from_disk", lazy)
    folders = (models("qwen3"), models("qwen3", 1))
    stale = Subject(engine.client, http, EngineIdentity(kind=EngineKind.EMBEDDED), folders)
    outcome = await run_check(check_named("weights from disk are served"), stale)
    assert outcome.failure is not None
    assert "cache" in outcome.failure or "another policy" in outcome.failure


async def test_known_differences_are_skipped_with_their_reason(subject: Subject) -> None:
    async def never(_: Subject) -> None:
        raise AssertionError("must not run")

    check = Check("x", never, differs={EngineKind.EMBEDDED: "it is small"})
    assert (await run_check(check, subject)).skipped == "it is small"
    assert (await run_check(Check("y", never, needs=lambda _: "a folder"), subject)).skipped == "a folder"


def test_every_difference_has_a_reason_and_every_check_a_name_of_its_own() -> None:
    assert len({c.name for c in CHECKS}) == len(CHECKS)
    assert all(reason.strip() for c in CHECKS for reason in c.differs.values())


async def test_the_command_says_what_is_broken(shared_engine, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    assert await asyncio.to_thread(main, [shared_engine.url]) == 0
    assert "greedy repeats: ok" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["http://127.0.0.1:9"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
