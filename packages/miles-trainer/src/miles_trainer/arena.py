"""A model's parameters in one block of memory, in the order of their names.

Weights leave in that order, and senders lay their buckets out with the same gaps, so one finds them side by side and
need not pack them into a buffer first.
"""

from __future__ import annotations

import torch
from torch import nn

from miles_contracts.alignment import aligned


def into_arena(model: nn.Module) -> None:
    """Move all parameters of one device into one block; tied ones once. The parameter objects stay.

    Each parameter's former memory is free as soon as it is copied, so the peak is the model and one parameter
    wherever the block's pages are only taken when they are written.
    """
    parameters = sorted(model.named_parameters(), key=lambda item: item[0])
    if not parameters or len({p.device for _, p in parameters}) > 1:
        return
    size = sum(aligned(p.nbytes) for _, p in parameters)
    block = torch.empty(size, dtype=torch.uint8, device=parameters[0][1].device)
    end = 0
    for _, parameter in parameters:
        place = block[end : end + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        place.copy_(parameter.data)
        parameter.data = place
        end += aligned(parameter.nbytes)
