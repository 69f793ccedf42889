"""A small mixture-of-experts model and ways to spread it, for the tests of layouts and plans."""

from __future__ import annotations

import torch

from miles_contracts import TensorSpec
from miles_sync.layout import Layout, RankBuilder, Slice, whole

HIDDEN, HEADS, KV_HEADS, HEAD, INTER, EXPERTS, VOCAB = 12, 8, 4, 3, 8, 4, 19


def specs() -> list[TensorSpec]:
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.logit_scale": (),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes[f"{at}.self_attn.q_proj.weight"] = (HEADS * HEAD, HIDDEN)
        shapes[f"{at}.self_attn.k_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        shapes[f"{at}.self_attn.v_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        shapes[f"{at}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            shapes[f"{at}.mlp.experts.{expert}.gate_proj.weight"] = (INTER, HIDDEN)
            shapes[f"{at}.mlp.experts.{expert}.up_proj.weight"] = (INTER, HIDDEN)
            shapes[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, INTER)
    return [
        TensorSpec(name=n, dtype="float32" if "norm" in n or "scale" in n else "bfloat16", shape=s)
        for n, s in sorted(shapes.items())
    ]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in specs()}


def engine(tp: int, *, expert_parallel: bool = True, interleaved: bool = False, tied_head: bool = False) -> Layout:
    """Tensor parallel: fused qkv, padded vocabulary, fused experts, either spread over the ranks or cut inside."""
    by_name = {s.name: s for s in specs()}
    ranks = []
    for rank in range(tp):
        builder = RankBuilder()
        embed = Slice(spec=by_name["model.embed_tokens.weight"], index=rank, count=tp)
        builder.shard(embed, padded=True)
        if tied_head:
            builder.shard(embed, stored="lm_head.weight", padded=True)
        builder.keep(by_name["model.norm.weight"])
        builder.keep(by_name["model.logit_scale"])
        for layer in range(2):
            at = f"model.layers.{layer}"
            qkv = [Slice(spec=by_name[f"{at}.self_attn.{x}_proj.weight"], index=rank, count=tp) for x in "qkv"]
            name = f"{at}.self_attn.qkv_proj.weight"
            if interleaved:
                builder.interleave(name, qkv, groups=KV_HEADS // tp)
            else:
                builder.concat(name, qkv)
            builder.shard(Slice(spec=by_name[f"{at}.self_attn.o_proj.weight"], dim=1, index=rank, count=tp))
            builder.keep(by_name[f"{at}.mlp.gate.weight"])
            mine = range(EXPERTS) if not expert_parallel else range(rank * EXPERTS // tp, (rank + 1) * EXPERTS // tp)
            cut = (0, 1) if expert_parallel else (rank, tp)
            w13, w2 = [], []
            for expert in mine:
                e = f"{at}.mlp.experts.{expert}"
                w13.append(
                    [Slice(spec=by_name[f"{e}.{x}_proj.weight"], index=cut[0], count=cut[1]) for x in ("gate", "up")]
                )
                w2.append([Slice(spec=by_name[f"{e}.down_proj.weight"], dim=1, index=cut[0], count=cut[1])])
            builder.stack(f"{at}.mlp.experts.gate_up_proj", w13)
            builder.stack(f"{at}.mlp.experts.down_proj", w2)
        ranks.append(builder.build())
    return Layout(tensors=tuple(specs()), ranks=tuple(ranks))


def fsdp(count: int, replicas: int = 1) -> Layout:
    """Every tensor cut along dimension 0, as FSDP2 does; scalars on every rank. `replicas` groups hold the same."""
    ranks = []
    for rank in range(count):
        builder = RankBuilder()
        for spec in specs():
            builder.shard(Slice(spec=spec, index=rank, count=count))
        ranks.append(builder.build())
    return Layout(tensors=tuple(specs()), ranks=tuple(ranks) * replicas)


def everything() -> dict[str, Layout]:
    return {
        "one rank": whole(specs()),
        "three replicas": whole(specs(), 3),
        "fsdp 2": fsdp(2),
        "fsdp 5": fsdp(5),
        "fsdp 3 x 2": fsdp(3, replicas=2),
        "tp 1": engine(1),
        "tp 2 ep": engine(2),
        "tp 4 ep": engine(4),
        "tp 2": engine(2, expert_parallel=False),
        "tp 4 tied": engine(4, expert_parallel=False, tied_head=True),
        "megatron 2": engine(2, interleaved=True),
    }
