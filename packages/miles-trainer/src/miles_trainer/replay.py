"""Routing replay: the trainer uses the experts that the engine chose, and its own gate weights for them.

A router is found by structure: beside a module that holds expert weights [E, ..] stands one whose weight is
[E, hidden]. While a micro-batch is being replayed, the top-k of the scores inside the router returns the
recorded ids and the scores at those ids. Everything around that call is the model's own code, so its
normalisation, scaling and gradient stay what they are, and a recomputation (gradient checkpointing) reads
the same rows again because rows belong to a layer and not to a cursor.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from miles_contracts import InvalidFieldError, RoutingTrace, Trajectory
from miles_trainer.batching import MicroBatch
from miles_trainer.errors import describe
from miles_trainer.token_rows import place

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
    "normalised": lambda scores: scores,
}
"""What routers make of their logits before they choose."""


@dataclass
class Router:
    """One router of a model.

    Attributes:
        name: module path.
        module: the router.
        layer: index of the decoder layer it belongs to.
        num_experts: E.
        top_k: experts per token, read from the first call.
        replayable: False when the choice is fixed by the token ids (a table), so both sides agree anyway.
        scores: what the router makes of its logits: `softmax`, `sigmoid`, `sqrtsoftplus`, `normalised` when it returns
            scores that sum to 1 instead of logits, or `other` for a function whose load-balancing loss is not known.
    """

    name: str
    module: nn.Module
    layer: int
    num_experts: int
    top_k: int = 0
    replayable: bool = True
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus", "normalised", "other"] = "softmax"


@dataclass
class RouteUse:
    """What the routers of one micro-batch used, and would have used.

    Attributes:
        known: bool [rows], rows of the model's flattened input that carry a recorded choice.
        routes: per router the recorded ids, uint8 or int32 [rows, top_k]; empty when nothing is replayed.
        valid: int64 [N], rows that hold tokens (not padding).
        agreement: sum over routers and known rows of the share of own choices that equal the recorded ones.
        replayed: number of (router, row) pairs that were replayed.
        seconds: host time that replay added: placing the choices, taking them over, comparing them.
        logits: per router the router logits of the forward pass [rows, E], with gradient.
        chosen: per router the ids used [rows, top_k].
    """

    known: Tensor
    routes: tuple[Tensor, ...]
    valid: Tensor
    agreement: Tensor
    replayed: int = 0
    seconds: float = 0.0
    logits: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of a model in the order of its layers; empty for a dense model."""
    found: list[Router] = []
    for name, block in model.named_modules():
        children = dict(block.named_children())
        counts = {_expert_count(child) for child in children.values()} - {0}
        for child_name, child in children.items():
            experts = _scored_experts(child)
            if experts in counts:
                path = f"{name}.{child_name}"
                digits = re.search(r"\.(\d+)\.", f".{path}.")
                found.append(Router(path, child, int(digits[1]) if digits else len(found), experts))
    return sorted(found, key=lambda r: r.layer)


def _scored_experts(module: nn.Module) -> int:
    """E when the module looks like a router, that is scores E things: its own weight is [E, hidden], or the only
    matrix somewhere below it is; else 0."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return int(weight.shape[0]) if weight.dim() == 2 else 0
    inside = [p for p in module.parameters() if p.dim() > 1]
    return int(inside[0].shape[0]) if len(inside) == 1 and inside[0].dim() == 2 else 0


def declared_experts(config: Any) -> int:
    """Experts a layer according to a model's configuration, 0 for a dense model."""
    text = config.get_text_config()
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    values = [getattr(text, name, None) for name in names]
    return max((v for v in values if isinstance(v, int) and v > 1), default=0)


def _expert_count(module: nn.Module) -> int:
    """E when the module itself holds tensors of E experts' matrices, else 0."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0  # a convolution's kernel has three dimensions too
    stacks = {int(p.shape[0]) for p in module.parameters(recurse=False) if p.dim() == 3}
    return stacks.pop() if len(stacks) == 1 else 0


class Replayer:
    """Makes the routers of one model replay; does nothing outside `using`.

    Args:
        model: a model with routers (`find_routers`).
        probe: runs the model once on a few tokens.

    Raises:
        InvalidFieldError: a router whose choice cannot be replaced.
    """

    def __init__(self, model: Any, probe: Callable[[], object]) -> None:
        self.routers = find_routers(model)
        if not self.routers:
            raise InvalidFieldError("model", type(model).__name__, "a model without routers has nothing to replay")
        self._use: RouteUse | None = None
        self._learning = True
        for index, router in enumerate(self.routers):
            _wrap_forward(router.module, self._interceptor(index, router))
        probe()
        self._learning = False
        self.decoder_layers = int(model.config.get_text_config().num_hidden_layers)
        for router in self.routers:
            if router.top_k:
                continue
            if not any(not t.is_floating_point() for t in (*router.module.buffers(), *router.module.parameters())):
                raise InvalidFieldError(
                    "replay.enabled", True, f"router {router.name} does not choose by top-k; turn replay off"
                )
            router.replayable = False
        self.top_k = max(r.top_k for r in self.routers)

    def _interceptor(self, index: int, router: Router) -> Callable[..., Any]:
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._learning:
                with _Learn(router):
                    out = original(*args, **kwargs)
                if router.top_k:
                    _learn_output(router, _router_logits(out, router).detach().float())
                return out
            use = self._use
            if use is None:
                return original(*args, **kwargs)
            with _Override(use, index, router):
                out = original(*args, **kwargs)
            # a recomputation must not count a second time
            if index not in use.logits:
                use.logits[index] = _router_logits(out, router)
            return out

        return run

    def check(self, trajectory: Trajectory) -> bool:
        """True when the trajectory carries a complete trace for this model, False when it has none.

        Raises:
            InvalidFieldError: a trace of another model (layers, top-k or number of experts).
        """
        trace = trajectory.routing
        if trace is None:
            return False
        experts = {r.num_experts for r in self.routers}
        if trace.num_experts not in experts or trace.top_k != self.top_k or self.columns(trace) is None:
            raise InvalidFieldError(
                f"routing of {describe(trajectory.identity)}",
                f"{trace.num_layers} layers, top-{trace.top_k} of {trace.num_experts}",
                f"the model has {len(self.routers)} routers with top-{self.top_k} of {sorted(experts)}",
            )
        return trace.num_tokens >= trajectory.num_tokens - 1

    def columns(self, trace: RoutingTrace) -> list[int] | None:
        """Which layer of a trace belongs to each router: traces list MoE layers, or all decoder layers."""
        if trace.num_layers == len(self.routers):
            return list(range(len(self.routers)))
        if trace.num_layers == self.decoder_layers:
            return [r.layer for r in self.routers]
        return None

    @contextmanager
    def using(self, use: RouteUse) -> Iterator[RouteUse]:
        """Replay `use` in every forward pass and recomputation inside the block."""
        self._use = use
        try:
            yield use
        finally:
            self._use = None

    def prepare(self, micro: MicroBatch, rows: Tensor, num_rows: int, *, replay: bool) -> RouteUse:
        """The recorded choices of a micro-batch, placed on the rows of the model's flattened input.

        Args:
            micro: N fed tokens.
            rows: int64 [N], the row of each token, -1 for one that another rank holds (`token_rows`).
            num_rows: rows including padding.
            replay: False to only observe.
        """
        began = time.perf_counter()
        agreement = torch.zeros((), dtype=torch.float64, device=rows.device)
        if not replay:
            known = torch.zeros(num_rows, dtype=torch.bool, device=rows.device)
            return RouteUse(known=known, routes=(), valid=rows, agreement=agreement)
        here, ids = rows.cpu().numpy(), self.recorded_ids(micro)
        if num_rows != len(here) or (here < 0).any():
            ids, rows = place(ids, here, num_rows), rows[rows >= 0]
        # one byte an id where that is enough; each router widens its own when it needs them
        recorded = torch.from_numpy(ids if ids.dtype == np.uint8 else ids.astype(np.int32)).to(rows.device)
        known = torch.zeros(num_rows, dtype=torch.bool, device=rows.device)
        known[rows] = True
        use = RouteUse(known=known, routes=recorded.unbind(0), valid=rows, agreement=agreement)
        use.seconds += time.perf_counter() - began
        return use

    def recorded_ids(self, micro: MicroBatch) -> NDArray[Any]:
        """Recorded ids [routers, N, top_k] of the fed tokens, in the traces' dtype."""
        parts: list[NDArray[Any]] = []
        chunks = micro.chunks
        for owner, start, length in zip(
            chunks.owner.tolist(), chunks.start.tolist(), chunks.length.tolist(), strict=True
        ):
            t = micro.trajectories[owner]
            trace = t.routing
            columns = self.columns(trace) if trace is not None else None
            if trace is None or columns is None or trace.num_tokens < start + length:
                raise InvalidFieldError(f"routing of {describe(t.identity)}", None, "replay needs a complete trace")
            rows = trace.expert_ids[start : start + length]
            parts.append(rows if trace.num_layers == len(columns) else rows[:, columns])
        return np.ascontiguousarray(np.concatenate(parts).transpose(1, 0, 2))

    def recorded_counts(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """How often each router's experts were chosen in a step, float64 [routers, E]; from the traces alone."""
        size = max(r.num_experts for r in self.routers)
        out = np.zeros((len(self.routers), size))
        for micro in micro_batches:
            for index, ids in enumerate(self.recorded_ids(micro)):
                out[index] += np.bincount(ids.reshape(-1), minlength=size)
        return torch.from_numpy(out)

    def used_counts(self, use: RouteUse) -> Tensor:
        """How often each router's experts were used in one forward pass, float64 [routers, E]."""
        size = max(r.num_experts for r in self.routers)
        rows = []
        for index in range(len(self.routers)):
            ids = use.chosen.get(index)
            rows.append(torch.bincount(ids[use.valid].flatten(), minlength=size) if ids is not None else None)
        empty = torch.zeros(size, dtype=torch.int64, device=use.valid.device)
        return torch.stack([r if r is not None else empty for r in rows]).double()

    def aux_loss(self, use: RouteUse, counts: Tensor, num_tokens: int) -> Tensor:
        """This micro-batch's share of the step's load-balancing loss, float64 scalar with gradient.

        The loss is the mean over replayable routers of E * sum_e f_e * P_e: f_e is the share of the step's
        choices that fell on expert e, P_e the mean over the step's tokens of the router's normalised score. It
        is 1 for a perfectly even load. f comes from the choices really used, so it does not depend on how the
        step is cut.

        Args:
            use: after the forward pass.
            counts: choices of the whole step, [routers, E].
            num_tokens: tokens fed in the whole step.
        """
        total: Tensor | None = None
        layers = [i for i, r in enumerate(self.routers) if r.replayable]
        for index in layers:
            router = self.routers[index]
            logits = use.logits[index][use.valid].float()
            if router.scores == "other":
                raise InvalidFieldError(
                    "replay.aux_loss_coefficient", router.name, "the router's scores are not known; set it to 0"
                )
            scores = _SCORES[router.scores](logits)
            scores = scores / scores.sum(-1, keepdim=True)
            load = counts[index, : router.num_experts].to(scores.device)
            share = (scores.double().sum(0) * (load / load.sum())).sum() * (router.num_experts / num_tokens)
            total = share if total is None else total + share
        if total is None:
            return torch.zeros((), dtype=torch.float64, device=use.valid.device)
        return total / len(layers)


def _wrap_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(original, *args, **kwargs)

    module.forward = forward


def _router_logits(out: Any, router: Router) -> Tensor:
    """The first float output with one column per expert."""
    for value in out if isinstance(out, tuple) else (out,):
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == router.num_experts:
            return value.reshape(-1, router.num_experts)
    raise InvalidFieldError("replay.enabled", router.name, "the router returns no logits; turn replay off")


def _learn_output(router: Router, logits: Tensor) -> None:
    sums = logits.sum(-1)
    if bool((logits >= 0).all()) and bool(torch.isclose(sums, torch.ones_like(sums), atol=1e-3).all()):
        router.scores = "normalised"


def _choice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], router: Router) -> tuple[Tensor, int] | None:
    """(scores, k) when a call is the router's choice among all its experts."""
    if func not in (torch.topk, Tensor.topk):
        return None
    scores = args[0] if args else kwargs["input"]
    k = args[1] if len(args) > 1 else kwargs["k"]
    # group-limited routers first rank groups, on tensors of another shape
    if scores.dim() != 2 or scores.shape[-1] != router.num_experts or (router.top_k and k != router.top_k):
        return None
    return scores, int(k)


class _Learn(TorchFunctionMode):
    """Watches one call of a router to learn k and the kind of scores."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.sigmoid, Tensor.sigmoid, torch.nn.functional.sigmoid):
            self.router.scores = "sigmoid"
        if func is torch.nn.functional.softplus:
            self.router.scores = "other"
        if func in (torch.sqrt, Tensor.sqrt) and self.router.scores == "other":
            self.router.scores = "sqrtsoftplus"
        choice = _choice(func, args, kwargs, self.router)
        if choice is not None:
            self.router.top_k = choice[1]
        return func(*args, **kwargs)


class _Override(TorchFunctionMode):
    """Inside a router: the choice returns the recorded ids where there are some."""

    def __init__(self, use: RouteUse, index: int, router: Router) -> None:
        super().__init__()
        self.use, self.index, self.router = use, index, router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        choice = _choice(func, args, kwargs, self.router)
        own = func(*args, **kwargs)
        if choice is None:
            return own
        began = time.perf_counter()
        result = self._replace(own, choice[0])
        self.use.seconds += time.perf_counter() - began
        return result

    def _replace(self, own: Any, scores: Tensor) -> Any:
        """What the choice returns instead of the router's own values and indices."""
        use = self.use
        first = self.index not in use.chosen
        if not use.routes:
            if first:
                use.chosen[self.index] = own.indices.detach()
            return own
        recorded = use.routes[self.index].long()
        padded = len(use.valid) != len(use.known)
        ids = torch.where(use.known[:, None], recorded, own.indices) if padded else recorded
        if first:
            use.chosen[self.index] = ids
            # experts of a token are distinct, so counting equal pairs counts common experts
            same = own.indices[:, :, None] == recorded[:, None, :]
            use.agreement += (same[use.known] if padded else same).sum() / ids.shape[1]
            use.replayed += len(use.valid)
        return torch.return_types.topk((scores.gather(-1, ids), ids))
