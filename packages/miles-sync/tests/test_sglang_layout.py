"""What SGLang makes of canonical tensors, against the same done by hand with whole tensors."""

from __future__ import annotations

import hashlib
import re

import msgspec
import pytest
import torch

from miles_sync.checksums import ParameterSums
from miles_sync.sglang_layout import SglangForm, describe
from miles_sync.tensors import spec_of

HIDDEN, HEADS, KV_HEADS, WIDE, INNER, VOCAB, EXPERTS = 16, 8, 2, 4, 64, 100, 3
CONFIG = {"model_type": "qwen3", "num_key_value_heads": KV_HEADS, "num_attention_heads": HEADS}
CPU = SglangForm(device="cpu", dtype="float32")


def weights(*, mixture: bool = False, bias: bool = False, head: bool = True) -> dict[str, torch.Tensor]:
    """A model of one layer, by canonical name, sorted."""
    at = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{at}.input_layernorm.weight": (HIDDEN,),
        f"{at}.self_attn.q_norm.weight": (WIDE,),
        f"{at}.self_attn.q_proj.weight": (HEADS * WIDE, HIDDEN),
        f"{at}.self_attn.k_proj.weight": (KV_HEADS * WIDE, HIDDEN),
        f"{at}.self_attn.v_proj.weight": (KV_HEADS * WIDE, HIDDEN),
        f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDE),
    }
    if head:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    if bias:
        shapes |= {f"{at}.self_attn.{p}_proj.bias": (n * WIDE,) for p, n in (("q", HEADS), ("k", 2), ("v", 2))}
    blocks = [f"{at}.mlp.experts.{e}" for e in range(EXPERTS)] if mixture else [f"{at}.mlp"]
    if mixture:
        shapes[f"{at}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for block in blocks:
        shapes |= {f"{block}.gate_proj.weight": (INNER, HIDDEN), f"{block}.up_proj.weight": (INNER, HIDDEN)}
        shapes[f"{block}.down_proj.weight"] = (HIDDEN, INNER)
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in sorted(shapes.items())}


def by_hand(sent: dict[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    """SGLang's parameters of a rank, written down tensor by tensor."""
    at = "model.layers.0"

    def rows(name: str) -> torch.Tensor:
        return sent[f"{at}.{name}"].chunk(tp)[rank]

    out = {}
    for kind in ("weight", "bias"):
        if f"{at}.self_attn.q_proj.{kind}" in sent:
            heads = [rows(f"self_attn.{p}_proj.{kind}") for p in "qkv"]
            out[f"{at}.self_attn.qkv_proj.{kind}"] = torch.cat(heads)
    if f"{at}.mlp.gate_proj.weight" in sent:
        out[f"{at}.mlp.gate_up_proj.weight"] = torch.cat([rows("mlp.gate_proj.weight"), rows("mlp.up_proj.weight")])
        out[f"{at}.mlp.down_proj.weight"] = sent[f"{at}.mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
    else:
        names = [f"mlp.experts.{e}" for e in range(EXPERTS)]
        both = [torch.cat([rows(f"{n}.gate_proj.weight"), rows(f"{n}.up_proj.weight")]) for n in names]
        down = [sent[f"{at}.{n}.down_proj.weight"].chunk(tp, dim=1)[rank] for n in names]
        out |= {f"{at}.mlp.experts.w13_weight": torch.stack(both), f"{at}.mlp.experts.w2_weight": torch.stack(down)}
        out[f"{at}.mlp.gate.weight"] = sent[f"{at}.mlp.gate.weight"]
    out[f"{at}.self_attn.o_proj.weight"] = sent[f"{at}.self_attn.o_proj.weight"].chunk(tp, dim=1)[rank]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in sent:
            whole = torch.zeros(128, HIDDEN)  # the next multiple of 64
            whole[:VOCAB] = sent[name]
            out[name] = whole.chunk(tp)[rank]
    return out | {n: t for n, t in sent.items() if n.endswith("norm.weight")}


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:16] for n, t in tensors.items()}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_rank_has_what_sglang_makes_of_it(tp: int, mixture: bool, bias: bool) -> None:
    sent = weights(mixture=mixture, bias=bias)
    config = CONFIG | {"model_type": "qwen3_moe" if mixture else "qwen2"}
    found = describe([spec_of(n, t) for n, t in sent.items()], config, msgspec.structs.replace(CPU, tensor_parallel=tp))
    assert (found.left_out, found.nothing) == ({}, "")
    sums = ParameterSums(found.ranks, 1 << 20)
    for name, tensor in sent.items():
        sums.put(name, tensor)
    assert sums.result() == [checksums(by_hand(sent, rank, tp)) for rank in range(tp)]


def left_out(sent: dict[str, torch.Tensor], config: dict[str, object], **form: object) -> dict[str, str]:
    found = describe([spec_of(n, t) for n, t in sent.items()], config, msgspec.structs.replace(CPU, **form))
    assert found.nothing == ""
    described = {spec.name for spec in found.ranks[0].stored}
    assert described.isdisjoint(found.left_out)
    return found.left_out


def test_a_tied_head_that_is_sent_is_not_looked_for() -> None:
    assert list(left_out(weights(), CONFIG | {"tie_word_embeddings": True})) == ["lm_head.weight"]
    assert left_out(weights(head=False), CONFIG | {"tie_word_embeddings": True}) == {}


def test_packed_matrices_are_left_out_and_the_rest_is_cast() -> None:
    sent = weights()
    found = describe([spec_of(n, t) for n, t in sent.items()], CONFIG, msgspec.structs.replace(CPU, dtype="bfloat16"))
    assert {spec.name for spec in found.ranks[0].stored} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    }
    assert {spec.dtype for spec in found.ranks[0].stored} == {"bfloat16"}
    assert set(found.left_out.values()) == {"a CPU with matrix units keeps bfloat16 matrices packed"}


def test_experts_that_are_placed_by_load_are_left_out() -> None:
    missing = left_out(
        weights(mixture=True), CONFIG | {"model_type": "qwen3_moe"}, tensor_parallel=2, expert_parallel=2
    )
    at = "model.layers.0.mlp.experts"
    assert missing == dict.fromkeys(
        (f"{at}.w13_weight", f"{at}.w2_weight"), "SGLang places experts on its ranks by itself"
    )


def test_what_sglang_pads_on_the_cpu_is_left_out() -> None:
    at = "model.layers.0"
    heads = left_out(weights(bias=True), CONFIG, tensor_parallel=4)
    assert sorted(heads) == [
        f"{at}.mlp.down_proj.weight",
        f"{at}.mlp.gate_up_proj.weight",
        f"{at}.self_attn.o_proj.weight",
        f"{at}.self_attn.qkv_proj.bias",
        f"{at}.self_attn.qkv_proj.weight",
    ]
    assert heads[f"{at}.self_attn.o_proj.weight"] == "SGLang pads its heads (8, 2) to a multiple of 4 ranks"
    assert heads[f"{at}.mlp.down_proj.weight"] == "SGLang pads its inner size of 64 to 32 on each of its ranks"
    experts = left_out(weights(mixture=True), CONFIG | {"model_type": "qwen3_moe"}, tensor_parallel=4)
    assert {f"{at}.mlp.experts.w13_weight", f"{at}.mlp.experts.w2_weight"} < experts.keys()


def test_parameters_that_are_sent_in_part_or_unknown_are_left_out() -> None:
    sent = weights(bias=True)
    del sent["model.layers.0.self_attn.k_proj.bias"], sent["model.layers.0.mlp.up_proj.weight"]
    sent["model.layers.0.self_attn.sinks"] = torch.zeros(HEADS)
    assert left_out(sent, CONFIG) == {
        "model.layers.0.mlp.gate_up_proj.weight": "not every tensor of it is sent",
        "model.layers.0.self_attn.qkv_proj.bias": "not every tensor of it is sent",
        "model.layers.0.self_attn.sinks": "SGLang's parameter for it is not described",
    }
    mixture = weights(mixture=True)
    del mixture["model.layers.0.mlp.experts.1.down_proj.weight"], mixture["model.layers.0.mlp.experts.2.up_proj.weight"]
    missing = left_out(mixture, CONFIG | {"model_type": "qwen3_moe"})
    assert sorted(missing) == [f"model.layers.0.mlp.experts.w{n}_weight" for n in ("13", "2")]


@pytest.mark.parametrize(
    ("form", "config", "reason"),
    [
        ({"device": "cuda"}, {}, "SGLang on cuda hashes in another way than on the CPU"),
        ({"unlike": "quantization = fp8"}, {}, "what SGLang keeps with quantization = fp8 is not described"),
        ({"dtype": "auto"}, {}, r"names no dtype of its parameters \(auto\)"),
        ({}, {"model_type": "glm4_moe"}, "parameters for the model type glm4_moe are not described"),
        ({}, {"model_type": None}, "model type None"),
    ],
)
def test_engines_of_which_nothing_is_known(form: dict[str, str], config: dict[str, object], reason: str) -> None:
    found = describe([spec_of("a", torch.zeros(1))], CONFIG | config, msgspec.structs.replace(CPU, **form))
    assert found.ranks == ()
    assert re.search(reason, found.nothing)
