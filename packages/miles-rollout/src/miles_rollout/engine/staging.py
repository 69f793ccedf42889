"""The next weights of a model, beside those that serve.

Wherever a tensor lies in the model as it travels, its bytes are put straight into their place, or the memory that
they came in becomes their place; only what the model keeps in another form or precision is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from miles_contracts import Arrival, TensorSpec, WeightUpdateError
from miles_contracts.alignment import ALIGNMENT
from miles_rollout.engine.weight_layout import Place, WeightLayout, dtype_name

Bytes = NDArray[np.uint8]


class StagedWeights:
    """Copies of all of the model's tensors that do not serve yet.

    Args:
        layout: where canonical tensors live.
        expected: what will be put, by canonical name; everything must arrive before `swap`.
        spare: memory of the layout's tensors that nothing uses any more, by name; taken out of here as it is used.

    Attributes:
        adopted: tensors of the layout that stay in the memory they came in.
    """

    def __init__(
        self, layout: WeightLayout, expected: dict[str, TensorSpec], spare: dict[str, torch.Tensor] | None = None
    ) -> None:
        self._layout = layout
        self.expected = expected
        self.missing = set(expected)
        self.adopted: set[str] = set()
        self._spare = {} if spare is None else spare
        self._staged: dict[str, torch.Tensor] = {}

    def put(self, name: str, value: torch.Tensor) -> None:
        """Copy a canonical tensor to its staged place."""
        place = self._layout.place(name)
        place.write(self._tensor(place), value)
        self.missing.discard(name)

    def memory(self, spec: TensorSpec) -> Bytes | None:
        """uint8 [spec.num_bytes] of a tensor's staged place, to be filled and then `filled`.

        None where its bytes do not lie as they travel: in another order or precision, or not in host memory.
        """
        place = self._layout.place(spec.name)
        if place.index is not None or dtype_name(self._layout.tensors[place.source].dtype) != spec.dtype:
            return None
        view = place.read(self._tensor(place))
        if view.device.type != "cpu" or not view.is_contiguous():
            return None
        data: Bytes = view.reshape(-1).view(torch.uint8).numpy()
        return data

    def filled(self, name: str) -> None:
        """All bytes of a tensor are in its `memory`, and right."""
        self.missing.discard(name)

    def adopts(self, arrivals: Sequence[Arrival]) -> bool:
        """Whether what came together can stay in the memory it came in.

        All or nothing: one small tensor would keep the memory of all its neighbours from being used again.
        """
        return all(self._adopts(arrival) for arrival in arrivals)

    def _adopts(self, arrival: Arrival) -> bool:
        if not arrival.owned or arrival.part_of is not None:
            return False
        if len(arrival.data) and arrival.data.ctypes.data % ALIGNMENT:
            return False
        place = self._layout.place(arrival.spec.name)
        tensor = self._layout.tensors[place.source]
        return (
            place.index is None
            and place.shape == tuple(tensor.shape)
            and tensor.is_contiguous()
            and tensor.device.type == "cpu"
            and dtype_name(tensor.dtype) == arrival.spec.dtype
        )

    def adopt(self, spec: TensorSpec, data: Bytes) -> None:
        """Keep a tensor that `adopts` has answered for."""
        source = self._layout.place(spec.name).source
        self._staged[source] = torch.from_numpy(data).view(getattr(torch, spec.dtype)).view(spec.shape)
        self.adopted.add(source)
        self.missing.discard(spec.name)

    def swap(self) -> dict[str, torch.Tensor]:
        """Make the staged tensors the serving ones (model thread only); returns those that served, by name."""
        if self.missing:
            names = ", ".join(sorted(self.missing)[:5])
            raise WeightUpdateError(f"{len(self.missing)} tensors never arrived: {names}", tensor=min(self.missing))
        served = {}
        for name, tensor in self._layout.tensors.items():
            served[name], tensor.data = tensor.data, self._staged[name]
        return served

    def _tensor(self, place: Place) -> torch.Tensor:
        """The staged tensor of a place's source."""
        name = place.source
        if name in self.adopted:
            # Sent once more, this time to be copied: what was adopted may belong to somebody else by now.
            self.adopted.discard(name)
            del self._staged[name]
        if name not in self._staged:
            spare = self._spare.pop(name, None)
            self._staged[name] = spare if spare is not None else torch.empty_like(self._layout.tensors[name].data)
        return self._staged[name]


class Pieces:
    """The bytes of a tensor that is larger than a bucket, arriving in pieces.

    Args:
        spec: the tensor.
        memory: where they are put, uint8 [spec.num_bytes]; None for memory of their own.
    """

    def __init__(self, spec: TensorSpec, memory: Bytes | None) -> None:
        self.spec = spec
        self.in_place = memory is not None
        self.data: Bytes = np.empty(spec.num_bytes, dtype=np.uint8) if memory is None else memory
        self._spans: dict[int, int] = {}

    def room(self, start: int, length: int) -> Bytes:
        """Where the piece that begins at byte `start` goes. A piece may come twice, but never overlap another."""
        end = start + length
        if not 0 <= start < end <= len(self.data):
            raise WeightUpdateError(f"piece [{start}, {end}) of {len(self.data)} bytes", tensor=self.spec.name)
        for other, other_end in self._spans.items():
            if start < other_end and other < end and (start, end) != (other, other_end):
                reason = f"piece [{start}, {end}) overlaps piece [{other}, {other_end})"
                raise WeightUpdateError(reason, tensor=self.spec.name)
        return self.data[start:end]

    def filled(self, start: int, length: int) -> bool:
        """This piece is in its room; whether the tensor is complete."""
        self._spans[start] = start + length
        return sum(end - begin for begin, end in self._spans.items()) == len(self.data)
