"""An export of tensors, held against its manifest while it is taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from miles_contracts import TensorSpec, WeightManifest, WeightUpdateError
from miles_sync.tensors import digest_bytes, flat_bytes, spec_of


class CheckedExport:
    """Gives the bytes of an export's tensors in the manifest's order; the first difference is an error by name."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest) -> None:
        self._source = iter(tensors)
        self._expected = {spec.name for spec in manifest.tensors}
        self._name = ""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._whole: str | None = None

    def bytes_of(self, spec: TensorSpec) -> torch.Tensor:
        """Flat uint8 bytes of this tensor, on its device; asked again for the parts of a split one.

        Raises:
            WeightUpdateError: the export ends too early, or gives another name, dtype or shape.
        """
        if self._name == spec.name:
            return self._bytes
        item = next(self._source, None)
        if item is None:
            raise WeightUpdateError("the export ended before the manifest did", tensor=spec.name)
        name, tensor = item
        if name != spec.name:
            known = "out of the manifest's order" if name in self._expected else "not in the manifest"
            raise WeightUpdateError(f"the export gave {name} ({known}) where {spec.name} was due", tensor=name)
        seen = spec_of(name, tensor)
        if (seen.dtype, seen.shape) != (spec.dtype, spec.shape):
            stated = f"{spec.dtype}{list(spec.shape)}"
            raise WeightUpdateError(f"the manifest says {stated}, it is {seen.dtype}{list(seen.shape)}", tensor=name)
        self._name, self._bytes, self._whole = name, flat_bytes(tensor), None
        return self._bytes

    def whole_digest(self, spec: TensorSpec) -> str:
        """Digest of the whole current tensor, computed once."""
        if self._whole is None:
            self._whole = digest_bytes(self.bytes_of(spec).cpu().numpy())
        return self._whole

    def finish(self) -> None:
        """Raise when the export has more than the manifest."""
        item = next(self._source, None)
        if item is not None:
            raise WeightUpdateError("the export goes on after the manifest's end", tensor=item[0])
