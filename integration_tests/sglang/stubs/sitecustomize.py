"""Lets SGLang serve on a machine without a GPU, for tests only; no file of SGLang is changed.

Python imports this module by itself when its folder is on PYTHONPATH. It does two things:

- torchvision registers shape functions for its compiled operators while it is imported; those operators are
  built for another torch, and serving text needs none of them, so the registering module becomes an empty one;
- SGLang registers host buffers (of routed experts, for example) with the CUDA driver; here they are used as
  they are.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))


def _without_cuda_pinning(module: types.ModuleType) -> None:
    module._cuda_host_register = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]


_AFTER_IMPORT: dict[str, Callable[[types.ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": _without_cuda_pinning,
}


class _PatchingFinder:
    """Finds modules as usual and patches the named ones right after they have run."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        patch = _AFTER_IMPORT.get(name)
        if patch is None:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _PatchingFinder())  # type: ignore[arg-type]
