"""AdamW on float32 masters: a step either happens entirely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from miles_trainer.config import OptimizerConfig
from miles_trainer.errors import NonFiniteError, NonFiniteReport

_FULL = (torch.float32, torch.float64)


class MasterAdamW:
    """AdamW over a model's trainable parameters.

    Parameters of float32 (or float64) are their own masters. For narrower ones a float32 master and a float32
    gradient accumulator are kept, so that micro-batches do not add up in bfloat16.

    Args:
        parameters: trainable parameters by name; shared (tied) ones once.
        config: rates and bounds.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype in _FULL:
                self.masters[name] = parameter
                continue
            master = parameter.detach().to(torch.float32, copy=True)
            self.masters[name] = master
            parameter.register_post_accumulate_grad_hook(_accumulate_into(master))  # type: ignore[no-untyped-call]
        decayed = [m for m in self.masters.values() if m.dim() >= 2]
        plain = [m for m in self.masters.values() if m.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for master in self.masters.values():
            master.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients by name; parameters that got none are missing."""
        return {name: m.grad for name, m in self.masters.items() if m.grad is not None}

    def step(self, lr: float) -> float:
        """Clip and apply one update with learning rate `lr`; returns the global norm before clipping.

        Raises:
            NonFiniteError: a gradient is NaN or infinite, or their norm overflows; nothing was changed.
        """
        gradients = self.gradients()
        norm = global_norm(list(gradients.values()))
        if not torch.isfinite(norm):
            raise NonFiniteError(_report(gradients, float(norm)))
        if self.config.max_grad_norm is not None and norm > self.config.max_grad_norm:
            torch._foreach_mul_(list(gradients.values()), self.config.max_grad_norm / float(norm))
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if parameter.dtype not in _FULL:
                    parameter.copy_(self.masters[name])
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and separate masters, under `<kind>:<parameter name>`; live tensors, not copies."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for kind, value in self._adam.state.get(master, {}).items():
                out[f"{kind}:{name}"] = value
            if self.parameters[name].dtype not in _FULL:
                out[f"master:{name}"] = master
        return out

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state()` gave.

        Raises:
            KeyError: a tensor that belongs to no parameter.
            ValueError: a tensor of the wrong shape.
        """
        fresh: dict[Tensor, dict[str, Tensor]] = {}
        for key, value in state.items():
            kind, _, name = key.partition(":")
            master = self.masters[name]
            if kind != "step" and value.shape != master.shape:
                raise ValueError(f"{key} has shape {tuple(value.shape)}, the parameter {tuple(master.shape)}")
            if kind == "master":
                with torch.no_grad():
                    master.copy_(value)
            else:
                # a copy, since a loaded tensor may be a read-only mapping; fused AdamW counts steps on the device
                fresh.setdefault(master, {})[kind] = value.to(master.device, copy=True)
        self._adam.state.clear()
        self._adam.state.update(fresh)

    def to(self, device: torch.device) -> None:
        """Move moments and separate masters; the model moves its own parameters."""
        for name, master in self.masters.items():
            for kind, value in self._adam.state.get(master, {}).items():
                self._adam.state[master][kind] = value.to(device)
            if self.parameters[name].dtype not in _FULL:
                master.data = master.data.to(device)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all gradients, accumulated in float64."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    return norms.square().sum().sqrt()


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if master.grad is None:
            master.grad = parameter.grad.to(torch.float32)
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook


def _report(gradients: Mapping[str, Tensor], norm: float) -> NonFiniteReport:
    bad = {name: g for name, g in gradients.items() if not bool(torch.isfinite(g).all())}
    if not bad:
        return NonFiniteReport(what="gradient norm", count=1, value=str(norm))
    first = next(iter(bad.values()))
    value = first[~torch.isfinite(first)][0]
    count = sum(int((~torch.isfinite(g)).sum()) for g in bad.values())
    return NonFiniteReport(what="gradient", count=count, value=str(float(value)), parameters=tuple(bad))
