"""Live FSDP2 shards over gloo: whole tensors at the root, or each shard straight into engines; each byte once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sync_fleet import same_bits
from sync_processes import Child, EngineSide

from miles_contracts import InvalidFieldError, TensorSpec, WeightManifest
from miles_contracts.alignment import aligned
from miles_sync.convert import local_layout, local_tensors, scatter
from miles_sync.gathering import gather_tensors, plan_gather, send_shards
from miles_sync.group import Meeting
from miles_sync.layout import Layout, RankBuilder, Slice
from miles_sync.peer import PeerBucket, PeerReceiver, PeerSender, SourcesDifferError, merge
from miles_sync.peer.tcp import TcpBackend
from miles_sync.transfer import minimum_bytes, plan_transfers


class Tiny(torch.nn.Module):
    """An embedding, a norm, and a head that is tied to the embedding."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(rows, 6), torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(ids)))
        return out


FEW, MANY = 11, 100_000
"""Rows of the embedding. Half of many rows are divided between two ranks that hold them."""


class Rank:
    """One FSDP2 rank of `replicas` groups of two; `gather` is the collective of the export."""

    def __init__(self, rank: int, folder: Path, replicas: int, rows: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        os.environ.update(RANK=str(rank), WORLD_SIZE=str(2 * replicas))
        store = dist.FileStore(str(folder / "store"), 2 * replicas)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * replicas)
        torch.manual_seed(0)
        model = Tiny(rows)
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh if replicas > 1 else mesh["shard"])
        self.rank, self.size, self.folder = rank, 2 * replicas, folder
        self.state = dict(model.state_dict())
        for tensor in set(self.state.values()):
            local_of(tensor).add_(1 + rank % 2)  # what no other shard, and no freshly made model, holds

    def layouts(self) -> Any:
        return local_layout(self.state, tied={"head.weight": "embed.weight"})

    def gather(self, layout: Layout, port: int) -> int:
        group = Meeting("127.0.0.1", port, owner=False, timeout_s=20).open("trainer", self.rank, self.size)
        stored = local_tensors(self.state, [s.name for s in layout.ranks[self.rank].stored])
        plan = plan_gather(layout, 64)
        if self.rank:
            send_shards(group, layout, self.rank, stored, plan)
        else:
            torch.save(dict(gather_tensors(group, layout, stored, plan)), self.folder / "whole.pt")
        return sum(t.nbytes for t in stored.values())

    def expose(self, source: Layout, target: Layout, handles: list[str]) -> None:
        writer = TcpBackend(timeout_s=20).writer()
        self.sender = PeerSender(source, target, self.rank, writer, handles, 64)
        self.names = [s.name for s in source.ranks[self.rank].stored]

    def write(self, manifest: WeightManifest, update_id: str, flip: str = "") -> list[PeerBucket]:
        """All rounds of this rank. Collectives fail, so nothing but its own shards can be written."""
        from torch.distributed.tensor import DTensor

        if flip:
            local_of(self.state[flip]).view(torch.int32).view(-1)[0] ^= 1

        def forbidden(*_: object, **__: object) -> None:
            raise AssertionError("a shard is not to be gathered")

        with pytest.MonkeyPatch.context() as patch:
            for name in ("full_tensor", "redistribute"):
                patch.setattr(DTensor, name, forbidden)
            for name in ("all_gather", "all_gather_into_tensor", "broadcast", "all_reduce"):
                patch.setattr(dist, name, forbidden)
            return list(self.sender.send(local_tensors(self.state, self.names), manifest, update_id))

    def full(self) -> None:
        """The same weights as torch gathers them: a collective."""
        whole = {name: tensor.full_tensor() for name, tensor in self.state.items() if name != "head.weight"}
        torch.save(whole, self.folder / f"full-{self.rank}.pt")


def local_of(tensor: Any) -> torch.Tensor:
    """Memory of a rank's own part."""
    local: torch.Tensor = tensor.to_local()
    return local


def together(ranks: list[Child], method: str, *arguments: Any) -> list[Any]:
    """The same call in all processes at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.call(method, *arguments), ranks))


def cut_for_engines(specs: tuple[TensorSpec, ...]) -> Layout:
    """Two engine ranks: the embedding cut by rows with padding, the head's copy of it by columns, norms whole."""
    by_name = {spec.name: spec for spec in specs}
    ranks = []
    for rank in range(2):
        builder = RankBuilder()
        embed = by_name["embed.weight"]
        builder.shard(Slice(spec=embed, index=rank, count=2), padded=True)
        builder.shard(Slice(spec=embed, dim=1, index=rank, count=2), stored="head.weight")
        for name in ("norm.bias", "norm.weight"):
            builder.keep(by_name[name])
        ranks.append(builder.build())
    return Layout(tensors=specs, ranks=tuple(ranks))


@pytest.mark.parametrize(("replicas", "rows"), [(1, FEW), (2, MANY)])
def test_fsdp2_shards_are_written_where_engine_ranks_want_them_without_being_gathered(
    tmp_path: Path, replicas: int, rows: int
) -> None:
    ranks = [Child(f"rank-{r}", lambda r=r: Rank(r, tmp_path, replicas, rows)) for r in range(2 * replicas)]
    engines: list[Child] = []
    try:
        answers = [rank.call("layouts") for rank in ranks]
        source = Layout(tensors=tuple(answers[0][0]), ranks=tuple(layout for _, layout in answers))
        target = cut_for_engines(source.tensors)
        for number in range(2):
            make = lambda n=number: EngineSide(PeerReceiver(source, target, n, TcpBackend(timeout_s=20)))  # noqa: E731
            engines.append(Child(f"engine-{number}", make))
        together(ranks, "expose", source, target, together(engines, "handle"))
        plan = plan_transfers(source, target)
        assert plan.num_bytes == minimum_bytes(target)
        assert all(t.confirmer is not None for t in plan.transfers) == (replicas > 1)
        sent = plan.sent(len(ranks))
        assert max(sent) - min(sent) < plan.num_bytes / 6

        manifest = WeightManifest(version=1, tensors=source.tensors)
        together(engines, "do", "begin", "u1", manifest)
        for parts in zip(*together(ranks, "write", manifest, "u1"), strict=True):
            together(engines, "do", "load", merge(plan, parts))
        together(engines, "do", "commit", "u1")
        together(ranks, "full")
        expected = torch.load(tmp_path / "full-0.pt")
        for number, engine in enumerate(engines):
            version, _, tensors = engine.call("state")
            held = scatter(target, number, expected)
            assert version == 1
            assert {n: data for n, (_, _, data) in tensors.items()} == {
                n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in held.items()
            }

        if replicas > 1:  # a replica that drifts apart is found before an engine hears of the round
            written = [
                rank.call("write", manifest, "u2", "embed.weight" if r == 3 else "") for r, rank in enumerate(ranks)
            ]
            with pytest.raises(SourcesDifferError, match=r"tensor embed\.weight: source ranks (1 and 3|3 and 1)"):
                [merge(plan, parts) for parts in zip(*written, strict=True)]
    finally:
        for child in (*ranks, *engines):
            child.stop()


@pytest.mark.parametrize(("replicas", "rows"), [(1, FEW), (2, MANY)])
def test_fsdp2_shards_arrive_whole_at_the_root(tmp_path: Path, replicas: int, rows: int) -> None:
    ranks = [Child(f"rank-{r}", lambda r=r: Rank(r, tmp_path, replicas, rows)) for r in range(2 * replicas)]
    try:
        answers = [rank.call("layouts") for rank in ranks]
        layout = Layout(tensors=tuple(answers[0][0]), ranks=tuple(layout for _, layout in answers))
        assert [s.name for s in layout.tensors] == ["embed.weight", "norm.bias", "norm.weight"]
        assert [s.shape for s in layout.ranks[1].stored] == [(rows // 2, 6), (3,), (3,)]
        sources = {t.source for transfers in plan_gather(layout, 64).transfers for t in transfers}
        assert sources == ({0, 1} if replicas == 1 else {0, 1, 3}), "rank 2 holds what the root holds"
        meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=20)
        together(ranks, "gather", layout, meeting.port)
        together(ranks, "full")
        expected = dict(sorted(torch.load(tmp_path / "full-1.pt").items()))
        assert same_bits(torch.load(tmp_path / "whole.pt"), expected)
    finally:
        for rank in ranks:
            rank.stop()


def test_a_tie_to_nothing_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="the tensor that head is tied to must be there"):
        local_layout({"head": torch.zeros(2)}, tied={"head": "embed"})


def test_the_experts_of_a_gather_come_last() -> None:
    import sync_layouts as layouts

    plan = plan_gather(layouts.fsdp(2), 500, experts_apart=True)
    names = [spec.name for specs in plan.rounds for spec in specs]
    first_expert = next(i for i, n in enumerate(names) if ".experts." in n)
    assert all(".experts." in n for n in names[first_expert:])
    single = gather_tensors(None, layouts.fsdp(1), layouts.weights(), plan_gather(layouts.fsdp(1), 500))
    assert same_bits(dict(single), layouts.weights())


def test_tensors_of_a_round_lie_side_by_side_in_one_block() -> None:
    import sync_layouts as layouts

    plan = plan_gather(layouts.fsdp(1), 500)
    gathered = dict(gather_tensors(None, layouts.fsdp(1), layouts.weights(), plan))
    for specs in plan.rounds:
        first, end = gathered[specs[0].name], 0
        for spec in specs:
            assert gathered[spec.name].data_ptr() == first.data_ptr() + end
            assert gathered[spec.name].untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            end = aligned(end + spec.num_bytes)
