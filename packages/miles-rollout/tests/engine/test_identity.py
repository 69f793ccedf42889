"""Which engines the client knows, and what it says about those that it does not."""

from __future__ import annotations

from typing import Any

import pytest

from miles_contracts import EngineError
from miles_rollout.engine_identity import (
    SGLANG_VERSIONS,
    EngineIdentity,
    EngineKind,
    identity_of,
    require_supported,
)

URL = "http://engine"


def sglang(version: str | None, **facts: Any) -> EngineIdentity:
    return identity_of({"version": version, **facts})


def test_the_embedded_engine_says_so() -> None:
    assert identity_of({"engine": "miles", "batched_streams": True}).batched_streams
    identity = identity_of({"engine": "miles", "version": "0.1.0"})
    assert not identity.batched_streams
    assert identity == EngineIdentity(kind=EngineKind.EMBEDDED, version="0.1.0")
    require_supported(URL, identity, routing=True)


def test_facts_of_sglang() -> None:
    identity = sglang("0.5.23", incremental_streaming_output=True, enable_return_routed_experts=True)
    assert (identity.kind, identity.incremental_streams, identity.routed_experts) == (EngineKind.SGLANG, True, True)
    assert not identity.seeded
    assert sglang("0.5.23", enable_deterministic_inference=True).seeded


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.40", "0.5.24rc1"])
def test_known_versions(version: str) -> None:
    require_supported(URL, sglang(version))


@pytest.mark.parametrize("version", ["0.5.22", "0.4.10", "0.6.0", "1.0", "unknown", "", None])
def test_other_versions_are_refused_by_name(version: str | None) -> None:
    with pytest.raises(EngineError, match="is not known; use the embedded engine, or SGLang") as caught:
        require_supported(URL, sglang(version))
    assert SGLANG_VERSIONS in str(caught.value)
    assert not version or version in str(caught.value)


def test_routing_has_to_be_switched_on() -> None:
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        require_supported(URL, sglang("0.5.23"), routing=True)
    require_supported(URL, sglang("0.5.23", enable_return_routed_experts=True), routing=True)
