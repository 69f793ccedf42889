"""A weight manifest says what one version of the weights is: names, dtypes, shapes and digests.

The manifest is metadata only. A version is the number of optimiser updates that the weights contain.
"""

from __future__ import annotations

from typing import Any

import msgspec

from miles_contracts.errors import ContractMismatchError, InvalidFieldError

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype that travels; the names are torch's without the prefix."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor under its canonical Hugging Face name.

    Attributes:
        name: for example `model.layers.0.self_attn.q_proj.weight`.
        dtype: a key of `DTYPE_BYTES`.
        shape: sizes; () is a scalar.
        digest: `xxh3_128:<32 hex digits>` of the contiguous little-endian bytes, None while unknown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidFieldError("TensorSpec.name", self.name, "give the canonical name")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidFieldError("TensorSpec.dtype", self.dtype, f"use one of {', '.join(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise InvalidFieldError("TensorSpec.shape", self.shape, "sizes are >= 0")

    @property
    def num_elements(self) -> int:
        """Product of the sizes."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def num_bytes(self) -> int:
        """Bytes of the contiguous tensor."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, tag="weights"):
    """Everything that makes up one version of a model's weights.

    Attributes:
        version: number of optimiser updates in the weights.
        tensors: sorted by name, names unique.
        precision: fingerprint of the precision contract the tensors were exported under, "" for none.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    precision: str = ""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise InvalidFieldError("WeightManifest.version", self.version, "a version is >= 0")
        names = [t.name for t in self.tensors]
        if names != sorted(set(names)):
            raise InvalidFieldError("WeightManifest.tensors", len(names), "sort by name, without duplicates")

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.num_bytes for t in self.tensors)

    def differences(self, other: WeightManifest) -> list[str]:
        """One line for each way in which `other` differs; digests count only where both are known."""
        mine, theirs = {t.name: t for t in self.tensors}, {t.name: t for t in other.tensors}
        lines = [f"{name}: missing" for name in sorted(mine.keys() - theirs.keys())]
        lines += [f"{name}: unexpected" for name in sorted(theirs.keys() - mine.keys())]
        for name in sorted(mine.keys() & theirs.keys()):
            a, b = mine[name], theirs[name]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                lines.append(f"{name}: {a.dtype}{list(a.shape)} here, {b.dtype}{list(b.shape)} there")
            elif a.digest is not None and b.digest is not None and a.digest != b.digest:
                lines.append(f"{name}: digest {a.digest} here, {b.digest} there")
        if self.precision != other.precision:
            lines.append(f"precision contract {self.precision or 'none'} here, {other.precision or 'none'} there")
        if self.version != other.version:
            lines.append(f"version {self.version} here, {other.version} there")
        return lines

    def require_equal(self, other: WeightManifest, what: str) -> None:
        """Raise ContractMismatchError listing every difference, unless there is none."""
        lines = self.differences(other)
        if lines:
            more = f"\n  ... and {len(lines) - 20} more" if len(lines) > 20 else ""
            raise ContractMismatchError(f"{what}:\n  " + "\n  ".join(lines[:20]) + more)


class ShmTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies in a shared-memory bucket."""

    spec: TensorSpec
    offset: int


class ShmBucket(msgspec.Struct, frozen=True, kw_only=True, tag="shm_bucket"):
    """A bucket of tensors in a shared-memory segment of this host: the local transport's message.

    A tensor larger than a bucket is split along its bytes: `part_of` then holds the spec of the whole and
    `part_start` the first byte of the part, and the bucket's single tensor is a flat uint8 piece.

    Attributes:
        path: file under the shared-memory mount (for example `/dev/shm/miles-...`), read by mapping it.
        num_bytes: used bytes.
        tensors: contents; offsets are aligned to 64 bytes.
        update_id: the update transaction this belongs to.
        index: ordinal of the bucket in the update.
    """

    path: str
    num_bytes: int
    tensors: tuple[ShmTensor, ...]
    update_id: str
    index: int
    part_of: TensorSpec | None = None
    part_start: int = 0


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks an engine to join a group that weights come through (SGLang's `/init_weights_update_group`).

    Attributes:
        master_address, master_port: where the group meets, served by the sender, which has rank 0.
        rank_offset: rank of the engine's first rank.
        world_size: ranks of the group, the sender's included.
        group_name: unique for ever: a restarted engine must not meet the keys of the group it was in before.
        backend: `gloo`, `nccl`, or one that the engine's process was composed with.
        timeout_s: for the meeting and for each transfer. Not among SGLang's fields, which waits for half an hour.
        senders: ranks of the group that send; they come first. Not among SGLang's fields either, and left out of the
            message unless a transport has more than one.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"
    timeout_s: float = 60.0
    senders: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if not self.group_name:
            raise InvalidFieldError("group_name", self.group_name, "name the group")
        first = 1 if self.senders is msgspec.UNSET else self.senders
        if first < 1:
            raise InvalidFieldError("senders", first, "use at least 1")
        if not first <= self.rank_offset < self.world_size:
            raise InvalidFieldError("rank_offset", self.rank_offset, f"use {first} to {self.world_size - 1}")
        if not 0 <= self.master_port < 65536:
            raise InvalidFieldError("master_port", self.master_port, "use 0 to 65535")
        if not self.timeout_s > 0:
            raise InvalidFieldError("timeout_s", self.timeout_s, "give a positive number of seconds")


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, or a piece of one, as it came to an engine.

    Attributes:
        spec: of what came, with the sender's digest.
        data: uint8 [spec.num_bytes], the receiver's own memory until the next transfer but one.
        owned: nothing else will ever be put there: whoever gets it may keep it.
        part_of: spec of the whole when this is a flat piece of a larger tensor.
        part_start: the piece's first byte.
    """

    spec: TensorSpec
    data: Any
    owned: bool = False
    part_of: TensorSpec | None = None
    part_start: int = 0


def update_group_prefix(name: str, device: str = "cpu") -> str:
    """Prefix of a weight group's keys at its meeting point.

    It is the one that ranks use which join with `torch.distributed`'s own helper, as SGLang does, so that our ranks
    and theirs find each other.
    """
    return f"{name}/{name}//{device}/"


def digest(data: Any) -> str:
    """`xxh3_128:<hex>` of a contiguous buffer (anything with the buffer protocol). Needs the `digest` extra."""
    try:
        import xxhash
    except ImportError as error:  # the extra keeps contracts at two dependencies
        raise ImportError("weight digests need xxhash: pip install 'miles-contracts[digest]'") from error
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
