"""What an engine is: the embedded one or SGLang, which version, and whether this package knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from miles_contracts import EngineError

SGLANG_VERSIONS = ">=0.5.23,<0.6"
"""The range of SGLang whose calls and flags this package knows; it is tested with the lowest one."""
EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Data types of weights that every kind of engine knows; `auto` takes the one in the model's config."""
SUPPORTED = f"the embedded engine, or SGLang {SGLANG_VERSIONS}"
"""What an error recommends when a call is missing."""


class EngineKind(StrEnum):
    """Programs that speak the engine boundary."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Facts of a running engine, as it gives them itself.

    Attributes:
        kind: which program it is.
        version: its version as text, None when it does not say.
        incremental_streams: the events of a streamed answer carry new tokens only, not all of them so far.
        routed_experts: it was started to record the expert choices of a mixture-of-experts model.
        seeded: `sampling_seed` decides what is sampled; SGLang heeds it in its deterministic mode only.
        batched_streams: a stream of several prompts has one event a prompt, when it has finished. SGLang's have one for
            every token.
    """

    kind: EngineKind
    version: str | None = None
    incremental_streams: bool = False
    routed_experts: bool = True
    seeded: bool = True
    batched_streams: bool = False


def identity_of(info: Mapping[str, Any]) -> EngineIdentity:
    """The identity that an answer of `/server_info` states."""
    version = info.get("version")
    named = str(version) if version is not None else None
    if info.get("engine") == "miles":
        batched = bool(info.get("batched_streams", False))
        return EngineIdentity(kind=EngineKind.EMBEDDED, version=named, batched_streams=batched)
    return EngineIdentity(
        kind=EngineKind.SGLANG,
        version=named,
        incremental_streams=bool(info.get("incremental_streaming_output", False)),
        routed_experts=bool(info.get("enable_return_routed_experts", False)),
        seeded=bool(info.get("enable_deterministic_inference", False)),
    )


def context_tokens(info: Mapping[str, Any]) -> int | None:
    """Most tokens of a prompt and its completion that an answer of `/server_info` leaves room for; None: not said.

    SGLang says what it takes as a prompt, which is a few tokens short of what it holds; the embedded engine says what
    the model was made for and what its cache holds.
    """
    said = ("max_req_input_len",) if _number(info, "max_req_input_len") else ("context_length", "kv_tokens")
    return min((n for name in said if (n := _number(info, name)) is not None), default=None)


def _number(info: Mapping[str, Any], name: str) -> int | None:
    value = info.get(name)
    return value if type(value) is int and value > 0 else None


def require_supported(engine: str, identity: EngineIdentity, *, routing: bool = False) -> None:
    """Refuse an engine that this package does not know, or that cannot do what a run needs.

    Args:
        engine: its URL, for the message.
        routing: the run needs expert choices.

    Raises:
        EngineError: naming what is wrong and what to do.
    """
    if identity.kind is not EngineKind.SGLANG:
        return
    if not _in_range(identity.version):
        named = f"version {identity.version}" if identity.version else "a version that it does not name"
        raise EngineError(engine, f"SGLang in {named} is not known; use {SUPPORTED}")
    if routing and not identity.routed_experts:
        remedy = "start it with --enable-return-routed-experts, or train without --trainer.replay.enabled"
        raise EngineError(engine, f"this SGLang does not record the experts that routing replay needs; {remedy}")


def _in_range(version: str | None) -> bool:
    try:
        return version is not None and SpecifierSet(SGLANG_VERSIONS).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
