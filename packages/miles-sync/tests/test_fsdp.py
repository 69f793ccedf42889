"""Live FSDP2 shards over gloo: two processes, whole tensors at the root, each byte once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sync_fleet import same_bits
from sync_processes import Child

from miles_contracts import InvalidFieldError
from miles_sync.buckets import aligned
from miles_sync.convert import local_layout, local_tensors
from miles_sync.gathering import gather_tensors, plan_gather, send_shards
from miles_sync.group import Meeting
from miles_sync.layout import Layout


class Tiny(torch.nn.Module):
    """An embedding, a norm, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(11, 6), torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(ids)))
        return out


def module() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


class Rank:
    """One FSDP2 rank; `gather` is the collective of the export."""

    def __init__(self, rank: int, folder: Path) -> None:
        from torch.distributed.fsdp import fully_shard

        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model = module()
        fully_shard(model)
        self.rank, self.folder = rank, folder
        self.state = dict(model.state_dict())

    def layouts(self) -> Any:
        return local_layout(self.state, tied={"head.weight": "embed.weight"})

    def gather(self, layout: Layout, port: int) -> int:
        group = Meeting("127.0.0.1", port, owner=False, timeout_s=20).open("trainer", self.rank, 2)
        stored = local_tensors(self.state, [s.name for s in layout.ranks[self.rank].stored])
        plan = plan_gather(layout, 64)
        if self.rank:
            send_shards(group, layout, self.rank, stored, plan)
        else:
            torch.save(dict(gather_tensors(group, layout, stored, plan)), self.folder / "whole.pt")
        return sum(t.nbytes for t in stored.values())


def test_fsdp2_shards_arrive_whole_at_the_root(tmp_path: Path) -> None:
    import threading

    ranks = [Child(f"rank-{r}", lambda r=r: Rank(r, tmp_path)) for r in range(2)]
    try:
        answers = [rank.call("layouts") for rank in ranks]
        layout = Layout(tensors=tuple(answers[0][0]), ranks=tuple(layout for _, layout in answers))
        assert [s.name for s in layout.tensors] == ["embed.weight", "norm.bias", "norm.weight"]
        assert [s.shape for s in layout.ranks[1].stored] == [(5, 6), (3,), (3,)]
        meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=20)
        other = threading.Thread(target=ranks[1].call, args=("gather", layout, meeting.port))
        other.start()
        ranks[0].call("gather", layout, meeting.port)
        other.join()
        expected = {n: t for n, t in sorted(module().state_dict().items()) if n != "head.weight"}
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
