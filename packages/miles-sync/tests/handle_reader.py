"""A process that is no relative of the sender's, reads handles from its standard input and says what they open.

One line in, the base64 of a handle; one line out, JSON: by name the digest of the bytes that were copied out of it,
and where a tensor begins in its memory. It does what SGLang does, and needs nothing but torch.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from typing import Any

import torch
import xxhash
from torch.multiprocessing import reductions


def by_uuid(*arguments: Any) -> torch.Tensor:
    """As SGLang names devices: by what they are called in every process."""
    uuids = [str(torch.cuda.get_device_properties(d).uuid) for d in range(torch.cuda.device_count())]
    return rebuild(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])


def opened(handle: bytes) -> dict[str, tuple[str, str, list[int]]]:
    found = pickle.loads(handle)  # made by the test's own sender
    memory, answer = found["flattened_tensor"], {}
    for place in found["metadata"]:
        assert place.end_idx - place.start_idx == place.numel
        tensor = memory[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape).cpu().clone()
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        answer[place.name] = (xxhash.xxh3_128_hexdigest(raw.data), str(tensor.dtype), list(tensor.shape))
    return answer


rebuild = reductions.rebuild_cuda_tensor
reductions.rebuild_cuda_tensor = by_uuid
for line in sys.stdin:
    sys.stdout.write(json.dumps(opened(base64.b64decode(line))) + "\n")
    sys.stdout.flush()
