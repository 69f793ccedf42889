"""SGLang's checksums against the trainer's: what is equal, what differs, what nobody can tell."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from miles_contracts import MilesError, TensorSpec, WeightManifest, WeightUpdateError
from miles_loop.expected_checksums import ExpectedChecksums
from miles_loop.sglang_checksums import TrainerChecks, compared, form_of
from miles_loop.sglang_disk import SglangDiskEngine
from miles_sync.messages import DiskBucket
from miles_sync.report import UpdateReport, WeightCheck
from miles_sync.sglang_layout import ChecksumTable, SglangForm

CPU = SglangForm(device="cpu", dtype="float32")
INFO = {"device": "cpu", "dtype": "float32", "tp_size": 2, "ep_size": 1, "quantization": None, "model_impl": "auto"}


def test_the_form_is_what_the_server_says() -> None:
    assert form_of(INFO) == msgspec.structs.replace(CPU, tensor_parallel=2)
    strange = form_of(INFO | {"quantization": "fp8", "enable_lora": True, "device": "cuda", "dtype": "torch.bfloat16"})
    assert strange == SglangForm(
        device="cuda", dtype="bfloat16", tensor_parallel=2, unlike="enable_lora = True, quantization = fp8"
    )
    assert form_of({}).device == "None"  # of which nothing is described


def test_everything_equal() -> None:
    table = ChecksumTable(ranks=({"a": "1", "b": "2"},), seconds=0.5, waited_s=0.1)
    check = compared("http://e", {"a": "1", "b": "2"}, table)
    assert check == WeightCheck(engine="http://e", compared=2, trainer_s=0.5, waited_s=0.1)
    assert str(check) == "2 of 2 parameters of http://e are held against the trainer's"


def test_a_difference_names_engine_parameter_and_both_checksums() -> None:
    table = ChecksumTable(ranks=({"a": "1", "b": "2"}, {"a": "1", "b": "3"}))
    found = {"a@0": "1", "b@0": "2", "a@1": "1", "b@1": "bad"}
    with pytest.raises(WeightUpdateError, match="its checksum is bad, that of what the trainer sent is 3") as caught:
        compared("http://e", found, table)
    assert (caught.value.engine, caught.value.tensor) == ("http://e", "b@1")


def test_what_is_not_compared_is_counted_by_reason() -> None:
    table = ChecksumTable(ranks=({"a": "1", "gone": "2"}, {"a": "1"}), left_out={"packed": "it is packed"})
    found = {"a@0": "1", "a@1": "1", "packed@0": "7", "packed@1": "8", "cos": "9"}
    check = compared("http://e", found, table)
    assert check.compared == 2
    assert check.not_compared == {
        "it is packed": 2,
        "no tensor is known to become it": 1,
        "the engine gives no checksum for it": 1,
    }
    assert str(check) == (
        "2 of 6 parameters of http://e are held against the trainer's; not compared are 2: it is packed; "
        "1: no tensor is known to become it; 1: the engine gives no checksum for it"
    )


def test_an_engine_of_which_nothing_is_known_is_not_passed_in_silence() -> None:
    check = compared("http://e", {"a": "1", "b": "2"}, ChecksumTable(nothing="it hashes in another way"))
    assert (check.compared, check.not_compared) == (0, {"it hashes in another way": 2})


def test_the_numbers_are_metrics_of_an_update_with_such_engines() -> None:
    report = UpdateReport(update_id="u", version=1, previous={}, serving=())
    assert not [name for name in report.metrics() if "compared" in name]
    checks = (
        WeightCheck(engine="a", compared=3, not_compared={"x": 1, "y": 2}, engine_s=0.2, trainer_s=0.1),
        WeightCheck(engine="b", compared=4, engine_s=0.1, trainer_s=0.3, waited_s=0.05),
    )
    metrics = msgspec.structs.replace(report, checks=checks).metrics()
    found = {
        n.removeprefix("perf/update_weights_"): v for n, v in metrics.items() if "compared" in n or "checksum" in n
    }
    assert found == {
        "compared": 7,
        "not_compared": 3,
        "engine_checksum_s": 0.2,
        "trainer_checksum_s": 0.3,
        "checksum_wait_s": 0.05,
    }


class Client:
    """An SGLang with these checksums."""

    url = "http://e"

    def __init__(self, **checksums: str) -> None:
        self.checksums = checksums
        self.info: dict[str, Any] = dict(INFO, tp_size=1)

    async def server_info(self) -> dict[str, Any]:
        return self.info

    async def weight_checksums(self) -> dict[str, str]:
        return self.checksums


class Source:
    """A trainer that writes down what is asked of it."""

    def __init__(self, table: ChecksumTable) -> None:
        self.table = table
        self.told: list[tuple[str, str, SglangForm]] = []

    async def expect_checksums(self, update_id: str, form: SglangForm) -> None:
        self.told.append(("expect", update_id, form))

    async def checksums(self, update_id: str, form: SglangForm) -> ChecksumTable:
        self.told.append(("ask", update_id, form))
        return self.table


async def test_the_trainer_is_told_before_and_asked_after() -> None:
    source, client = Source(ChecksumTable(ranks=({"a": "1"},))), Client(a="1")
    checks = TrainerChecks(source)
    await checks.expect(client, "u1")
    assert await checks.verify(client, "u1") == {"a": "1"}
    assert source.told == [("expect", "u1", CPU), ("ask", "u1", CPU)]
    assert checks.checks["http://e"].compared == 1
    # another server at the same address, and a bit that has changed
    client.info["device"], client.checksums = "cuda", {"a": "2"}
    await checks.expect(client, "u2")
    assert checks.checks == {}
    with pytest.raises(WeightUpdateError, match="its checksum is 2"):
        await checks.verify(client, "u2")
    assert source.told[2:] == [(what, "u2", msgspec.structs.replace(CPU, device="cuda")) for what in ("expect", "ask")]
    assert checks.checks == {}


async def test_without_a_trainer_nothing_is_said_to_be_verified() -> None:
    checks = TrainerChecks(None)
    await checks.expect(Client(), "u")
    assert await checks.verify(Client(a="1"), "u") == {"a": "1"}
    assert checks.checks == {}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"model_type": "qwen3", "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


NORM = torch.arange(4.0)
SPECS = (TensorSpec(name="model.norm.weight", dtype="float32", shape=(4,)),)


def test_the_trainers_table_is_of_what_was_sent(model: Path) -> None:
    expected = ExpectedChecksums(model, SPECS, 1 << 20)
    cuda = msgspec.structs.replace(CPU, device="cuda")
    for form in (CPU, cuda, CPU):
        expected.expect(form)
    assert list(expected.tap([("model.norm.weight", NORM)])) == [("model.norm.weight", NORM)]
    table = expected.table(CPU)
    assert table.ranks == ({"model.norm.weight": hashlib.sha256(NORM.numpy().tobytes()).hexdigest()[:16]},)
    assert (table.num_bytes, table.nothing, table.left_out) == (16, "", {})
    assert expected.table(CPU) is table
    assert expected.table(cuda).ranks == ()
    assert "cuda" in expected.table(cuda).nothing
    expected.close()


def test_a_table_that_nobody_asked_for_in_time_is_refused(model: Path) -> None:
    expected = ExpectedChecksums(model, SPECS, 1 << 20)
    list(expected.tap([("model.norm.weight", NORM)]))
    with pytest.raises(MilesError, match="before the first bucket"):
        expected.expect(CPU)
    with pytest.raises(MilesError, match="no checksums were asked for"):
        expected.table(CPU)


def test_a_table_of_half_an_update_is_refused(model: Path) -> None:
    expected = ExpectedChecksums(model, SPECS, 1 << 20)
    expected.expect(CPU)
    with pytest.raises(WeightUpdateError, match=r"tensor model\.norm\.weight: was not among the tensors"):
        expected.table(CPU)
    expected.close()


class Loading(Client):
    """An SGLang that loads checkpoints from disk."""

    def __init__(self) -> None:
        super().__init__(a="1")
        self.loaded: list[tuple[str, int]] = []
        self.resumed = 0

    async def load_from_disk(self, path: Path, version: int) -> None:
        self.loaded.append((path.name, version))

    async def weight_version(self) -> int | None:
        return self.loaded[-1][1] if self.loaded else 0

    async def resume(self) -> None:
        self.resumed += 1


class Subscriber:
    """A host that has pulled a folder a version."""

    def __init__(self) -> None:
        self.version = 0

    def pull(self, publication: str) -> Any:
        return SimpleNamespace(path=Path(publication), version=self.version)

    def current(self) -> Any:
        manifest = WeightManifest(version=self.version, tensors=())
        return SimpleNamespace(state=SimpleNamespace(manifest=manifest))


async def test_an_sglang_that_has_loaded_something_else_goes_back_or_does_not_serve() -> None:
    source, client, subscriber = Source(ChecksumTable(ranks=({"a": "1"},))), Loading(), Subscriber()
    engine = SglangDiskEngine(client, subscriber, TrainerChecks(source))  # type: ignore[arg-type]

    async def load(version: int) -> None:
        subscriber.version = version
        await engine.begin_weight_update(f"u{version}", WeightManifest(version=version, tensors=()))
        await engine.load_bucket(DiskBucket(update_id=f"u{version}", index=0, publication=f"p{version}"))
        await engine.commit_weight_update(f"u{version}")

    await load(1)
    assert engine.check is not None
    assert (engine.check.compared, await engine.weight_version()) == (1, 1)
    client.checksums = {"a": "2"}
    for _ in range(2):  # a commit that is repeated is as wrong as before
        with pytest.raises(WeightUpdateError, match="its checksum is 2, that of what the trainer sent is 1"):
            await load(2)
    assert await engine.weight_version() is None
    with pytest.raises(WeightUpdateError, match="must not serve"):
        await engine.resume()
    await engine.begin_weight_update("u3", WeightManifest(version=3, tensors=()))
    await engine.rollback_weight_update("u3")  # which loads nothing
    assert await engine.weight_version() is None
    client.checksums = {"a": "1"}
    await engine.rollback_weight_update("u2")
    assert client.loaded[-1] == ("p1", 1)
    assert await engine.weight_version() == 1
    await engine.resume()
    assert client.resumed == 1
