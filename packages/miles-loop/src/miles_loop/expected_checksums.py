"""The trainer's end of verifying SGLang: what its checksums must be, from the tensors that are sent to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from miles_contracts import MilesError, TensorSpec
from miles_loop.models import declared
from miles_sync.checksums import ParameterSums
from miles_sync.sglang_layout import CONFIG_KEYS, ChecksumTable, Description, SglangForm, describe


class ExpectedChecksums:
    """Of one update; costs nothing until an engine is announced.

    Args:
        model: folder of the model's config.json.
        specs: the canonical tensors that are sent.
        backlog_bytes: tensors that wait to be hashed while others are sent.
    """

    def __init__(self, model: Path, specs: Sequence[TensorSpec], backlog_bytes: int) -> None:
        self._model, self._specs, self._backlog_bytes = model, specs, backlog_bytes
        self._forms: dict[SglangForm, tuple[Description, ParameterSums]] = {}
        self._tables: dict[SglangForm, ChecksumTable] = {}
        self._started = False

    def expect(self, form: SglangForm) -> None:
        """An engine of this form will be asked for its checksums; to be said before the first bucket.

        Raises:
            MilesError: tensors have been sent already.
        """
        if form in self._forms:
            return
        if self._started:
            raise MilesError("checksums have to be asked for before the first bucket")
        config = {key: declared(self._model, key) for key in CONFIG_KEYS}
        description = describe(self._specs, config, form)
        self._forms[form] = description, ParameterSums(description.ranks, self._backlog_bytes)

    def tap(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The same tensors, which are hashed on the way."""
        self._started = True
        for _, sums in self._forms.values():
            tensors = sums.tap(tensors)
        yield from tensors

    def table(self, form: SglangForm) -> ChecksumTable:
        """What an engine of this form must have, once everything has been sent.

        Raises:
            MilesError: nobody has said that such an engine would be asked.
            WeightUpdateError: a tensor was not sent.
        """
        if form not in self._forms:
            raise MilesError(f"no checksums were asked for of {form}")
        if form not in self._tables:
            description, sums = self._forms[form]
            self._tables[form] = ChecksumTable(
                ranks=tuple(sums.result()),
                waited_s=sums.waited_s,
                left_out=description.left_out,
                nothing=description.nothing,
                num_bytes=sums.num_bytes,
                seconds=sums.seconds,
                peak_bytes=sums.peak_bytes,
            )
        return self._tables[form]

    def close(self) -> None:
        """The update is over."""
        for _, sums in self._forms.values():
            sums.close()
        self._forms.clear()
