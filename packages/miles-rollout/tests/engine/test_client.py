"""EngineClient against servers that misbehave: every fault is one named error, and nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from engine_serving import bind

from miles_contracts import (
    DeadlineExceededError,
    Engine,
    EngineError,
    EngineUnavailableError,
    GroupRequest,
    InvalidFieldError,
    SamplingParams,
    VersionSpan,
)
from miles_rollout.engine_client import Deadlines, EngineClient, parse_version

PARAMS = SamplingParams(max_new_tokens=2)
Fake = Callable[..., Awaitable[EngineClient]]


def good_answer(**meta: Any) -> dict[str, Any]:
    info = {
        "id": "x",
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
        "weight_version": "4",
        "cached_tokens": 1,
    }
    return {"text": "", "output_ids": [7, 8], "meta_info": {**info, **meta}}


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    """`await fake({path: handler or JSON})`: a client of a server that answers so."""
    open_things: list[Any] = []

    async def start(routes: dict[str, Any], **options: Any) -> EngineClient:
        app = web.Application()

        def handler(answer: Any) -> Any:
            async def respond(request: web.Request) -> web.StreamResponse:
                if callable(answer):
                    return await answer(request)
                return web.json_response(answer)

            return respond

        for path, answer in routes.items():
            app.router.add_route("*", path, handler(answer))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        listener = bind("127.0.0.1", 0)
        await web.SockSite(runner, listener).start()
        client = EngineClient("http://{}:{}".format(*listener.getsockname()[:2]), **options)
        open_things.extend([runner, client])
        return client

    yield start
    for thing in reversed(open_things):
        await (thing.close() if isinstance(thing, EngineClient) else thing.cleanup())


async def test_a_good_answer(fake: Fake) -> None:
    client = await fake({"/generate": good_answer()})
    engine: Engine = client
    result = await engine.generate(np.array([1, 2], dtype=np.int32), PARAMS)  # type: ignore[arg-type]
    assert result.output_ids.tolist() == [7, 8]
    assert result.logprobs.dtype == np.float32
    assert result.version_spans == (VersionSpan(start=0, end=2, version=4),)
    assert (result.finish_reason, result.cached_tokens, result.request_id) == ("length", 1, "x")


async def test_spans_from_the_engine(fake: Fake) -> None:
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 2}]
    client = await fake({"/generate": good_answer(weight_versions=spans)})
    result = await client.generate([1], PARAMS)
    assert [s.version for s in result.version_spans] == [4, None]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([], "expected an object"),
        ({"output_ids": []}, "meta_info"),
        ({**good_answer(), "output_ids": [7]}, "1 output ids but 2 log-probs"),
        ({**good_answer(), "output_ids": [7, 9]}, "different tokens"),
        (good_answer(finish_reason=None), "finish_reason"),
        (good_answer(finish_reason={"type": "tired"}), "finish_reason"),
        (good_answer(output_token_logprobs=[[None, 7, None], [-1.0, 8, None]]), "not finite"),
        (good_answer(weight_versions=[{"version": "1", "start": 0, "end": 1}]), "do not cover"),
    ],
)
async def test_answers_that_contradict_themselves(fake: Fake, answer: Any, reason: str) -> None:
    client = await fake({"/generate": answer})
    with pytest.raises(EngineError, match=reason):
        await client.generate([1], PARAMS)


async def test_not_json(fake: Fake) -> None:
    async def garbage(_: web.Request) -> web.Response:
        return web.Response(text="{oops", content_type="application/json")

    client = await fake({"/generate": garbage})
    with pytest.raises(EngineError, match="not JSON"):
        await client.generate([1], PARAMS)


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (400, {"error": {"message": "bad temperature"}}, EngineError, "bad temperature"),
        (400, {"message": "too long"}, EngineError, "too long"),
        (422, {"detail": "field"}, EngineError, "field"),
        (500, "plain words", EngineError, "plain words"),
        (503, {"message": "going down"}, EngineUnavailableError, "going down"),
        (404, {"detail": "Not Found"}, EngineError, "it has no /generate.*SGLang >=0.5.23,<0.6"),
    ],
)
async def test_refusals_are_passed_on(fake: Fake, status: int, body: Any, kind: type[EngineError], reason: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return (
            web.Response(text=body, status=status) if isinstance(body, str) else web.json_response(body, status=status)
        )

    client = await fake({"/generate": refuse})
    with pytest.raises(EngineError, match=reason) as caught:
        await client.generate([1], PARAMS)
    assert type(caught.value) is kind
    assert caught.value.status == status


async def test_failure_inside_a_200(fake: Fake) -> None:
    client = await fake({"/flush_cache": {"success": False, "message": "requests are running"}})
    with pytest.raises(EngineError, match="requests are running"):
        await client.flush_cache()


async def test_nobody_there() -> None:
    listener = bind("127.0.0.1", 0)
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    listener.close()
    async with EngineClient(url) as client:
        with pytest.raises(EngineUnavailableError, match="a generation"):
            await client.generate([1], PARAMS)
        assert not await client.healthy()


async def test_an_engine_that_moved_keeps_its_name(fake: Fake) -> None:
    first, second = await fake({"/generate": good_answer()}), await fake({"/generate": {"text": "no ids"}})
    name = first.url
    assert (await first.generate([1, 2], PARAMS)).output_ids.tolist() == [7, 8]
    await first.move_to(second.url)
    with pytest.raises(EngineError) as caught:
        await first.generate([1, 2], PARAMS)
    assert (first.url, caught.value.engine) == (name, name)


async def test_a_connection_that_dies(fake: Fake) -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    client = await fake({"/generate": hang_up})
    with pytest.raises(EngineUnavailableError):
        await client.generate([1], PARAMS)


async def test_deadlines_are_named_and_abort_the_request(fake: Fake) -> None:
    aborted: list[Any] = []

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async def abort(request: web.Request) -> web.Response:
        aborted.append(await request.json())
        return web.json_response({"success": True})

    routes = {"/generate": hang, "/abort_request": abort, "/end_weight_update": hang}
    client = await fake(routes, deadlines=Deadlines(generate=0.1, weights=0.1))
    with pytest.raises(DeadlineExceededError, match="a generation") as caught:
        await client.generate([1], PARAMS, request_id="slow")
    assert caught.value.seconds == 0.1
    assert aborted == [{"rid": "slow"}]
    with pytest.raises(DeadlineExceededError, match="commit of weight update u"):
        await client.commit_weight_update("u")


async def test_version_falls_back_to_model_info(fake: Fake) -> None:
    client = await fake({"/model_info": {"weight_version": "9"}})
    assert await client.weight_version() == 9


@pytest.mark.parametrize(
    ("text", "version"),
    [("0", 0), ("12", 12), ("default", None), ("-1", None), ("1.5", None), (None, None), ("²", None)],
)
def test_versions_are_decimal_or_unknown(text: str | None, version: int | None) -> None:
    assert parse_version(text) == version


async def test_routes_in_sglangs_form_need_the_number_of_layers(fake: Fake) -> None:
    import base64

    ids = np.arange(2 * 3 * 2, dtype="<i4")
    answer = good_answer(routed_experts=base64.b64encode(ids.tobytes()).decode())
    client = await fake({"/generate": answer}, routing_layers=3)
    result = await client.generate([1], PARAMS, routing=True)
    assert np.array_equal(result.routing, ids.reshape(2, 3, 2))
    with pytest.raises(EngineError, match="for 3 fed tokens"):
        await client.generate([1, 2], PARAMS, routing=True)
    client = await fake({"/generate": answer})
    with pytest.raises(EngineError, match="routing_layers"):
        await client.generate([1], PARAMS, routing=True)
    client = await fake({"/generate": good_answer()})
    with pytest.raises(EngineError, match="no routed experts"):
        await client.generate([1], PARAMS, routing=True)


async def test_an_engine_that_ignores_the_first_row_is_noticed(fake: Fake) -> None:
    """SGLang's buffer has no shape: rows nobody asked for would read as more experts a token."""
    import base64

    ids = np.arange(4 * 3 * 2, dtype="<i4")  # [1, 2, 3] and two sampled tokens: four rows, top-2
    answer = good_answer(routed_experts=base64.b64encode(ids.tobytes()).decode())
    client = await fake({"/generate": answer}, routing_layers=3)
    assert (await client.generate([1, 2, 3], PARAMS, routing=True)).routing.shape == (4, 3, 2)
    with pytest.raises(EngineError, match="not those of 2 fed tokens in 3 layers with top-2"):
        await client.generate([1, 2, 3], PARAMS, routing=True, routing_start=2)


async def test_damaged_routes_are_the_engines_error(fake: Fake) -> None:
    packed = {"dtype": "|u1", "shape": [2, 1, 3], "data": "AAEC*wQF"}
    client = await fake({"/generate": good_answer(routed_experts_packed=packed)})
    with pytest.raises(EngineError, match="routed experts: .*not base64"):
        await client.generate([1], PARAMS, routing=True)
    packed = {"dtype": "|u1", "shape": [2, 1, 3], "data": "AAEC"}
    client = await fake({"/generate": good_answer(routed_experts_packed=packed)})
    with pytest.raises(EngineError, match="were announced"):
        await client.generate([1], PARAMS, routing=True)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidFieldError, match=r"EngineClient\.url"):
        EngineClient("localhost:30000")
    with pytest.raises(InvalidFieldError, match=r"Deadlines\.generate"):
        Deadlines(generate=0)


SGLANG = {"version": "0.5.23", "enable_return_routed_experts": False}


async def test_a_paused_sglang_is_asked_for_facts_not_for_a_token(fake: Fake) -> None:
    async def samples(_: web.Request) -> web.Response:
        raise AssertionError("this would wait for the pause to end")

    facts = {"weight_version": "3"}
    sglang = await fake({"/server_info": SGLANG, "/model_info": facts, "/health": samples})
    assert await sglang.healthy()
    embedded = await fake({"/server_info": {"engine": "miles"}, "/health": {}})
    assert await embedded.healthy()
    neither = await fake({"/server_info": SGLANG, "/health": {}})
    assert not await neither.healthy()


async def test_an_engine_is_asked_once_what_it_is(fake: Fake) -> None:
    asked = []

    async def info(_: web.Request) -> web.Response:
        asked.append(1)
        return web.json_response(SGLANG)

    client = await fake({"/server_info": info})
    await asyncio.gather(client.require_supported(), client.identify())
    await client.require_supported()
    assert len(asked) <= 2
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        await client.require_supported(routing=True)


async def test_an_unknown_engine_is_refused(fake: Fake) -> None:
    old = await fake({"/server_info": {"version": "0.4.6"}})
    with pytest.raises(EngineError, match=r"SGLang in version 0\.4\.6 is not known; use .* SGLang >=0\.5\.23,<0\.6"):
        await old.require_supported()
    mute = await fake({})
    with pytest.raises(EngineError, match="it has no /server_info"):
        await mute.require_supported()


async def test_checksums_in_either_form(fake: Fake) -> None:
    ours = await fake({"/weights_checker": {"success": True, "tensors": [{"name": "a", "digest": "xxh3_128:1"}]}})
    assert await ours.weight_checksums() == {"a": "xxh3_128:1"}
    rank = {"checksums": {"a": "1", "b": "2"}}
    one = await fake({"/weights_checker": {"success": True, "ranks": [rank]}})
    assert await one.weight_checksums() == {"a": "1", "b": "2"}
    two = await fake({"/weights_checker": {"success": True, "ranks": [rank, {"checksums": {"a": "3"}}]}})
    assert await two.weight_checksums() == {"a@0": "1", "b@0": "2", "a@1": "3"}
    none = await fake({"/weights_checker": {"success": True, "ranks": []}})
    with pytest.raises(EngineError, match="neither tensors nor ranks"):
        await none.weight_checksums()


async def test_sglangs_own_weight_calls(fake: Fake) -> None:
    bodies: dict[str, Any] = {}

    async def note(request: web.Request) -> web.Response:
        bodies[request.path] = await request.json()
        return web.json_response({"success": True, "message": "ok"})

    calls = ("init_weights_update_group", "begin_weight_update", "end_weight_update", "destroy_weights_update_group")
    client = await fake({f"/{call}": note for call in calls})
    request = GroupRequest(
        master_address="h", master_port=5, rank_offset=1, world_size=3, group_name="g", backend="gloo", timeout_s=9
    )
    assert (await client.join_weight_group(request))["success"] is True
    await client.open_weight_update()
    await client.close_weight_update()
    await client.leave_weight_group("g")
    assert bodies == {
        "/init_weights_update_group": {
            "master_address": "h",
            "master_port": 5,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "g",
            "backend": "gloo",
            "timeout_s": 9,
        },
        "/begin_weight_update": {},
        "/end_weight_update": {},
        "/destroy_weights_update_group": {"group_name": "g"},
    }
