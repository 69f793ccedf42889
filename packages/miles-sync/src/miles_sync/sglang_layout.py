"""How SGLang keeps a model's weights: which parameters it makes of canonical tensors, on each tensor-parallel rank.

Only what is known is described. A parameter that SGLang may keep in another form than it was sent in (packed for a
processor's matrix units, placed by load) is left out with the reason, and so is a whole engine that quantises, hashes
in another way or serves a kind of model that nobody has described.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from miles_contracts import DTYPE_BYTES, TensorSpec
from miles_sync.layout import Fragment, RankBuilder, RankLayout, Slice

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the configurations whose parameters are described here."""

CONFIG_KEYS = ("model_type", "tie_word_embeddings", "num_key_value_heads", "num_attention_heads")
"""What of a config.json is looked at."""

_VOCAB_MULTIPLE = 64
"""SGLang pads the rows of embedding and head to a multiple of this."""
_INNER_MULTIPLE = 32
"""On the CPU it pads the inner size of feed-forwards to a multiple of this on each rank."""

_QKV = re.compile(r"(.+\.self_attn)\.([qkv])_proj\.(weight|bias)")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_GATE_UP = re.compile(r"(.+\.mlp)\.(gate|up)_proj\.(weight|bias)")
_ROW = re.compile(r".+\.(o_proj|down_proj)\.weight")
_WHOLE = re.compile(r"(.+\.)?(\w*norm\.weight|(o_proj|down_proj)\.bias)")
_ONE_TENSOR = {
    "model.embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
}


class SglangForm(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how an SGLang engine keeps the weights that it is sent.

    Attributes:
        device: `cpu`, `cuda` ...
        dtype: of its parameters, as it names it.
        tensor_parallel: ranks that matrices are cut over; rank k of them gives the k-th of its checksums.
        expert_parallel: ranks that experts are cut over.
        unlike: an option that is set and may change what is kept in a way that is not described, "" for none.
    """

    device: str
    dtype: str
    tensor_parallel: int = 1
    expert_parallel: int = 1
    unlike: str = ""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine keeps, as far as it is known.

    Attributes:
        ranks: parameters of each tensor-parallel rank, in the engine's dtype.
        left_out: why not, by parameter; the same on every rank.
        nothing: why nothing is described, "" when something is.
    """

    ranks: tuple[RankLayout, ...] = ()
    left_out: dict[str, str] = {}
    nothing: str = ""


class ChecksumTable(msgspec.Struct, frozen=True, kw_only=True, tag="checksum_table"):
    """What an engine's checksums have to be after an update, computed from the tensors that were sent.

    Attributes:
        ranks: checksum by parameter, for each tensor-parallel rank.
        left_out: why a parameter's checksum is not known, on any rank.
        nothing: why none is known, "" when some are.
        num_bytes: that were hashed.
        seconds: that hashing took, beside the sending.
        waited_s: that the sending and the answer had to wait for it.
        peak_bytes: of tensors that waited for their turn in a fused parameter.
    """

    ranks: tuple[dict[str, str], ...] = ()
    left_out: dict[str, str] = {}
    nothing: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    peak_bytes: int = 0


def describe(specs: Sequence[TensorSpec], config: Mapping[str, Any], form: SglangForm) -> Description:
    """The parameters of an SGLang engine.

    Args:
        specs: the canonical tensors that are sent.
        config: `CONFIG_KEYS` of config.json, or of its text part.
        form: of the engine.
    """
    kind = str(config.get("model_type"))
    if form.device != "cpu":
        return Description(nothing=f"SGLang on {form.device} hashes in another way than on the CPU")
    if form.unlike:
        return Description(nothing=f"what SGLang keeps with {form.unlike} is not described")
    if form.dtype not in DTYPE_BYTES:
        return Description(nothing=f"the engine names no dtype of its parameters ({form.dtype})")
    if kind not in MODEL_TYPES:
        return Description(nothing=f"SGLang's parameters for the model type {kind} are not described")
    parts = _by_parameter(specs, form.dtype, bool(config.get("tie_word_embeddings")))
    heads = [int(config.get(key) or 0) for key in ("num_attention_heads", "num_key_value_heads")]
    left_out = {name: reason for name, part in parts.items() if (reason := part.may_differ(name, form, heads))}
    ranks = []
    for rank in range(form.tensor_parallel):
        builder, rows, cut = RankBuilder(), _Rows(), _Cut(rank, form.tensor_parallel)
        for name, part in parts.items():
            if name not in left_out:
                _place(builder, rows, name, part, cut)
        kept = builder.build()
        ranks.append(RankLayout(stored=(*kept.stored, *rows.stored), fragments=(*kept.fragments, *rows.fragments)))
    return Description(ranks=tuple(ranks), left_out=left_out)


class _Parts(msgspec.Struct):
    """What a parameter is made of: canonical tensors by their role in it."""

    kind: str
    roles: dict[str, TensorSpec]

    @property
    def only(self) -> TensorSpec:
        """The tensor of a parameter of one."""
        return next(iter(self.roles.values()))

    @property
    def complete(self) -> bool:
        experts = range(len(self.roles) // 2 if self.kind == "w13_weight" else len(self.roles))
        needed = {
            "qkv": {"q", "k", "v"},
            "gate_up": {"gate", "up"},
            "w13_weight": {f"{e}.{half}" for e in experts for half in ("gate", "up")},
            "w2_weight": {f"{e}.down" for e in experts},
        }
        return self.roles.keys() == needed.get(self.kind, self.roles.keys())

    def may_differ(self, name: str, form: SglangForm, heads: Sequence[int]) -> str:
        """Why the parameter may hold other bytes than were sent, "" when it holds those.

        Args:
            name: of the parameter.
            form: of the engine.
            heads: of queries, and of keys and values; 0 where that is not known.
        """
        if self.kind == "unknown":
            return "SGLang's parameter for it is not described"
        if not self.complete:
            return "not every tensor of it is sent"
        if self.kind == "tied":
            return "SGLang reads the embedding instead of a tied head"
        if self.kind in ("w13_weight", "w2_weight") and form.expert_parallel > 1:
            return "SGLang places experts on its ranks by itself"
        multiplied = self.kind not in ("whole", "embedding") and name.endswith("weight")
        if multiplied and form.dtype != "float32":
            return f"a CPU with matrix units keeps {form.dtype} matrices packed"
        if (self.kind == "qkv" or name.endswith("o_proj.weight")) and any(n % form.tensor_parallel for n in heads):
            return f"SGLang pads its heads ({', '.join(map(str, heads))}) to a multiple of {form.tensor_parallel} ranks"
        inner = self.inner
        if inner % (_INNER_MULTIPLE * form.tensor_parallel):
            return f"SGLang pads its inner size of {inner} to {_INNER_MULTIPLE} on each of its ranks"
        return ""

    @property
    def inner(self) -> int:
        """Of a feed-forward's matrix, 0 for anything else."""
        sizes = {role.rpartition(".")[2]: spec.shape for role, spec in self.roles.items()}
        if "gate" in sizes:
            return sizes["gate"][0]
        return sizes["down"][-1] if "down" in sizes else 0


def _by_parameter(specs: Sequence[TensorSpec], dtype: str, tied: bool) -> dict[str, _Parts]:
    parts: dict[str, _Parts] = {}

    def add(parameter: str, kind: str, role: str, spec: TensorSpec) -> None:
        parts.setdefault(parameter, _Parts(kind, {})).roles[role] = msgspec.structs.replace(spec, dtype=dtype)

    for spec in specs:
        name = spec.name
        if found := _QKV.fullmatch(name):
            add(f"{found[1]}.qkv_proj.{found[3]}", "qkv", found[2], spec)
        elif found := _EXPERT.fullmatch(name):
            fused = "w2_weight" if found[3] == "down" else "w13_weight"
            add(f"{found[1]}.{fused}", fused, f"{int(found[2])}.{found[3]}", spec)
        elif found := _GATE_UP.fullmatch(name):
            add(f"{found[1]}.gate_up_proj.{found[3]}", "gate_up", found[2], spec)
        else:
            add(name, _kind(name, tied), "down" if name.endswith("down_proj.weight") else "", spec)
    return parts


def _kind(name: str, tied: bool) -> str:
    if name in _ONE_TENSOR:
        return "tied" if tied and name == "lm_head.weight" else _ONE_TENSOR[name]
    if name.endswith(".mlp.gate.weight"):
        return "router"
    if _ROW.fullmatch(name):
        return "row"
    return "whole" if _WHOLE.fullmatch(name) else "unknown"


class _Cut(msgspec.Struct, frozen=True):
    """A rank's place among those that matrices are cut over."""

    rank: int
    ranks: int

    def of(self, spec: TensorSpec, dim: int = 0) -> Slice:
        return Slice(spec=spec, dim=dim, index=self.rank, count=self.ranks)


class _Rows:
    """Rows of embeddings and heads, padded as SGLang does it."""

    def __init__(self) -> None:
        self.stored: list[TensorSpec] = []
        self.fragments: list[Fragment] = []

    def add(self, spec: TensorSpec, cut: _Cut) -> None:
        rows, *rest = spec.shape
        padded = -(-rows // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        if padded % cut.ranks:
            multiple = _VOCAB_MULTIPLE * cut.ranks
            padded = -(-rows // multiple) * multiple
        kept = padded // cut.ranks
        start = min(cut.rank * kept, rows)
        shape = (min(start + kept, rows) - start, *rest)
        self.stored.append(TensorSpec(name=spec.name, dtype=spec.dtype, shape=(kept, *rest)))
        if all(shape):
            zeros = (0,) * len(shape)
            self.fragments.append(
                Fragment(name=spec.name, start=(start, *zeros[1:]), shape=shape, stored=spec.name, at=zeros)
            )


def _place(builder: RankBuilder, rows: _Rows, name: str, parts: _Parts, cut: _Cut) -> None:
    roles = parts.roles
    match parts.kind:
        case "qkv":
            builder.concat(name, [cut.of(roles[role]) for role in "qkv"])
        case "gate_up":
            builder.concat(name, [cut.of(roles["gate"]), cut.of(roles["up"])])
        case "w13_weight":
            experts = range(len(roles) // 2)
            builder.stack(name, [[cut.of(roles[f"{e}.gate"]), cut.of(roles[f"{e}.up"])] for e in experts])
        case "w2_weight":
            builder.stack(name, [[cut.of(roles[f"{e}.down"], 1)] for e in range(len(roles))])
        case "embedding" | "head":
            rows.add(parts.only, cut)
        case "row":
            builder.shard(cut.of(parts.only, 1))
        case _:
            builder.keep(parts.only)
