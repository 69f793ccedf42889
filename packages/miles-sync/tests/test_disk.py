from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sync_fleet import manifest_of, random_weights, same_bits

from miles_contracts import InvalidFieldError, WeightUpdateError
from miles_sync.disk import DeltaPublisher, DeltaSubscriber, FolderStore, PublishReport, PullReport
from miles_sync.disk.checkpoint import ShardWriter
from miles_sync.disk.publication import read_index, read_latest
from miles_sync.tensors import from_bytes

Weights = dict[str, torch.Tensor]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    (tmp_path / "shared").mkdir()
    return FolderStore(tmp_path / "shared")


def step(weights: Weights, share: float, seed: int) -> Weights:
    """An optimiser step of the last bit on a share of the bytes."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in weights.items():
        data = tensor.clone().reshape(-1)
        raw = data.view(torch.uint8)
        raw ^= (torch.rand(raw.shape, generator=generator) < share).to(torch.uint8)
        out[name] = (raw & 1 if tensor.dtype is torch.bool else raw).view(tensor.dtype).reshape(tensor.shape)
    return out


def publish(publisher: DeltaPublisher, weights: Weights, version: int) -> PublishReport:
    return publisher.publish(weights.items(), manifest_of(weights, version))


def held(subscriber: DeltaSubscriber) -> Weights:
    """What a host has, read through our reader."""
    current = subscriber.current()
    assert current is not None
    return {n: from_bytes(current.view(n).copy(), s) for n, s in current.specs.items()}


def history(count: int, share: float = 0.05) -> list[Weights]:
    versions = [random_weights(0)]
    for seed in range(1, count):
        versions.append(step(versions[-1], share, seed))
    return versions


def test_a_host_follows_version_by_version_and_one_that_missed_some_catches_up(
    store: FolderStore, tmp_path: Path
) -> None:
    publisher = DeltaPublisher(store, chunk_bytes=1024)
    steady, late = DeltaSubscriber(store, tmp_path / "a"), DeltaSubscriber(store, tmp_path / "b", shard_bytes=3000)
    for version, weights in enumerate(history(5)):
        report = publish(publisher, weights, version)
        assert report.full is (version == 0)
        pulled = steady.pull()
        assert (pulled.version, pulled.id, pulled.applied, pulled.healed) == (version, report.id, (report.id,), "")
        assert pulled.num_bytes == report.num_bytes
        assert same_bits(held(steady), weights)
        if version in (1, 4):
            assert len(late.pull().applied) == (2 if version == 1 else 3)
            assert same_bits(held(late), weights)
    again = steady.pull()
    assert (again.applied, again.num_bytes) == ((), 0)


def test_the_checkpoint_is_what_the_safetensors_library_reads(store: FolderStore, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = random_weights(0)
    publish(DeltaPublisher(store), weights, 3)
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    subscriber = DeltaSubscriber(store, tmp_path / "host", companions=[tmp_path / "config.json"], shard_bytes=4000)
    folder = subscriber.pull().path
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    loaded = {name: tensor for file in files for name, tensor in safetensors.load_file(file).items()}
    assert same_bits(dict(sorted(loaded.items())), weights)
    assert (folder / "config.json").exists()
    assert (folder / "model.safetensors.index.json").exists()


def test_a_file_without_changes_is_linked(store: FolderStore, tmp_path: Path) -> None:
    publisher, weights = DeltaPublisher(store), {"a": torch.zeros(100), "b": torch.zeros(100)}
    publish(publisher, weights, 0)
    subscriber = DeltaSubscriber(store, tmp_path / "host", shard_bytes=400)
    first = subscriber.pull().path
    publish(publisher, {**weights, "b": torch.ones(100)}, 1)
    second = subscriber.pull().path
    a, b = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert (first / a).stat().st_ino == (second / a).stat().st_ino
    assert (first / b).stat().st_ino != (second / b).stat().st_ino
    assert torch.equal(held(subscriber)["b"], torch.ones(100))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.1, 1.0]), min_size=1, max_size=6),
    pulls=st.lists(st.booleans(), min_size=6, max_size=6),
    max_chain=st.integers(0, 4),
    chunk_bytes=st.sampled_from([64, 1000, 1 << 20]),
)
def test_any_history_pulled_at_any_times_ends_in_the_published_bits(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float], pulls: list[bool], max_chain: int, chunk_bytes: int
) -> None:
    root = tmp_path_factory.mktemp("history")
    store = FolderStore(root)
    publisher = DeltaPublisher(store, max_chain=max_chain, chunk_bytes=chunk_bytes, part_bytes=2000)
    subscriber = DeltaSubscriber(store, tmp_path_factory.mktemp("host"), shard_bytes=5000)
    weights = random_weights(0)
    for version, (share, pull) in enumerate(zip(shares, pulls, strict=False)):
        weights = step(weights, share, version)
        publish(publisher, weights, version)
        if pull:
            subscriber.pull()
            assert same_bits(held(subscriber), weights)
    subscriber.pull()
    assert same_bits(held(subscriber), weights)


def test_a_restarted_trainer_publishes_a_full_base_even_of_an_old_version_number(
    store: FolderStore, tmp_path: Path
) -> None:
    versions = history(4)
    first = DeltaPublisher(store)
    for version, weights in enumerate(versions):
        publish(first, weights, version)
    subscriber = DeltaSubscriber(store, tmp_path / "host")
    subscriber.pull()
    resumed = DeltaPublisher(store)
    other = step(versions[1], 0.5, 99)
    assert publish(resumed, other, 2).full
    assert subscriber.pull().version == 2
    assert same_bits(held(subscriber), other)


def test_a_chain_ends_by_number_or_by_size(store: FolderStore) -> None:
    versions = history(6, share=0.0)
    publisher = DeltaPublisher(store, max_chain=2)
    assert [publish(publisher, w, v).full for v, w in enumerate(versions)] == [True, False, False] * 2
    publisher = DeltaPublisher(store, max_chain_share=0.1)
    assert [publish(publisher, w, v).full for v, w in enumerate(history(4, share=0.5))] == [True, False] * 2


def test_a_model_that_changes_shape_is_published_in_full(store: FolderStore) -> None:
    publisher = DeltaPublisher(store)
    publish(publisher, {"w": torch.zeros(4)}, 0)
    assert publish(publisher, {"w": torch.zeros(5)}, 1).full


def test_old_chains_are_collected_and_a_host_from_before_starts_over(store: FolderStore, tmp_path: Path) -> None:
    publisher = DeltaPublisher(store, max_chain=1, keep_chains=1)
    versions = history(5)
    publish(publisher, versions[0], 0)
    host = DeltaSubscriber(store, tmp_path / "host")
    host.pull()
    for version in range(1, 5):
        publish(publisher, versions[version], version)
    ids = {name.split("/")[0] for name in store.names()}
    assert ids == {"latest", read_latest(store)}
    assert host.pull().version == 4
    assert same_bits(held(host), versions[4])


def test_a_host_keeps_its_current_and_previous_checkpoint_only(store: FolderStore, tmp_path: Path) -> None:
    publisher, host = DeltaPublisher(store), DeltaSubscriber(store, tmp_path / "host")
    paths = []
    for version, weights in enumerate(history(4)):
        publish(publisher, weights, version)
        paths.append(host.pull().path)
    assert [p.exists() for p in paths] == [False, False, True, True]


def two_versions(store: FolderStore, host: Path) -> tuple[DeltaSubscriber, list[Weights], str]:
    """A host at version 0, and version 1 published."""
    versions = history(2, share=0.3)
    publisher, subscriber = DeltaPublisher(store, chunk_bytes=1024, part_bytes=4000), DeltaSubscriber(store, host)
    publish(publisher, versions[0], 0)
    subscriber.pull()
    return subscriber, versions, publish(publisher, versions[1], 1).id


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "bit flip":
        data[len(data) // 2] ^= 8
    elif how == "truncated":
        del data[-5:]
    elif how == "emptied":
        data.clear()
    elif how == "zeroed page":
        data[: len(data) // 2] = bytes(len(data) // 2)
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["bit flip", "truncated", "emptied", "zeroed page", "missing"])
@pytest.mark.parametrize("name", ["index", "part-00000", "latest"])
def test_a_damaged_file_is_named_and_the_old_version_stays(
    store: FolderStore, tmp_path: Path, how: str, name: str
) -> None:
    host, versions, newest = two_versions(store, tmp_path / "host")
    before = host.current()
    assert before is not None
    key = "latest" if name == "latest" else f"{newest}/{name}"
    damage(store.root / key, how)
    expected = "nothing is published" if (name, how) == ("latest", "missing") else key
    with pytest.raises(WeightUpdateError, match=expected):
        host.pull()
    after = host.current()
    assert after is not None
    assert after.folder == before.folder
    assert same_bits(held(host), versions[0])
    assert not list((tmp_path / "host").glob(".building*"))


def test_swapped_files_are_found(store: FolderStore, tmp_path: Path) -> None:
    host, versions, newest = two_versions(store, tmp_path / "host")
    first, second = (store.root / newest / f"part-0000{i}" for i in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(WeightUpdateError, match=f"{newest}/part-0000. is (damaged|torn)"):
        host.pull()
    assert same_bits(held(host), versions[0])


def test_an_index_in_the_wrong_folder_is_found(store: FolderStore, tmp_path: Path) -> None:
    host, _, newest = two_versions(store, tmp_path / "host")
    current = host.current()
    assert current is not None
    shutil.copy(store.root / current.state.id / "index", store.root / newest / "index")
    with pytest.raises(WeightUpdateError, match=f"{newest}/index is the index of {current.state.id}"):
        host.pull()


@pytest.mark.parametrize("how", ["bit flip", "truncated", "missing"])
def test_a_damaged_local_base_is_healed_from_the_last_full_one(store: FolderStore, tmp_path: Path, how: str) -> None:
    host, versions, _ = two_versions(store, tmp_path / "host")
    current = host.current()
    assert current is not None
    damage(current.folder / "model.safetensors", how)
    report = host.pull()
    assert "model.safetensors" in report.healed or "after patching" in report.healed
    assert len(report.applied) == 2
    assert same_bits(held(host), versions[1])


def test_damage_in_a_linked_file_is_found_too(store: FolderStore, tmp_path: Path) -> None:
    publisher, weights = DeltaPublisher(store), {"a": torch.zeros(100), "b": torch.zeros(100)}
    publish(publisher, weights, 0)
    host = DeltaSubscriber(store, tmp_path / "host", shard_bytes=400)
    damage(host.pull().path / "model-00001-of-00002.safetensors", "bit flip")
    publish(publisher, {**weights, "b": torch.ones(100)}, 1)
    assert "tensor a: is not what its digest says" in host.pull().healed
    assert torch.equal(held(host)["a"], torch.zeros(100))


def test_a_publication_that_fails_is_invisible_and_the_next_one_is_full(store: FolderStore, tmp_path: Path) -> None:
    host, versions, _ = two_versions(store, tmp_path / "host")
    publisher = DeltaPublisher(store, chunk_bytes=1024, part_bytes=100)
    publish(publisher, versions[1], 1)
    names = store.names()

    def broken() -> Iterable[tuple[str, torch.Tensor]]:
        yield from list(versions[0].items())[:4]
        raise RuntimeError("export failed")

    with pytest.raises(RuntimeError, match="export failed"):
        publisher.publish(broken(), manifest_of(versions[0], 2))
    assert store.names() == names
    assert publish(publisher, versions[0], 2).full
    assert host.pull().version == 2
    assert same_bits(held(host), versions[0])


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, versions, _ = two_versions(store, tmp_path / "host")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    names = store.names()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(WeightUpdateError, match=r"the disk of .* is full \(\d+ bytes free\)"):
            publish(DeltaPublisher(store), versions[0], 5)
        with pytest.raises(WeightUpdateError, match="is full"):
            host.pull()
    assert store.names() == names
    assert same_bits(held(host), versions[0])
    assert host.pull().version == 1


def test_the_snapshot_can_live_on_disk(store: FolderStore, tmp_path: Path) -> None:
    publisher = DeltaPublisher(store, snapshot_dir=tmp_path / "scratch")
    for version, weights in enumerate(history(3)):
        publish(publisher, weights, version)
    assert list((tmp_path / "scratch").iterdir()) == []
    host = DeltaSubscriber(store, tmp_path / "host")
    host.pull()
    assert same_bits(held(host), history(3)[2])


def die_at_step(work: Callable[[], object], die_at: int) -> bool:
    """Work in a forked child that kills itself before its nth change of the disk; True when it got through."""
    child = os.fork()
    if child == 0:
        calls = 0

        def fatal(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapped

        os.fsync = fatal(os.fsync)
        os.link = fatal(os.link)
        Path.replace = fatal(Path.replace)  # type: ignore[method-assign]
        Path.unlink = fatal(Path.unlink)  # type: ignore[method-assign]
        ShardWriter.add = fatal(ShardWriter.add)  # type: ignore[method-assign]
        shutil.rmtree = fatal(shutil.rmtree)  # type: ignore[assignment]
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status == 0


def test_a_trainer_killed_at_any_step_of_a_publication_leaves_a_readable_store(
    store: FolderStore, tmp_path: Path
) -> None:
    versions = history(3, share=0.3)
    publish(DeltaPublisher(store), versions[0], 0)
    for die_at in itertools.count(1):
        root = tmp_path / f"store-{die_at}"
        shutil.copytree(store.root, root)
        copied = FolderStore(root)

        def resume(copied: FolderStore = copied) -> None:
            # Full, a delta, then full again, which collects the first chains.
            publisher = DeltaPublisher(copied, max_chain=1, keep_chains=1, part_bytes=3000)
            for version in (0, 1, 2):
                publish(publisher, versions[version], version)

        survived = die_at_step(resume, die_at)
        host = DeltaSubscriber(copied, tmp_path / f"host-{die_at}")
        version = host.pull().version
        assert same_bits(held(host), versions[version])
        publish(DeltaPublisher(copied), versions[2], 2)
        assert host.pull().version == 2
        if survived:
            break
    assert die_at > 20


def test_a_host_killed_at_any_step_of_a_pull_has_the_old_or_the_new_version(store: FolderStore, tmp_path: Path) -> None:
    versions = history(2, share=0.3)
    publisher = DeltaPublisher(store)
    publish(publisher, versions[0], 0)
    DeltaSubscriber(store, tmp_path / "old", shard_bytes=5000).pull()
    publish(publisher, versions[1], 1)
    found: list[int] = []
    for die_at in itertools.count(1):
        folder = tmp_path / f"host-{die_at}"
        shutil.copytree(tmp_path / "old", folder)
        survived = die_at_step(DeltaSubscriber(store, folder, shard_bytes=5000).pull, die_at)
        host = DeltaSubscriber(store, folder, shard_bytes=5000)
        current = host.current()
        assert current is not None
        found.append(current.state.manifest.version)
        assert same_bits(held(host), versions[found[-1]])
        host.pull()
        assert same_bits(held(host), versions[1])
        assert not list(folder.glob(".building*"))
        if survived:
            break
    assert found == sorted(found)
    assert found.count(0) > 15
    assert found.count(1) > 1


def test_refuses_bad_arguments(store: FolderStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="chunk_bytes: got 7"):
        DeltaPublisher(store, chunk_bytes=7)
    with pytest.raises(InvalidFieldError, match="max_chain: got -1"):
        DeltaPublisher(store, max_chain=-1)
    with pytest.raises(InvalidFieldError, match="keep_chains: got 0"):
        DeltaPublisher(store, keep_chains=0)
    with pytest.raises(InvalidFieldError, match="shard_bytes"):
        DeltaSubscriber(store, tmp_path / "host", shard_bytes=0)
    with pytest.raises(InvalidFieldError, match="give an existing folder"):
        FolderStore(tmp_path / "nowhere")
    with pytest.raises(InvalidFieldError, match="key: got '../x'"):
        store.read("../x")
    with pytest.raises(WeightUpdateError, match="nothing is published yet"):
        DeltaSubscriber(store, tmp_path / "host").pull()
    with pytest.raises(WeightUpdateError, match="7-x/index is missing"):
        read_index(store, "7-x")


def test_companions_may_not_be_weights(store: FolderStore, tmp_path: Path) -> None:
    publish(DeltaPublisher(store), random_weights(0), 0)
    (tmp_path / "model.safetensors").write_bytes(b"")
    host = DeltaSubscriber(store, tmp_path / "host", companions=[tmp_path / "model.safetensors"])
    with pytest.raises(InvalidFieldError, match="give files that are not weights"):
        host.pull()


def test_a_pull_report_has_its_path(store: FolderStore, tmp_path: Path) -> None:
    publish(DeltaPublisher(store), random_weights(0), 0)
    report = DeltaSubscriber(store, tmp_path / "host").pull()
    assert isinstance(report, PullReport)
    assert report.path.is_dir()
