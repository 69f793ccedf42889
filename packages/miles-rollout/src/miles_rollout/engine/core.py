"""EngineCore: the thread that owns the model. Requests and commands come in between steps, results go out.

Only this thread touches the model, the scheduler and the weights. Others post callables and wait on futures;
finished sequences are handed to `deliver`, once a step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from miles_contracts import InvalidFieldError, PauseMode
from miles_rollout.engine.attention import SlotPools
from miles_rollout.engine.config import EngineConfig
from miles_rollout.engine.executors import Executor, NativeExecutor, SlotExecutor, StepLogits
from miles_rollout.engine.loading import LoadedModel
from miles_rollout.engine.requests import RequestLimits
from miles_rollout.engine.sampling import sample, scale
from miles_rollout.engine.scheduler import Limits, Scheduler
from miles_rollout.engine.sequence import Finish, Sequence, State
from miles_rollout.engine.staging import StagedWeights
from miles_rollout.engine.text import TextCodec
from miles_rollout.engine.weight_update import WeightUpdates

T = TypeVar("T")
_log = logging.getLogger(__name__)


def make_limits(config: EngineConfig, loaded: LoadedModel) -> Limits:
    """Sizes of queue, batch and KV cache from the configuration and the model."""
    context = loaded.context_length
    if config.context_length is not None:
        if config.context_length > context:
            raise InvalidFieldError("context_length", config.context_length, f"the model was made for {context}")
        context = config.context_length
    tokens = config.max_total_tokens
    if tokens is None:
        tokens = context * config.max_running_requests
        if loaded.bytes_per_token:
            tokens = min(tokens, config.kv_memory_mb * (1 << 20) // loaded.bytes_per_token)
    if tokens < 2:
        raise InvalidFieldError("kv_memory_mb", config.kv_memory_mb, "too little for two tokens")
    return Limits(
        kv_tokens=tokens,
        context_length=context,
        max_running=config.max_running_requests,
        step_tokens=config.chunked_prefill_size,
        max_queued=config.max_queued_requests,
    )


class EngineCore:
    """The model thread.

    Args:
        deliver: called on the model thread after each step with the sequences that finished or, when they
            stream, grew. Must not block.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        limits: Limits,
        codec: TextCodec,
        weight_version: str,
        deliver: Callable[[list[Sequence]], None],
    ) -> None:
        self.loaded = loaded
        self.codec = codec
        self.weight_version = weight_version
        self.updates = WeightUpdates(loaded.model)
        self.scheduler = Scheduler(limits, sharing=loaded.slots, whole_prompts=not loaded.slots)
        self._executor: Executor
        if loaded.forward is not None:
            pools = SlotPools(limits.kv_tokens + 1, loaded.device)
            table, dtype = self.scheduler.table, loaded.model.dtype
            self._executor = SlotExecutor(loaded.forward, dtype, pools, table, loaded.device, loaded.routes)
        else:
            self._executor = NativeExecutor(loaded.model, loaded.device, loaded.routes)
        self._deliver = deliver
        self._lock = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._by_id: dict[str, Sequence] = {}
        self.failure: str | None = None
        self.steps = 0
        self.sampled_tokens = 0
        self.busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def request_limits(self) -> RequestLimits:
        """What requests are checked against."""
        limits = self.scheduler.limits
        return RequestLimits(
            context_length=limits.context_length,
            kv_tokens=limits.kv_tokens,
            vocab_size=self.loaded.vocab_size,
            eos_ids=self.loaded.eos_ids,
            has_routes=self.loaded.routes is not None,
        )

    # -- other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the model thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the model thread after the current step and wait for it."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join()

    def post(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the model thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 (a request boundary: the caller gets the error)
                future.set_exception(error)

        with self._lock:
            if self._stopping:
                raise RuntimeError("the engine is stopping")
            self._inbox.append(run)
            self._lock.notify()
        return future

    # -- model thread: commands ---------------------------------------------------------------------------------

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences; all or none.

        Raises:
            InvalidFieldError: a request id is in use, or the queue is full.
        """
        sequences = list(sequences)
        for sequence in sequences:
            if sequence.id in self._by_id:
                raise InvalidFieldError("rid", sequence.id, "this request is still running; choose another id")
        queued, most = len(self.scheduler.waiting) + len(sequences), self.scheduler.limits.max_queued
        if queued > most:
            raise InvalidFieldError("requests", queued, f"the queue holds {most}; send again later")
        for sequence in sequences:
            self._by_id[sequence.id] = sequence
            self.scheduler.add(sequence)

    def abort(self, request_id: str | None, message: str = "aborted") -> int:
        """End one request, or all; how many ended. Their callers get what was sampled so far."""
        chosen = [s for s in self._by_id.values() if request_id is None or s.id == request_id]
        for sequence in chosen:
            self.scheduler.finish(sequence, Finish("abort", message))
        self._hand_out(chosen)
        return len(chosen)

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. Retract: running requests go back to the queue; abort: they end."""
        self.scheduler.paused = True
        if mode is PauseMode.ABORT:
            self.abort(None, "aborted by a pause")
        elif mode is PauseMode.RETRACT:
            self.scheduler.retract_all()

    def resume(self) -> None:
        """Step again."""
        self.scheduler.paused = False

    def commit_update(self, update_id: str) -> None:
        """Commit an open weight update."""
        self._weights_changed(self.updates.commit(update_id))

    def swap_weights(self, staged: StagedWeights, version: str) -> None:
        """Make complete staged weights the serving ones."""
        staged.swap()
        self._weights_changed(version)

    def _weights_changed(self, version: str) -> None:
        """New weights are in the model. Unless paused in place, running requests are computed again under them."""
        if not self.scheduler.paused:
            self.scheduler.retract_all()
        self.scheduler.weights_changed()
        self.weight_version = version

    # -- model thread: loop -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._inbox and not self._stopping and not self._has_work():
                    self._lock.wait()
                if self._stopping:
                    break
                actions = list(self._inbox)
                self._inbox.clear()
            for action in actions:
                action()
            if self._has_work():
                began = time.perf_counter()
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 (task supervisor): the requests fail, the engine says so and lives
                    _log.exception("a step failed")
                    self.failure = f"{type(error).__name__}: {error}"
                    self.abort(None, f"the engine failed: {self.failure}")
                self.busy_s += time.perf_counter() - began
        self.abort(None, "the engine is stopping")

    def _has_work(self) -> bool:
        scheduler = self.scheduler
        return not scheduler.paused and bool(scheduler.running or scheduler.waiting)

    def _step(self) -> None:
        chunks = self.scheduler.next_step()
        result = self._executor.run(chunks)
        self.scheduler.computed(chunks)
        self._record_prompt(result)
        self.steps += 1
        events: list[Sequence] = []
        if result.sampling:
            events = self._sample(result)
        # A prompt that only wants its own log-probs has nothing to sample.
        if events:
            self._hand_out(events)

    def _sample(self, result: StepLogits) -> list[Sequence]:
        """Draw, append and finish; the sequences somebody waits for."""
        sequences = [chunk.sequence for chunk, _ in result.sampling]
        rows = [row for _, row in result.sampling]
        logits = result.logits if rows == list(range(len(result.logits))) else result.logits[rows]
        with torch.inference_mode():
            ids, logprobs = sample(logits, sequences)
        events = []
        version = self.weight_version
        for sequence, token, logprob in zip(sequences, ids, logprobs, strict=True):
            if math.isnan(logprob):
                sequence.finish = Finish("abort", "the model's logits are not finite")
            elif sequence.sampling.max_new_tokens == 0:
                sequence.finish = Finish("length", 0)
            else:
                sequence.append(token, logprob, version)
                self.sampled_tokens += 1
                if sequence.finish is None and sequence.sampling.stop:
                    self.codec.check_stop(sequence)
            if sequence.finish is not None:
                self.scheduler.finish(sequence)
                events.append(sequence)
            elif sequence.stream:
                events.append(sequence)
        return events

    def _record_prompt(self, result: StepLogits) -> None:
        """Log-probs of prompt tokens from the logits of their predecessors."""
        for chunk, first, row, count in result.prompt:
            sequence = chunk.sequence
            usable = min(count, sequence.prompt_length - 1 - first)
            if usable <= 0:
                continue
            with torch.inference_mode():
                logits = result.logits[row : row + usable]
                logprobs = torch.log_softmax(scale(logits, [sequence.sampling.temperature] * usable), dim=-1)
                targets = torch.from_numpy(sequence.tokens[first + 1 : first + 1 + usable]).long().to(logits.device)
                sequence.prompt_logprobs.extend(logprobs.gather(1, targets[:, None])[:, 0].tolist())

    def _hand_out(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.state is State.FINISHED:
                self._by_id.pop(sequence.id, None)
        if sequences:
            self._deliver(sequences)

    def state(self) -> dict[str, Any]:
        """Numbers for `/get_server_info`."""
        s = self.scheduler
        return {
            "running_requests": len(s.running),
            "waiting_requests": len(s.waiting),
            "paused": s.paused,
            "kv_tokens": s.limits.kv_tokens,
            "kv_tokens_free": s.allocator.free_count,
            "prefix_cache_tokens": s.tree.size,
            "prefix_cache_evictable": s.tree.evictable,
            "retractions": s.retracted,
            "fed_tokens": s.fed_tokens,
            "cached_tokens": s.cached_tokens,
            "sampled_tokens": self.sampled_tokens,
            "steps": self.steps,
            "busy_s": round(self.busy_s, 6),
        }
