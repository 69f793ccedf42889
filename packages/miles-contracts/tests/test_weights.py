from __future__ import annotations

import msgspec
import pytest
import xxhash

from miles_contracts import (
    ContractMismatchError,
    GroupRequest,
    InvalidFieldError,
    PrecisionContract,
    PrecisionFormat,
    TensorSpec,
    WeightManifest,
    digest,
    wire,
)


def spec(name: str, **kw: object) -> TensorSpec:
    return TensorSpec(**{"name": name, "dtype": "bfloat16", "shape": (4, 8), **kw})  # type: ignore[arg-type]


def test_sizes() -> None:
    assert spec("a").num_bytes == 64
    assert TensorSpec(name="s", dtype="float32", shape=()).num_bytes == 4
    assert WeightManifest(version=1, tensors=(spec("a"), spec("b"))).num_bytes == 128


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"dtype": "float31"}, "float31.*use one of"), ({"shape": (-1,)}, "sizes"), ({"name": ""}, "canonical name")],
)
def test_bad_spec(bad: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        spec(**{"name": "a", **bad})  # type: ignore[arg-type]


def test_manifest_is_sorted_and_unique() -> None:
    for names in (("b", "a"), ("a", "a")):
        with pytest.raises(InvalidFieldError, match="sort by name"):
            WeightManifest(version=0, tensors=tuple(map(spec, names)))
    with pytest.raises(InvalidFieldError, match="version"):
        WeightManifest(version=-1, tensors=())


def test_every_difference_is_listed() -> None:
    a = WeightManifest(version=1, tensors=(spec("a"), spec("b", digest="x:1"), spec("c"), spec("e")))
    b = WeightManifest(version=2, tensors=(spec("b", digest="x:2"), spec("c", shape=(1,)), spec("d"), spec("e")))
    assert a.differences(a) == []
    a.require_equal(a, "same")
    with pytest.raises(ContractMismatchError) as info:
        a.require_equal(b, "trainer against engine")
    text = str(info.value)
    for part in (
        "a: missing",
        "d: unexpected",
        "x:1 here, x:2 there",
        "c: bfloat16[4, 8] here",
        "version 1 here, 2 there",
    ):
        assert part in text


def test_unknown_digest_is_not_a_difference() -> None:
    a = WeightManifest(version=1, tensors=(spec("a", digest="x:1"),))
    assert a.differences(WeightManifest(version=1, tensors=(spec("a"),))) == []


def test_digest_is_xxh3_128() -> None:
    assert digest(b"miles") == "xxh3_128:" + xxhash.xxh3_128(b"miles").hexdigest()


def test_manifest_travels() -> None:
    m = WeightManifest(version=1, tensors=(spec("a"), spec("b")), precision="p")
    assert wire.decode(wire.encode(m), WeightManifest) == m


FP8 = PrecisionContract(
    format=PrecisionFormat.FP8_BLOCK, block=(128, 128), scale="fp32", include=("*proj.weight",), exclude=("*o_proj*",)
)


def test_exceptions_win() -> None:
    assert FP8.format_of("model.layers.0.mlp.up_proj.weight") is PrecisionFormat.FP8_BLOCK
    assert FP8.format_of("model.layers.0.self_attn.o_proj.weight") is PrecisionFormat.BF16
    assert FP8.format_of("lm_head.weight") is PrecisionFormat.BF16


def test_fingerprint_is_stable_and_sensitive() -> None:
    assert FP8.fingerprint == "e6de785618a341ae"
    other = PrecisionContract(
        format=PrecisionFormat.FP8_BLOCK, block=(128, 128), scale="pow2", include=("*proj.weight",)
    )
    assert other.fingerprint != FP8.fingerprint
    with pytest.raises(ContractMismatchError, match=r"scale: 'fp32' engine, 'pow2' trainer"):
        FP8.require_equal(other, "engine", "trainer")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"format": "mxfp8", "block": (1, 16), "scale": "ue8m0"}, r"mxfp8 uses \(\(1, 32\),\)"),
        ({"format": "bf16", "block": (0, 0), "scale": "fp32"}, "scale"),
        ({"format": "int4", "block": (1, 32), "scale": ""}, "scale"),
    ],
)
def test_bad_precision(bad: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        PrecisionContract(**{**bad, "format": PrecisionFormat(bad["format"])})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_name", ""),
        ("rank_offset", 0),
        ("rank_offset", 3),
        ("senders", 0),
        ("master_port", -1),
        ("master_port", 65536),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
    ],
)
def test_a_group_request_refuses_by_field(field: str, value: object) -> None:
    good = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3}
    assert GroupRequest(**good).backend == "nccl"  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match=field):
        GroupRequest(**{**good, field: value})  # type: ignore[arg-type]


def test_a_group_of_several_senders_has_its_engines_behind_them() -> None:
    good = {"master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 3}
    request = GroupRequest(**good, senders=2)  # type: ignore[arg-type]
    assert msgspec.to_builtins(request)["senders"] == 2
    assert "senders" not in msgspec.to_builtins(GroupRequest(**good))  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match=r"rank_offset: got 1; use 2 to 2"):
        GroupRequest(**{**good, "rank_offset": 1}, senders=2)  # type: ignore[arg-type]
