"""Promises about weight updates: from disk, from tensors, from a process group; versions, digests and refusals.

Every check leaves the engine with the first folder's weights.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import numpy as np

from miles_contracts import GenerateResult, GroupRequest, PauseMode
from miles_rollout.engine.conformance.suite import (
    PROMPT,
    Check,
    PromiseBrokenError,
    Subject,
    greedy,
    require,
    require_refusal,
)
from miles_rollout.engine_identity import EngineKind

_LONG = 160
"""Tokens of a request that outlives an update."""
NEW = 12


def _no_folders(subject: Subject) -> str | None:
    return "no folders with weights were given" if subject.weights is None else None


def _folders(subject: Subject) -> tuple[Path, Path]:
    assert subject.weights is not None
    return subject.weights


async def _load(subject: Subject, folder: Path, version: int) -> None:
    """An update from disk as a fleet does it, under a pause: SGLang refuses to flush while a request is ending."""
    await subject.engine.pause(PauseMode.RETRACT)
    try:
        await subject.engine.load_from_disk(folder, version)
    finally:
        await subject.engine.resume()


async def _probe(subject: Subject) -> GenerateResult:
    return await subject.engine.generate(PROMPT, greedy(NEW))


async def _require_policy(subject: Subject, want: GenerateResult, version: int, what: str) -> None:
    """The engine samples as `want` did, under the version, and says so everywhere."""
    found = await _probe(subject)
    same = found.output_ids.tolist() == want.output_ids.tolist()
    require(same and bool(np.allclose(found.logprobs, want.logprobs, atol=1e-4)), f"{what}: another policy")
    versions = [span.version for span in found.version_spans]
    require(versions == [version], f"{what}: tokens of versions {versions}, not {version}")
    reported = await subject.engine.weight_version()
    require(reported == version, f"{what}: the engine reports version {reported}, not {version}")


async def _policies(subject: Subject) -> tuple[GenerateResult, GenerateResult]:
    """What both folders' weights answer; the first folder's weights are in afterwards, as version 1."""
    first, second = _folders(subject)
    await _load(subject, second, 2)
    other = await _probe(subject)
    await _load(subject, first, 1)
    one = await _probe(subject)
    require(not np.array_equal(one.logprobs, other.logprobs), "both folders answer alike; give different weights")
    return one, other


async def weights_from_disk_are_served(subject: Subject) -> None:
    """An update from disk changes policy and version at once, also after another one, and forgets the cache."""
    one, other = await _policies(subject)
    await _load(subject, _folders(subject)[1], 7)
    fresh = await subject.engine.generate(PROMPT, greedy(1))
    require(fresh.cached_tokens == 0, "tokens of the old weights come from the cache")
    await _require_policy(subject, other, 7, "after an update from disk")
    await _load(subject, _folders(subject)[0], 1)
    await _require_policy(subject, one, 1, "after going back")


async def a_missing_folder_changes_nothing(subject: Subject) -> None:
    """A folder without weights is refused; weights and version stay."""
    one, _ = await _policies(subject)
    call = _load(subject, _folders(subject)[0] / "missing", 9)
    await require_refusal(call, "a missing folder")
    await _require_policy(subject, one, 1, "after a refused update")


async def checksums_follow_the_weights(subject: Subject) -> None:
    """The same weights have the same digests, other weights others."""
    first, second = _folders(subject)
    seen: list[dict[str, str]] = []
    for version, folder in enumerate((first, second, first)):
        await _load(subject, folder, version)
        seen.append(await subject.engine.weight_checksums())
    require(bool(seen[0]), "no tensor has a digest")
    require(seen[0] == seen[2], "the same weights have other digests after an update and back")
    require(seen[0].keys() == seen[1].keys(), "an update changes the names of the tensors")
    require(seen[0] != seen[1], "different weights have the same digests")


async def an_open_request_knows_both_versions(subject: Subject) -> None:
    """A request that lives through an update says which tokens are of which version, and the first are as before."""
    one, _ = await _policies(subject)
    engine = subject.engine
    before = (await engine.generate(PROMPT, greedy(_LONG))).output_ids.tolist()
    stream = engine.generate_stream(PROMPT, greedy(_LONG))
    await anext(stream)  # it samples
    await engine.pause(PauseMode.RETRACT)
    try:
        await engine.load_from_disk(_folders(subject)[1], 3)
    finally:
        await engine.resume()
    results = [item async for item in stream if isinstance(item, GenerateResult)]
    require(len(results) == 1 and results[0].finish_reason == "length", "the request did not finish")
    last = results[0]
    spans = [(s.start, s.end, s.version) for s in last.version_spans]
    if len(spans) == 1:
        raise PromiseBrokenError(f"the request has one version, {spans}; it finished before the update")
    require([v for _, _, v in spans] == [1, 3], f"versions {spans}")
    seam = spans[0][1]
    require(last.output_ids.tolist()[:seam] == before[:seam], "tokens before the update differ")
    await _load(subject, _folders(subject)[0], 1)
    await _require_policy(subject, one, 1, "after going back")


async def weights_over_a_group_are_served(subject: Subject) -> None:
    """Tensors that come over a gloo group are served once the update is closed, under its version."""
    from miles_rollout.engine.conformance.sender import GroupSender, manifest_of, tensors_of

    _, other = await _policies(subject)
    engine, sender = subject.engine, GroupSender()
    tensors = tensors_of(_folders(subject)[1])
    manifest = manifest_of(tensors, 5)
    update = f"conformance-{secrets.token_hex(6)}"
    await engine.pause(PauseMode.RETRACT)
    try:
        meeting = asyncio.create_task(asyncio.to_thread(sender.meet))
        await engine.join_weight_group(
            GroupRequest(
                master_address="127.0.0.1",
                master_port=sender.port,
                rank_offset=1,
                world_size=2,
                group_name=sender.name,
                backend="gloo",
            )
        )
        await meeting
        await engine.begin_weight_update(update, manifest)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, tensors))
        await engine.weight_call(
            "/update_weights_from_distributed",
            {
                "names": [spec.name for spec in manifest.tensors],
                "dtypes": [spec.dtype for spec in manifest.tensors],
                "shapes": [list(spec.shape) for spec in manifest.tensors],
                "group_name": sender.name,
                "flush_cache": True,
                "weight_version": "5",
                # additions of the embedded engine, which verifies what comes; SGLang does not look at them
                "update_id": update,
                "digests": [spec.digest for spec in manifest.tensors],
            },
            "tensors over a group",
        )
        await sending
        await engine.commit_weight_update(update)
        await engine.leave_weight_group(sender.name)
    finally:
        await engine.resume()
    await _require_policy(subject, other, 5, "after an update over a group")
    await require_refusal(engine.leave_weight_group(sender.name), "leaving a group twice")
    await _load(subject, _folders(subject)[0], 1)


async def weights_from_shared_memory_are_served(subject: Subject) -> None:
    """Tensors in a shared-memory file are verified, and served once the update is committed."""
    from miles_rollout.engine.conformance.sender import manifest_of, shared_bucket, tensors_of

    _, other = await _policies(subject)
    engine, update = subject.engine, f"conformance-{secrets.token_hex(6)}"
    tensors = tensors_of(_folders(subject)[1])
    with shared_bucket(tensors, update) as bucket:
        await engine.begin_weight_update(update, manifest_of(tensors, 6))
        await engine.load_bucket(bucket)
        await engine.commit_weight_update(update)
    await _require_policy(subject, other, 6, "after an update from shared memory")
    await _load(subject, _folders(subject)[0], 1)


async def weights_from_pickles_are_served(subject: Subject) -> None:
    """Tensors in SGLang's own form, a pickle that names shared memory, are served once the update is closed."""
    from miles_rollout.engine.conformance.sender import pickled, tensors_of

    _, other = await _policies(subject)
    engine = subject.engine
    await engine.pause(PauseMode.RETRACT)
    try:
        with pickled(tensors_of(_folders(subject)[1])) as payload:
            await engine.open_weight_update()
            body = {"serialized_named_tensors": [payload], "weight_version": "6", "flush_cache": True}
            await subject.post("/update_weights_from_tensor", body)
            await engine.close_weight_update()
    finally:
        await engine.resume()
    await _require_policy(subject, other, 6, "after an update from tensors")
    await _load(subject, _folders(subject)[0], 1)


async def pickles_are_refused(subject: Subject) -> None:
    """A pickle runs code when it is read: an update in that form is refused with what to send instead."""
    body = {"serialized_named_tensors": ["gASVAAA="]}
    error = await require_refusal(subject.post("/update_weights_from_tensor", body), "a pickle")
    require("miles_shm" in error.reason, f"the reason does not say what to send: {error.reason}")


async def updates_need_to_be_opened(subject: Subject) -> None:
    """Closing an update that nobody opened is refused, and so are tensors outside one."""
    engine = subject.engine
    await require_refusal(engine.close_weight_update(), "closing an update that nobody opened")
    call = subject.post(
        "/update_weights_from_distributed",
        {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "digests": [None], "group_name": "nobody"},
    )
    await require_refusal(call, "tensors outside an update")


async def unknown_updates_are_refused(subject: Subject) -> None:
    """A commit of an update that never began fails; its rollback is harmless."""
    await subject.engine.rollback_weight_update("conformance-unknown")
    call = subject.engine.commit_weight_update("conformance-unknown")
    await require_refusal(call, "the commit of an unknown update")


async def names_show_weights(subject: Subject) -> None:
    """The first rows of a tensor by its canonical name."""
    answer = await subject.post("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 3})
    require(isinstance(answer, list) and len(answer) == 3, f"three elements were asked for, got {answer!r}")
    unknown = subject.post("/get_weights_by_name", {"name": "no.such.tensor", "truncate_size": 3})
    await require_refusal(unknown, "an unknown name")


_NO_SHARED_MEMORY = "SGLang takes tensors as pickles that name shared memory; Miles' buckets are an addition"
_NO_PICKLES = "the embedded engine refuses pickles, which run code when they are read; it takes files of shared memory"
_NO_IDS = "SGLang's updates have no ids: one is open or none is, and what has come in stays in"

CHECKS: tuple[Check, ...] = (
    Check("weights from disk are served", weights_from_disk_are_served, needs=_no_folders),
    Check("a missing folder changes nothing", a_missing_folder_changes_nothing, needs=_no_folders),
    Check("checksums follow the weights", checksums_follow_the_weights, needs=_no_folders),
    Check("an open request knows both versions", an_open_request_knows_both_versions, needs=_no_folders),
    Check("weights over a group are served", weights_over_a_group_are_served, needs=_no_folders),
    Check(
        "weights from shared memory are served",
        weights_from_shared_memory_are_served,
        differs={EngineKind.SGLANG: _NO_SHARED_MEMORY},
        needs=_no_folders,
    ),
    Check(
        "weights from pickles are served",
        weights_from_pickles_are_served,
        differs={EngineKind.EMBEDDED: _NO_PICKLES},
        needs=_no_folders,
    ),
    Check(
        "pickles are refused",
        pickles_are_refused,
        differs={EngineKind.SGLANG: "SGLang reads pickles, with a list of what they may name"},
    ),
    Check("updates need to be opened", updates_need_to_be_opened),
    Check("unknown updates are refused", unknown_updates_are_refused, differs={EngineKind.SGLANG: _NO_IDS}),
    Check(
        "names show weights",
        names_show_weights,
        differs={EngineKind.SGLANG: "SGLang's call does not know Qwen models; compare digests instead"},
    ),
)
