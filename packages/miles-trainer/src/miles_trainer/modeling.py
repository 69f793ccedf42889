"""A Hugging Face causal LM as a function from packed tokens to log-probs; what it can do is read from its structure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from miles_contracts import InvalidFieldError
from miles_trainer import attention
from miles_trainer.attention import UnsupportedAttentionError, layout_of
from miles_trainer.batching import MicroBatch
from miles_trainer.logprobs import token_logprobs

_PROBE_FIRST, _PROBE_SECOND = 5, 6
_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class Packing(StrEnum):
    """How the trajectories of a micro-batch are laid out for the model."""

    VARLEN = "varlen"
    """One row without padding, attention by `attention.varlen_attention`."""
    BLOCK_DIAGONAL = "block_diagonal"
    """One row without padding, transformers' own packed masks (from restarting position ids)."""
    PADDED = "padded"
    """One row per trajectory, padded on the right; for layers that carry state from token to token."""


def load_model(path: Path, dtype: str, device: torch.device) -> Any:
    """Load the causal LM in `path` (a local folder; nothing is downloaded), dropout off.

    Raises:
        InvalidFieldError: no such folder, no configuration or no weights in it, a damaged weights file, or an
            architecture transformers does not know as a causal LM.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if not (path / "config.json").is_file():
        raise InvalidFieldError("model_path", str(path), "give a Hugging Face model folder (with config.json)")
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise InvalidFieldError("model_path", str(path), "the folder has no weights (*.safetensors)")
    try:
        with quiet_progress():
            model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype="auto" if dtype == "auto" else getattr(torch, dtype), local_files_only=True
            )
    except SafetensorError as error:
        broken = _broken_file(path)
        where = "a weights file" if broken is None else broken.name
        remedy = f"{where} is truncated or damaged; download or copy it again ({error})"
        raise InvalidFieldError("model_path", str(path if broken is None else broken), remedy) from error
    except (OSError, ValueError, KeyError) as error:
        raise InvalidFieldError("model_path", str(path), f"transformers cannot load it: {error}") from error
    _disable_randomness(model)
    if model.dtype == torch.float64 and find_experts(model):
        # grouped matrix products know no float64
        model.set_experts_implementation("eager")
    return model.to(device)


def _broken_file(folder: Path) -> Path | None:
    """The first weights file whose header cannot be read or does not fit its length."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return None


def find_experts(model: nn.Module) -> bool:
    """Whether some module holds stacked expert matrices."""
    return any(p.dim() == 3 for m in model.modules() for p in m.parameters(recurse=False))


@contextmanager
def quiet_progress() -> Iterator[None]:
    """transformers' progress bars off inside the block: they would interleave with a run's own display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _disable_randomness(model: nn.Module) -> None:
    """Dropout and router jitter would make log-probs random, and importance ratios noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def structural_packing(config: Any, model: nn.Module) -> Packing:
    """The best packing that the model's structure may allow; a probe decides whether it really does.

    Layers with recurrent state or convolutions over tokens mix neighbours whatever the attention does, so such
    models are padded.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _PACKABLE_LAYERS or any(isinstance(m, nn.Conv1d) for m in model.modules()):
        return Packing.PADDED
    if "chunked_attention" in kinds or not getattr(model, "_supports_attention_backend", False):
        return Packing.BLOCK_DIAGONAL
    return Packing.VARLEN


def windowed_layers(config: Any) -> int:
    """How many attention layers look back over a limited window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return sum(kind == "sliding_attention" for kind in kinds)
    if getattr(config, "sliding_window", None) is None or not getattr(config, "use_sliding_window", True):
        return 0
    return int(config.num_hidden_layers)


class PolicyModel:
    """Runs one model on micro-batches.

    Args:
        model: a transformers causal LM.
        packing: `auto`, or the name of a Packing; one the structure forbids is refused.
        logits_bytes: bytes of logits that may exist at once.
    """

    def __init__(self, model: Any, *, packing: str, logits_bytes: int) -> None:
        self.model = model
        self.config: Any = model.config
        self.text_config: Any = self.config.get_text_config()
        self.logits_bytes = logits_bytes
        self.device = next(model.parameters()).device
        self.head: Any = model.get_output_embeddings()
        if self.head is None:
            raise InvalidFieldError("model_path", type(model).__name__, "give a causal LM with an output head")
        self.vocab_size = int(self.head.weight.shape[0])
        self.max_length: int | None = getattr(self.text_config, "max_position_embeddings", None)
        self.packing = Packing.PADDED
        self._choose_packing(packing)
        self.plain_head = self._head_is_plain()

    @property
    def can_share(self) -> bool:
        """True when trajectories of a micro-batch may have a common prefix."""
        return self.packing is Packing.VARLEN

    @property
    def padded(self) -> bool:
        """True when a micro-batch costs longest x number."""
        return self.packing is Packing.PADDED

    def forward(
        self, batch: MicroBatch, *, entropy: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [P] of the predicted tokens and entropies [P] when asked for, float32 (or float64 as the model)."""
        sources = torch.from_numpy(batch.sources).to(self.device)
        targets = torch.from_numpy(batch.targets).to(self.device)
        inverse_temperature = torch.from_numpy(batch.inverse_temperature).to(self.device)
        inputs = self._inputs(batch.chunks.length, batch.token_ids, batch.position_ids, batch.chunks.prefix)
        positions = token_rows(batch.chunks.length, self.device)[sources] if self.padded else sources
        if not self.plain_head:
            if self.padded:
                logits = self.model(**inputs, use_cache=False).logits.flatten(0, 1)[positions]
            else:
                logits = self.model(**inputs, use_cache=False, logits_to_keep=positions).logits[0]
            return _dense_logprobs(logits, targets, inverse_temperature, entropy)
        hidden = self._base(**inputs, use_cache=False).last_hidden_state
        return token_logprobs(
            hidden.flatten(0, 1).index_select(0, positions),
            self.head.weight,
            getattr(self.head, "bias", None),
            targets,
            inverse_temperature,
            logits_bytes=self.logits_bytes,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )

    @property
    def _base(self) -> Any:
        # a text-only part of a multimodal family may keep the whole's prefix, which it does not have
        base = getattr(self.model, self.model.base_model_prefix, None) or getattr(self.model, "model", None)
        if base is None:
            raise InvalidFieldError("model_path", type(self.model).__name__, "the model has no decoder without a head")
        return base

    def _inputs(
        self,
        lengths: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        position_ids: NDArray[np.int64],
        prefix: NDArray[np.int64] | None = None,
    ) -> dict[str, Any]:
        """Model inputs for packed tokens [N] of chunks with these lengths and prefixes."""
        ids = torch.from_numpy(token_ids).to(self.device)
        if self.padded:
            rows = token_rows(lengths, self.device)
            padded = ids.new_zeros(len(lengths), int(lengths.max(initial=0)))
            mask = torch.zeros_like(padded)
            padded.view(-1)[rows] = ids
            mask.view(-1)[rows] = 1
            return {"input_ids": padded, "attention_mask": mask}
        inputs: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": torch.from_numpy(position_ids).to(self.device)[None],
        }
        if self.packing is Packing.VARLEN:
            shared = prefix is not None and bool((prefix >= 0).any())
            inputs["miles_layout"] = layout_of(lengths, self.device, prefix if shared else None)
        return inputs

    def _choose_packing(self, wanted: str) -> None:
        """Take the best packing that structure allows and a probe confirms."""
        order = [Packing.VARLEN, Packing.BLOCK_DIAGONAL, Packing.PADDED]
        allowed = order[order.index(structural_packing(self.text_config, self.model)) :]
        if wanted != "auto":
            if Packing(wanted) not in allowed:
                raise InvalidFieldError(
                    "batching.packing", wanted, f"{type(self.model).__name__} allows {allowed[0]} at best; use auto"
                )
            allowed = [Packing(wanted)]
        attention_before = self.config._attn_implementation
        alone = self._probe_alone()
        for packing in allowed:
            self.packing = packing
            if packing is Packing.VARLEN:
                attention.register()
                self.model.set_attn_implementation(attention.NAME)
            if packing is Packing.PADDED or self._agrees(alone):
                return
            self.model.set_attn_implementation(attention_before)
        raise InvalidFieldError("batching.packing", wanted, "the model mixes packed trajectories; use auto or padded")

    def _agrees(self, alone: Tensor) -> bool:
        """Whether a trajectory that is packed behind another one gives the hidden states it gives alone.

        A leak changes them by far more than rounding does. Windows longer than the probe cannot show there, so
        those that reach the attention function are counted as well.
        """
        inputs = self._probe_inputs()
        try:
            with torch.no_grad():
                packed = self._base(**inputs, use_cache=False).last_hidden_state[0, -len(alone) :]
        except (UnsupportedAttentionError, TypeError):
            return False
        layout = inputs.get("miles_layout")
        if layout is not None and sum(w is not None for w in layout.windows) != windowed_layers(self.text_config):
            return False
        tolerance = 1e-3 if alone.dtype in (torch.float32, torch.float64) else 5e-2
        return bool((packed - alone).abs().max() <= tolerance * alone.abs().max())

    @torch.no_grad()
    def _probe_alone(self) -> Tensor:
        """Hidden states of the probe's second trajectory by itself, with the model's own attention."""
        ids = torch.arange(_PROBE_FIRST, _PROBE_FIRST + _PROBE_SECOND, device=self.device) % self.vocab_size
        return self._base(input_ids=ids[None], use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]

    def input_rows(self, batch: MicroBatch) -> tuple[Tensor, int]:
        """Row of each fed token in the model's flattened input, int64 [N], and the number of rows with padding."""
        if self.padded:
            lengths = batch.chunks.length
            return token_rows(lengths, self.device), len(lengths) * int(lengths.max(initial=0))
        return torch.arange(batch.num_tokens, device=self.device), batch.num_tokens

    @torch.no_grad()
    def probe(self) -> None:
        """Run the model on a few tokens, for whoever watches its modules."""
        self._base(**self._probe_inputs(), use_cache=False)

    def _probe_inputs(self) -> dict[str, Any]:
        """Inputs of two tiny trajectories of 5 and 6 tokens."""
        ids = np.arange(_PROBE_FIRST + _PROBE_SECOND) % self.vocab_size
        positions = np.concatenate([np.arange(_PROBE_FIRST), np.arange(_PROBE_SECOND)])
        return self._inputs(np.array([_PROBE_FIRST, _PROBE_SECOND]), ids, positions)

    def _head_is_plain(self) -> bool:
        """Whether logits are exactly head(final hidden states): some models scale or cap them afterwards.

        The head's output is replaced by large numbers, which any later scaling or cap would change.
        """
        if not isinstance(self.head, nn.Linear):
            return False
        seen: list[Tensor] = []

        def replace(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen.append(args[0])
            return torch.linspace(-1e3, 1e3, output.numel(), device=output.device).to(output.dtype).view_as(output)

        handle = self.head.register_forward_hook(replace)
        try:
            inputs = self._probe_inputs()
            with torch.no_grad():
                logits = self.model(**inputs, use_cache=False).logits
                hidden = self._base(**inputs, use_cache=False).last_hidden_state
        finally:
            handle.remove()
        wanted = torch.linspace(-1e3, 1e3, logits.numel(), device=logits.device).to(hidden.dtype).view_as(logits)
        # the comparison of inputs is loose because kernels may be nondeterministic; scaling is never subtle
        close = len(seen) == 1 and seen[0].shape == hidden.shape and torch.allclose(seen[0], hidden, 1e-2, 1e-2)
        return close and torch.equal(logits.to(hidden.dtype), wanted)


def token_rows(lengths: NDArray[np.int64], device: torch.device) -> Tensor:
    """int64 [N]: where each packed token is in a flattened grid padded on the right to the longest trajectory."""
    width = int(lengths.max(initial=0))
    starts = np.cumsum(lengths) - lengths
    shift = np.arange(len(lengths)) * width - starts
    return torch.from_numpy(np.arange(int(lengths.sum())) + np.repeat(shift, lengths)).to(device)


def _dense_logprobs(
    logits: Tensor, targets: Tensor, inverse_temperature: Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    if logits.dtype != torch.float64:
        logits = logits.float()
    table = torch.log_softmax(logits * inverse_temperature.to(logits.dtype)[:, None], dim=-1)
    chosen = table.gather(1, targets[:, None]).squeeze(1)
    return chosen, -(table.exp() * table).sum(-1) if entropy else None
