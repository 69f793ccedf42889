from __future__ import annotations

import torch
from torch import nn

from miles_trainer.arena import into_arena


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(5, 3, bias=True)
        self.a = nn.Embedding(7, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(5, 7, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.a.weight
        self.empty = nn.Parameter(torch.empty(0, 4))


def test_parameters_lie_side_by_side_in_the_order_of_their_names_and_keep_their_values() -> None:
    model = Tied()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    into_arena(model)
    after = dict(model.named_parameters())
    assert model.head.weight is model.a.weight
    end = 0
    for name in sorted(after):
        assert after[name] is objects[name]
        assert torch.equal(after[name], before[name])
        assert after[name].untyped_storage().data_ptr() == after["a.weight"].untyped_storage().data_ptr()
        assert after[name].storage_offset() * after[name].element_size() == end
        end += -(-after[name].nbytes // 64) * 64
    assert end == after["a.weight"].untyped_storage().nbytes()
    model.b(torch.ones(5)).sum().backward()
    optimizer.step()
    assert torch.equal(model.b.bias, before["b.bias"] - 0.5)


def test_a_model_without_parameters_is_left_alone() -> None:
    into_arena(nn.ReLU())
