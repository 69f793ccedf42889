"""A precision contract is a value that both ends compare before anything runs."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from fnmatch import fnmatchcase

import msgspec

from miles_contracts.errors import ContractMismatchError, InvalidFieldError


class PrecisionFormat(StrEnum):
    """How the elements of a quantised (or plain) weight are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8_BLOCK = "fp8_block"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT4 = "int4"


_BLOCKS: dict[PrecisionFormat, tuple[tuple[int, int], ...]] = {
    PrecisionFormat.FP32: ((0, 0),),
    PrecisionFormat.BF16: ((0, 0),),
    PrecisionFormat.FP8_BLOCK: ((128, 128),),
    PrecisionFormat.MXFP8: ((1, 32),),
    PrecisionFormat.NVFP4: ((1, 16),),
    PrecisionFormat.INT4: ((1, 32), (1, 128)),
}


class PrecisionContract(msgspec.Struct, frozen=True, kw_only=True, tag="precision"):
    """Which tensors are stored in which format, and which are exempt.

    Attributes:
        format: storage format of the tensors that match `include`.
        block: rows x columns that share a scale; (0, 0) where the format has no scale.
        scale: `fp32`, `pow2` (FP32 restricted to powers of two), `ue8m0`, `e4m3_fp32` or `bf16`; "" for none.
        include: glob patterns over canonical names.
        exclude: glob patterns that stay in `exception_format`; they win over `include`.
        exception_format: storage format of everything else.
    """

    format: PrecisionFormat
    block: tuple[int, int] = (0, 0)
    scale: str = ""
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    exception_format: PrecisionFormat = PrecisionFormat.BF16

    def __post_init__(self) -> None:
        allowed = _BLOCKS[self.format]
        if self.block not in allowed:
            raise InvalidFieldError("PrecisionContract.block", self.block, f"{self.format} uses {allowed}")
        if bool(self.scale) != (self.block != (0, 0)):
            raise InvalidFieldError("PrecisionContract.scale", self.scale, "name a scale exactly for block formats")

    def format_of(self, name: str) -> PrecisionFormat:
        """Storage format of the tensor with this canonical name."""
        if any(fnmatchcase(name, p) for p in self.exclude):
            return self.exception_format
        if any(fnmatchcase(name, p) for p in self.include):
            return self.format
        return self.exception_format

    @property
    def fingerprint(self) -> str:
        """Stable 16-hex-digit name of this value; equal on both ends exactly when the contracts are."""
        canonical = msgspec.json.encode(msgspec.to_builtins(self), order="sorted")
        return hashlib.blake2b(canonical, digest_size=8).hexdigest()

    def require_equal(self, other: PrecisionContract, here: str, there: str) -> None:
        """Raise ContractMismatchError naming every field in which two ends differ."""
        lines = [
            f"{field}: {getattr(self, field)!r} {here}, {getattr(other, field)!r} {there}"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        ]
        if lines:
            raise ContractMismatchError("precision contracts differ:\n  " + "\n  ".join(lines))
