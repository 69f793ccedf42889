"""The driver's end of verifying SGLang: its checksums are held against what the trainer sent. Needs no torch.

begin     the trainer is told in which form an engine keeps its weights
transfer  the trainer hashes what it sends, part by part, as the engine will
last      engine and trainer are asked; a difference ends the update before its commit
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from miles_contracts import WeightUpdateError
from miles_rollout.engine_client import EngineClient
from miles_sync.report import WeightCheck
from miles_sync.sglang_layout import ChecksumTable, SglangForm

_PLAIN: dict[str, tuple[Any, ...]] = {
    "attn_cp_size": (None, 1),
    "cpu_offload_gb": (None, 0),
    "dcp_size": (None, 1),
    "dp_size": (None, 1),
    "enable_dp_attention": (None, False),
    "enable_dp_lm_head": (None, False),
    "enable_fp32_lm_head": (None, False),
    "enable_lora": (None, False),
    "ep_num_redundant_experts": (None, 0),
    "model_impl": (None, "auto", "sglang"),
    "moe_dense_tp_size": (None,),
    "moe_dp_size": (None, 1),
    "pp_size": (None, 1),
    "quantization": (None,),
    "quantize_and_serve": (None, False),
    "speculative_algorithm": (None,),
    "torchao_config": (None, ""),
}
"""Options that change what an engine keeps, with the values at which they do not."""


class ChecksumSource(Protocol):
    """The trainer, as far as it knows what engines must have received."""

    async def expect_checksums(self, update_id: str, form: SglangForm) -> None:
        """Hash what is sent in this update as an engine of this form does."""

    async def checksums(self, update_id: str, form: SglangForm) -> ChecksumTable:
        """The result, once everything was sent."""


def form_of(info: Mapping[str, Any]) -> SglangForm:
    """What an SGLang's `/server_info` says of the form in which it keeps weights."""
    strange = [f"{name} = {info[name]}" for name, plain in _PLAIN.items() if info.get(name) not in plain]
    return SglangForm(
        device=str(info.get("device")),
        dtype=str(info.get("dtype")).removeprefix("torch."),
        tensor_parallel=int(info.get("tp_size") or 1),
        expert_parallel=int(info.get("ep_size") or 1),
        unlike=", ".join(strange),
    )


class TrainerChecks:
    """Verifies engines of a fleet against the trainer, update by update.

    Args:
        source: the trainer; None verifies nothing.
    """

    def __init__(self, source: ChecksumSource | None) -> None:
        self._source = source
        self._forms: dict[str, SglangForm] = {}
        self.checks: dict[str, WeightCheck] = {}
        """Of the update before, by engine."""

    async def expect(self, client: EngineClient, update_id: str) -> None:
        """Have the trainer ready for this engine, before the first bucket."""
        if self._source is None:
            return
        self.checks.pop(client.url, None)
        # Asked each time: behind an address there may be another server than before.
        form = self._forms[client.url] = form_of(await client.server_info())
        await self._source.expect_checksums(update_id, form)

    async def verify(self, client: EngineClient, update_id: str) -> dict[str, str]:
        """An engine's checksums, after everything has been sent to it.

        Raises:
            WeightUpdateError: names the first parameter that is not what was sent, with both checksums.
        """
        begun = time.perf_counter()
        found = await client.weight_checksums()
        engine_s = time.perf_counter() - begun
        if self._source is not None:
            table = await self._source.checksums(update_id, self._forms[client.url])
            self.checks[client.url] = msgspec.structs.replace(compared(client.url, found, table), engine_s=engine_s)
        return found


def compared(engine: str, found: Mapping[str, str], table: ChecksumTable) -> WeightCheck:
    """Hold checksums, by the engine's names (`name@rank` when it has several), against the trainer's.

    Raises:
        WeightUpdateError: names the first parameter that differs.
    """
    several = len(table.ranks) > 1
    expected = {f"{n}@{k}" if several else n: sums[n] for k, sums in enumerate(table.ranks) for n in sums}
    reasons: Counter[str] = Counter()
    equal = 0
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            reasons["the engine gives no checksum for it"] += 1
        elif name not in expected:
            reason = table.nothing or table.left_out.get(name.rpartition("@")[0] or name)
            reasons[reason or "no tensor is known to become it"] += 1
        elif found[name] == expected[name]:
            equal += 1
        else:
            reason = f"its checksum is {found[name]}, that of what the trainer sent is {expected[name]}"
            raise WeightUpdateError(reason, engine=engine, tensor=name)
    return WeightCheck(
        engine=engine, compared=equal, not_compared=dict(reasons), trainer_s=table.seconds, waited_s=table.waited_s
    )
