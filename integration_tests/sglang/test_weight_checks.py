"""Real SGLang's parameters are held against what the trainer sent: all of them here, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from server import sglang_server
from sglang_models import write_dense, write_moe
from weight_trainer import Trainer

from miles_contracts import PauseMode, WeightUpdateError
from miles_loop.expected_checksums import ExpectedChecksums
from miles_loop.senders import make_sender
from miles_loop.sglang_checksums import compared, form_of
from miles_loop.sglang_weights import with_checks
from miles_loop.trainer_link import SenderSettings
from miles_loop.transports import BroadcastTransport, DiskTransport, FleetTransport
from miles_rollout.engine_client import EngineClient
from miles_sync import FleetFencedError, UpdateReport, update_weights
from miles_sync.tensors import spec_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

PARAMETERS = {"dense": 19, "moe": 21}
"""Of SGLang: embedding, head, final norm, and eight in each of two layers, nine with a router beside the experts."""


@pytest.fixture
def trainer(request) -> Iterator[Trainer]:
    sender = make_sender(SenderSettings(transport="broadcast", bucket_bytes=1 << 16, timeout_s=60))
    yield Trainer(sender, {})
    sender.close()


def take(trainer: Trainer, folder: Path) -> None:
    """Have the trainer send what is in a folder."""
    found = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    trainer.weights, trainer.model = dict(sorted(found.items())), folder


async def update(transport: FleetTransport, trainer: Trainer, version: int, *clients: EngineClient) -> UpdateReport:
    try:
        engines = await transport.connect(clients)
        report = await update_weights(
            engines, trainer, version=version, mode=PauseMode.RETRACT, deadline_s=120, settle_s=60
        )
        return with_checks(report, engines)
    except BaseException:
        transport.reset()
        raise


FLIPS = {
    "dense": {
        "lm_head.weight": "lm_head.weight",
        "model.layers.0.self_attn.k_proj.weight": "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.1.mlp.up_proj.weight": "model.layers.1.mlp.gate_up_proj.weight",
        "model.norm.weight": "model.norm.weight",
    },
    "moe": {
        "model.layers.0.mlp.experts.7.gate_proj.weight": "model.layers.0.mlp.experts.w13_weight",
        "model.layers.1.mlp.experts.2.down_proj.weight": "model.layers.1.mlp.experts.w2_weight",
        "model.layers.1.mlp.gate.weight": "model.layers.1.mlp.gate.weight",
    },
}
"""The tensor of which one bit is changed on its way, and the parameter that it becomes."""


@pytest.mark.parametrize("name", ["dense", "moe"])
async def test_every_parameter_is_compared_and_one_bit_is_seen(name: str, trainer: Trainer, request) -> None:
    served = request.getfixturevalue(name)
    async with AsyncExitStack() as stack:
        sglang = await stack.enter_async_context(EngineClient(served.sglang))
        embedded = await stack.enter_async_context(EngineClient(served.embedded))
        transport = BroadcastTransport(trainer)
        version = 1
        take(trainer, served.folders[1])
        for sent, parameter in FLIPS[name].items():
            trainer.flip = (sent, 5)
            with pytest.raises(FleetFencedError, match="that of what the trainer sent is") as caught:
                await update(transport, trainer, version, sglang, embedded)
            assert (caught.value.engine, caught.value.tensor) == (sglang.url, parameter)
            assert not caught.value.committed
            assert caught.value.report.fenced == (sglang.url,)
            assert await sglang.weight_version() is None
            trainer.flip = None
            report = await update(transport, trainer, version, sglang, embedded)
            (check,) = report.checks
            assert (check.engine, check.compared, check.not_compared) == (sglang.url, PARAMETERS[name], {})
            assert 0 < check.engine_s < report.transfer_s
            assert report.metrics()["perf/update_weights_compared"] == PARAMETERS[name]
            version += 1


@pytest.mark.parametrize("name", ["dense", "moe"])
async def test_the_ranks_of_one_engine_are_compared_each(name: str, trainer: Trainer, tmp_path: Path) -> None:
    for seed, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        if name == "moe":
            write_moe(folder, seed, inner=64)
        else:
            write_dense(folder, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # one core is enough for both
        with sglang_server(tmp_path / "a", tmp_path / "log", "--tp", "2", "--weight-version", "0") as url:
            async with EngineClient(url) as engine:
                transport = BroadcastTransport(trainer)
                take(trainer, tmp_path / "b")
                (check,) = (await update(transport, trainer, 1, engine)).checks
                assert (check.compared, check.not_compared) == (2 * PARAMETERS[name], {})
                rows, columns = trainer.weights["model.layers.0.self_attn.o_proj.weight"].shape
                # the last column of the first row: the second rank's
                trainer.flip = ("model.layers.0.self_attn.o_proj.weight", 32 * columns - 1)
                with pytest.raises(FleetFencedError, match="that of what the trainer sent is") as caught:
                    await update(transport, trainer, 2, engine)
                assert caught.value.tensor == "model.layers.0.self_attn.o_proj.weight@1"
                assert rows == 64


async def test_an_engine_of_another_dtype_is_verified_as_far_as_it_is_known(trainer: Trainer, tmp_path: Path) -> None:
    write_dense(tmp_path / "a", 0)
    options = ("--weight-version", "0", "--dtype", "bfloat16")  # the last one counts
    with sglang_server(tmp_path / "a", tmp_path / "log", *options) as url:
        async with EngineClient(url) as engine:
            take(trainer, tmp_path / "a")
            transport = BroadcastTransport(trainer)
            (check,) = (await update(transport, trainer, 1, engine)).checks
            packed = "a CPU with matrix units keeps bfloat16 matrices packed"
            assert (check.compared, check.not_compared) == (10, {packed: 9})
            assert f"10 of 19 parameters of {url}" in str(check)
            trainer.flip = ("model.norm.weight", 31)  # the sign: rounding does not take it away
            with pytest.raises(FleetFencedError) as caught:
                await update(transport, trainer, 2, engine)
            assert caught.value.tensor == "model.norm.weight"
            assert torch.equal(trainer.weights["model.norm.weight"], torch.ones(64))


async def test_a_checkpoint_that_was_loaded_is_compared_and_the_one_before_comes_back(tmp_path: Path, request) -> None:
    served = request.getfixturevalue("dense")
    settings = SenderSettings(transport="disk", store=str(tmp_path / "store"), timeout_s=60)
    trainer = Trainer(make_sender(settings), {})
    async with EngineClient(served.sglang) as sglang, EngineClient(served.embedded) as embedded:
        transport = DiskTransport(tmp_path / "store", tmp_path / "checkpoint", served.folders[0], trainer)
        take(trainer, served.folders[1])
        (check,) = (await update(transport, trainer, 1, sglang, embedded)).checks
        assert (check.engine, check.compared, check.not_compared) == (sglang.url, PARAMETERS["dense"], {})
        await update(transport, trainer, 2, sglang)
        before = await sglang.weight_checksums()
        trainer.flip = ("model.layers.1.mlp.down_proj.weight", 7)
        with pytest.raises(WeightUpdateError, match="that of what the trainer sent is") as caught:
            await update(transport, trainer, 3, sglang)
        assert not isinstance(caught.value, FleetFencedError), "it can go back"
        assert (caught.value.engine, caught.value.tensor) == (sglang.url, "model.layers.1.mlp.down_proj.weight")
        assert await sglang.weight_version() == 2
        assert await sglang.weight_checksums() == before
    trainer.sender.close()


@pytest.mark.parametrize(("family", "tied"), [("Qwen2", False), ("Llama", True), ("Mistral", False)])
async def test_other_families_are_kept_as_they_are_described(family: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # biases too
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    expected = ExpectedChecksums(tmp_path / "model", [spec_of(n, t) for n, t in weights.items()], 1 << 20)
    with sglang_server(tmp_path / "model", tmp_path / "log", "--skip-tokenizer-init") as url:
        async with EngineClient(url) as engine:
            form = form_of(await engine.server_info())
            expected.expect(form)
            assert len(list(expected.tap(weights.items()))) == len(weights)
            check = compared(url, await engine.weight_checksums(), expected.table(form))
    expected.close()
    assert check.not_compared == {}
    assert check.compared == {"Qwen2": 17, "Llama": 14, "Mistral": 15}[family]
