"""Stands in for SGLang's compiled kernels: any name can be imported, calling one says that it is missing."""

from typing import Any, NoReturn

__version__ = "0.4.10"
__path__: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in; choose a backend that does not need it")

    return missing
