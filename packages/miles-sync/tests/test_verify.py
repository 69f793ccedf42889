from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sync_fleet import MemoryEngine, MemorySource, manifest_of, random_weights

from miles_contracts import GenerateResult, InvalidFieldError, PauseMode, SamplingParams, WeightUpdateError
from miles_sync import Expect, FleetFencedError, LocalReceiver, LocalSender, LogprobCanary, update_weights
from miles_sync.verify import Tolerance


def compare(
    tmp_path: Path, sent: dict[str, torch.Tensor], served: dict[str, torch.Tensor], tolerance: Tolerance | None = None
) -> list[str]:
    receiver = LocalReceiver()
    receiver.tensors = served
    with LocalSender(tmp_path, 512) as sender:
        found = receiver.compare(sender.send(sent.items(), manifest_of(sent, 1), "u"), tolerance)
    return [f"{d.name}: {d.reason}" for d in found]


def test_the_same_bits_pass_and_every_flipped_one_is_counted(tmp_path: Path) -> None:
    weights = random_weights(0)
    assert compare(tmp_path, weights, dict(weights)) == []
    wrong = weights["model.embed_tokens.weight"].clone()
    wrong.view(torch.uint8)[50, 3] ^= 1
    wrong.view(torch.uint8)[1, 3] ^= 1
    found = compare(tmp_path, weights, {**weights, "model.embed_tokens.weight": wrong})
    assert found == ["model.embed_tokens.weight: 1 byte(s) differ"] * 2


def test_missing_extra_and_reshaped_tensors_are_differences(tmp_path: Path) -> None:
    sent = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}
    served = {"a": torch.zeros(2, 2), "c": torch.zeros(4).half(), "d": torch.zeros(1)}
    assert compare(tmp_path, sent, served) == [
        "a: is served as [2, 2], sent as [4]",
        "b: is not served",
        "c: is served as torch.float16, sent as torch.float32: bits cannot be compared",
        "d: was not sent",
    ]


def test_a_tolerance_allows_another_precision_and_no_nan(tmp_path: Path) -> None:
    sent = {"w": torch.linspace(-1, 1, 300)}
    served = {"w": sent["w"].to(torch.bfloat16)}
    assert compare(tmp_path, sent, served, Tolerance(relative=2**-8)) == []
    assert compare(tmp_path, sent, served, Tolerance(relative=2**-12))
    served["w"][7] = float("nan")
    assert compare(tmp_path, sent, served, Tolerance(relative=2**-8)) == ["w: 1 element(s) beyond the tolerance"]
    with pytest.raises(InvalidFieldError, match=r"Tolerance.absolute: got -1"):
        Tolerance(absolute=-1)


class Sampling(MemoryEngine):
    """Its log-probs are numbers of the served weights."""

    bias = 0.0
    frozen = False

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        assert not self.paused
        tensors = self.receiver.tensors
        value = float(tensors["model.norm.weight"].mean()) if tensors and not self.frozen else 0.5
        logprobs = np.full(params.max_new_tokens, value + self.bias - len(input_ids), np.float32)
        return GenerateResult(
            output_ids=np.arange(len(logprobs)), logprobs=logprobs, version_spans=(), finish_reason="length"
        )


async def run(tmp_path: Path, engines: list[Sampling], expect: Expect = Expect.CHANGE) -> None:
    with LocalSender(tmp_path) as sender:
        await update_weights(
            engines,
            MemorySource(sender, random_weights(1)),
            version=1,
            mode=PauseMode.RETRACT,
            deadline_s=20.0,
            canary=LogprobCanary([[1, 2], [3]], expect=expect),
        )


async def test_a_policy_that_changed_alike_everywhere_passes(tmp_path: Path) -> None:
    await run(tmp_path, [Sampling("a"), Sampling("b")])


@pytest.mark.parametrize(
    ("attribute", "value", "expect", "message"),
    [
        ("frozen", True, Expect.CHANGE, "the canary did not change"),
        ("bias", 0.1, Expect.CHANGE, "nats away from a's"),
        ("bias", float("nan"), Expect.ANYTHING, "not finite"),
        ("bias", 0.0, Expect.SAME, "and should not have"),
    ],
)
async def test_a_wrong_policy_stops_the_fleet(
    tmp_path: Path, attribute: str, value: Any, expect: Expect, message: str
) -> None:
    engines = [Sampling("a"), Sampling("b")]
    setattr(engines[1], attribute, value)
    with pytest.raises(FleetFencedError, match=message):
        await run(tmp_path, engines, expect)
    assert all(engine.paused for engine in engines)


def test_refuses_probes_that_probe_nothing() -> None:
    for prompts in ([], [[]]):
        with pytest.raises(InvalidFieldError, match="prompts"):
            LogprobCanary(prompts)
    with pytest.raises(InvalidFieldError, match="tolerance"):
        LogprobCanary([[1]], tolerance=-1)


async def test_a_probe_that_finds_no_engine_is_not_a_verdict_on_the_weights(tmp_path: Path) -> None:
    class Gone(Sampling):
        async def generate(self, *args: Any, **kwargs: Any) -> GenerateResult:
            if self.receiver.tensors:
                raise ConnectionResetError("gone")
            return await super().generate(*args, **kwargs)

    engines: list[Sampling] = [Sampling("a"), Gone("b")]
    with pytest.raises(WeightUpdateError, match="1 engine.s. serve version 1, fenced: b"):
        await run(tmp_path, engines)
    assert not engines[0].paused
