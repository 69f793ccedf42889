"""Rates of a model on GPUs: a roofline from its shape and the GPU's data sheet, with every assumption written down.

Decoding reads the weights that are needed and the keys and values of the context, or computes, whichever takes longer,
plus a time per layer for launching and communication. Prompts and training compute. The efficiencies are assumptions,
not measurements: measure yours and set them, or use rates of a run (`--from`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_contracts import InvalidFieldError
from miles_loop.names import nearest
from miles_loop.plan.engine import EngineRates
from miles_loop.plan.settings import TrainerRates
from miles_sync.models import ModelShape


class Format(StrEnum):
    """How numbers are stored and multiplied."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"

    @property
    def num_bytes(self) -> float:
        """Bytes of one number, scales aside."""
        return {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A data sheet. Dense tera-operations per second by format, terabytes per second, gigabytes."""

    name: str
    tflops: dict[str, float]
    tb_per_s: float
    memory_gb: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="a100", tflops={"bf16": 312}, tb_per_s=2.0, memory_gb=80),
        Gpu(name="h100", tflops={"bf16": 989, "fp8": 1979}, tb_per_s=3.35, memory_gb=80),
        Gpu(name="h200", tflops={"bf16": 989, "fp8": 1979}, tb_per_s=4.8, memory_gb=141),
        Gpu(name="b200", tflops={"bf16": 2250, "fp8": 4500, "fp4": 9000}, tb_per_s=7.7, memory_gb=180),
        Gpu(name="gb200", tflops={"bf16": 2500, "fp8": 5000, "fp4": 10000}, tb_per_s=8.0, memory_gb=186),
        Gpu(name="b300", tflops={"bf16": 2250, "fp8": 4500, "fp4": 13500}, tb_per_s=7.7, memory_gb=270),
        Gpu(name="gb300", tflops={"bf16": 2500, "fp8": 5000, "fp4": 15000}, tb_per_s=8.0, memory_gb=276),
        Gpu(name="mi350x", tflops={"bf16": 2300, "fp8": 4600, "fp4": 9200}, tb_per_s=8.0, memory_gb=288),
        Gpu(name="mi355x", tflops={"bf16": 2500, "fp8": 5000, "fp4": 10000}, tb_per_s=8.0, memory_gb=288),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who gets which GPUs, and how well they are used. Rates are derived from it by `engine_rates` and `trainer_rates`.

    Attributes:
        shape, gpu: what runs on what.
        train_gpus, engine_gpus, engines: GPUs of the trainer, of one engine, and how many engines.
        weights, cache, training: formats of the engine's weights, of its cache, and of the trainer's arithmetic.
        bandwidth_use: share of the memory bandwidth that decoding reaches.
        decode_use, prefill_use, train_use: shares of the arithmetic peak.
        layer_overhead_us: microseconds per layer and decoding step for launching and communication.
        memory_fraction: share of the memory for weights and cache.
        tokens_per_step: tokens a sequence gains per step (speculative decoding).
        max_running: sequences of one engine.
        recompute: activations are computed again in the backward pass.
        logprob_passes: forward passes besides the one that is trained.
        stream_gb_per_s: GB/s per GPU, each way, at which optimiser state comes from disk; None keeps it in memory.
        update_gb_per_s: GB/s at which a weight update crosses, pause to return.
    """

    shape: ModelShape
    gpu: Gpu
    train_gpus: int
    engine_gpus: int
    engines: int
    weights: Format
    cache: Format
    training: Format
    bandwidth_use: float
    decode_use: float
    prefill_use: float
    train_use: float
    layer_overhead_us: float
    memory_fraction: float
    tokens_per_step: float
    max_running: int
    recompute: bool
    logprob_passes: int
    stream_gb_per_s: float | None
    update_gb_per_s: float

    @property
    def weight_bytes(self) -> float:
        """Bytes of the engine's weights; embeddings stay in bf16."""
        kept = self.shape.embedding * Format.BF16.num_bytes
        return (self.shape.total - self.shape.embedding) * self.weights.num_bytes + kept

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that fit into one engine."""
        room = self.engine_gpus * self.gpu.memory_gb * 1e9 * self.memory_fraction - self.weight_bytes
        per_token = self.shape.cache_elements * self.cache.num_bytes
        return int(room / per_token) if per_token else 0

    def engine_rates(self) -> EngineRates:
        """Rates of one engine.

        Raises:
            InvalidFieldError: the weights leave no room for contexts.
        """
        shape = self.shape
        if self.kv_tokens < 1:
            need = self.weight_bytes / 1e9 / self.memory_fraction
            raise InvalidFieldError(
                "hardware.engine_gpus",
                self.engine_gpus,
                f"{need:.0f} GB are needed for the weights and {self.gpu.name} has {self.gpu.memory_gb:g} GB each",
            )
        per_s = self.engine_gpus * self.gpu.tb_per_s * 1e12 * self.bandwidth_use
        operations = self.engine_gpus * peak(self.gpu, self.weights, "hardware.weights") * 1e12
        return EngineRates(
            base_s=shape.always * self.weights.num_bytes / per_s,
            expert_s=shape.experts * self.weights.num_bytes / per_s,
            expert_share=shape.expert_share,
            per_context_token_s=shape.read_per_context * self.cache.num_bytes / per_s,
            read_per_sequence_s=shape.read_per_sequence * self.cache.num_bytes / per_s,
            per_sequence_s=2.0 * shape.active / (operations * self.decode_use),
            overhead_s=shape.layers * self.layer_overhead_us * 1e-6,
            roofline=True,
            tokens_per_step=self.tokens_per_step,
            prefill_s_per_token=2.0 * shape.active / (operations * self.prefill_use),
            max_running=self.max_running,
            kv_tokens=self.kv_tokens,
        )

    def trainer_rates(self) -> TrainerRates:
        """Rates of the trainer: 2 operations per parameter and token forward, 4 backward."""
        shape = self.shape
        passes = 6.0 + 2.0 * self.recompute + 2.0 * self.logprob_passes
        operations = self.train_gpus * peak(self.gpu, self.training, "hardware.training") * 1e12 * self.train_use
        state = 12.0 * shape.total / self.train_gpus  # fp32 weights and two moments, once read and once written
        fixed = 0.0 if self.stream_gb_per_s is None else 2.0 * state / (self.stream_gb_per_s * 1e9)
        return TrainerRates(
            fixed_s=fixed,
            per_token_s=passes * shape.active / operations,
            pause_s=self.weight_bytes / (self.update_gb_per_s * 1e9),
        )

    def assumptions(self) -> list[str]:
        """Every number above that is not a fact of model or GPU, in words."""
        shape, gpu = self.shape, self.gpu
        engine, trainer = self.engine_rates(), self.trainer_rates()
        mixture = f", {100 * shape.expert_share:.1f} % of the experts per token" if shape.is_mixture else ""
        passes = f"{6 + 2 * self.recompute + 2 * self.logprob_passes} operations per active parameter and token"
        state = "optimiser state in memory; its step takes no time of its own"
        if self.stream_gb_per_s is not None:
            way = f"{self.stream_gb_per_s:g} GB/s per GPU and way"
            state = f"optimiser state streamed at {way}: {trainer.fixed_s:.0f} s"
        return [
            f"{shape.name}: {shape.total / 1e9:.4g} B parameters, {shape.active / 1e9:.3g} B active{mixture}",
            f"{gpu.name}: {gpu.tb_per_s:g} TB/s, {gpu.memory_gb:g} GB; {self.train_gpus} train, "
            f"{self.engines} engine{'s' if self.engines > 1 else ''} of {self.engine_gpus}",
            f"decoding: {self.weights} weights, {self.cache} cache, {self.bandwidth_use:.0%} of the bandwidth, "
            f"{self.decode_use:.0%} of the peak, {self.layer_overhead_us:g} us a layer, "
            f"{self.tokens_per_step:g} tokens a step",
            f"one engine: {1e3 * engine.step_s(1, 0):.1f} ms a step alone, {1e3 * engine.step_s(32, 32 * 8192):.1f} ms "
            f"with 32 sequences of 8192; {self.kv_tokens} tokens of context fit",
            f"prompts: {self.prefill_use:.0%} of the peak, {1 / engine.prefill_s_per_token:.0f} tokens/s an engine",
            f"training: {passes} at {self.train_use:.0%} of the {self.training} peak, "
            f"{1 / trainer.per_token_s:.0f} tokens/s",
            state,
            f"weight update: {self.weight_bytes / 1e9:.0f} GB at {self.update_gb_per_s:g} GB/s, "
            f"engines paused for {trainer.pause_s:.1f} s",
        ]


def find_gpu(name: str) -> Gpu:
    """The data sheet of a GPU.

    Raises:
        InvalidFieldError: not known.
    """
    if name.lower() not in GPUS:
        raise InvalidFieldError("hardware.gpu", name, f"{nearest(name.lower(), GPUS)}use {', '.join(GPUS)}")
    return GPUS[name.lower()]


def peak(gpu: Gpu, number: Format, field: str) -> float:
    """Dense tera-operations per second.

    Raises:
        InvalidFieldError: the GPU has no arithmetic of this format.
    """
    if number.value not in gpu.tflops:
        raise InvalidFieldError(field, number.value, f"{gpu.name} computes in {', '.join(gpu.tflops)}")
    return gpu.tflops[number.value]
