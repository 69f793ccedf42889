"""How closely an engine's weights are compared with the trainer's.

manifest   names, dtypes and shapes; catches a wrong model, not wrong bits
digests    every tensor's digest at both ends (the default)
bits       the bytes themselves, sent a second time and compared with what is served
tolerance  the same by value, for engines that store another precision than is sent
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import torch

from miles_contracts import InvalidFieldError, TensorSpec
from miles_sync.tensors import Bytes, from_bytes, torch_dtype


class VerifyLevel(StrEnum):
    """See the module."""

    MANIFEST = "manifest"
    DIGESTS = "digests"
    BITS = "bits"
    TOLERANCE = "tolerance"


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """|served - sent| <= absolute + relative * |sent|, element by element; NaN never passes."""

    absolute: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        for name in ("absolute", "relative"):
            if not getattr(self, name) >= 0:
                raise InvalidFieldError(f"Tolerance.{name}", getattr(self, name), "give a number >= 0")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that is not as it was sent.

    Attributes:
        name: the tensor.
        reason: in which way.
        elements: how many elements (bytes, when comparing bits) differ; 0 when they cannot be compared.
    """

    name: str
    reason: str
    elements: int = 0


class Comparison:
    """Holds weights that are served against buckets that are sent again.

    Args:
        served: canonical tensors.
        tolerance: None compares bits.
    """

    def __init__(self, served: dict[str, torch.Tensor], tolerance: Tolerance | None = None) -> None:
        self._served, self._tolerance = served, tolerance
        self._seen: set[str] = set()
        self._differences: list[Difference] = []

    def put(self, spec: TensorSpec, data: Bytes, part_of: TensorSpec | None, start: int) -> None:
        """Compare a tensor, or the part of one that begins at byte `start`; arguments as of `Staging.put`."""
        whole = part_of if part_of is not None else spec
        self._seen.add(whole.name)
        served = self._served.get(whole.name)
        if served is None:
            self._differences.append(Difference(name=whole.name, reason="is not served"))
            return
        if tuple(served.shape) != whole.shape:
            reason = f"is served as {list(served.shape)}, sent as {list(whole.shape)}"
            self._differences.append(Difference(name=whole.name, reason=reason))
            return
        sent_dtype = torch_dtype(whole.dtype)
        sent = from_bytes(data.copy(), TensorSpec(name=whole.name, dtype="uint8", shape=(len(data),))).view(sent_dtype)
        first = start // sent_dtype.itemsize
        flat = served.detach().cpu().contiguous().reshape(-1)[first : first + len(sent)]
        self._compare(whole.name, flat, sent)

    def finish(self) -> list[Difference]:
        """All differences; a served tensor that was not sent is one."""
        self._differences += [Difference(name=n, reason="was not sent") for n in self._served if n not in self._seen]
        return self._differences

    def _compare(self, name: str, served: torch.Tensor, sent: torch.Tensor) -> None:
        if self._tolerance is None:
            if served.dtype != sent.dtype:
                reason = f"is served as {served.dtype}, sent as {sent.dtype}: bits cannot be compared"
                self._differences.append(Difference(name=name, reason=reason))
                return
            wrong = int((served.view(torch.uint8) != sent.view(torch.uint8)).sum())
            unit = "byte(s) differ"
        else:
            a, b = served.to(torch.float64), sent.to(torch.float64)
            allowed = self._tolerance.absolute + self._tolerance.relative * b.abs()
            # Written so that NaN, for which every comparison is false, counts as wrong.
            wrong = int((~((a - b).abs() <= allowed)).sum())
            unit = "element(s) beyond the tolerance"
        if wrong:
            self._differences.append(Difference(name=name, reason=f"{wrong} {unit}", elements=wrong))
