"""Fields of a request that are not read: refused, accepted because nothing depends on them, or told about.

A field that would change what is sampled, or the form of the answer, and that cannot be honoured is refused with a
remedy, unless its value is the one that changes nothing. Well-known fields without such influence are accepted. Any
other field is accepted too (harnesses send their vendors' extras), but it is counted by name and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from miles_rollout.session.errors import BadRequestError
from miles_rollout.session.messages import shorten

_log = logging.getLogger(__name__)

ACCEPTED: Final = frozenset(
    {
        "cache_salt",
        "guided_decoding_backend",
        "include_reasoning",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "return_meta_info",
        "rid",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "stream_reasoning",
        "user",
    }
)
"""Fields on which neither tokens nor the answer's form depend here."""

_CHANGED = "it would change the distribution that log-probs are taken from; leave it out"
_MASKED = "sampling is not constrained, or its log-probs would not be the policy's; ask for the form in a message"
_RENDERED = "the family's renderer decides how a conversation is written; leave it out"
_SHOWN = "answers have one form here; leave it out (GET .../trajectories has ids, log-probs and routing)"
_THINK = 'use chat_template_kwargs {"enable_thinking": true or false}, or reasoning_effort'
_ONE = "one completion a request; send several requests"

REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    # name: (values that change nothing, why not and what to do instead)
    "n": ((1,), _ONE),
    "best_of": ((1,), _ONE),
    "use_beam_search": ((False,), _CHANGED),
    "frequency_penalty": ((0,), _CHANGED),
    "presence_penalty": ((0,), _CHANGED),
    "repetition_penalty": ((1,), _CHANGED),
    "length_penalty": ((1,), _CHANGED),
    "no_repeat_ngram_size": ((0,), _CHANGED),
    "logit_bias": (({},), _CHANGED),
    "bad_words": (([],), _CHANGED),
    "allowed_token_ids": ((), _CHANGED),
    "logits_processors": (([],), _CHANGED),
    "custom_logit_processor": ((), _CHANGED),
    "min_tokens": ((0,), _CHANGED),
    "min_new_tokens": ((0,), _CHANGED),
    "typical_p": ((1,), _CHANGED),
    "top_a": ((0,), _CHANGED),
    "top_n_sigma": ((-1, 0), _CHANGED),
    "epsilon_cutoff": ((0,), _CHANGED),
    "eta_cutoff": ((0,), _CHANGED),
    "tfs": ((1,), _CHANGED),
    "xtc_probability": ((0,), _CHANGED),
    "dry_multiplier": ((0,), _CHANGED),
    "dynatemp_range": ((0,), _CHANGED),
    "mirostat": ((0,), _CHANGED),
    "mirostat_mode": ((0,), _CHANGED),
    "smoothing_factor": ((0,), _CHANGED),
    "response_format": (({"type": "text"},), _MASKED),
    "structured_outputs": ((), _MASKED),
    "guided_json": ((), _MASKED),
    "guided_regex": ((), _MASKED),
    "guided_choice": ((), _MASKED),
    "guided_grammar": ((), _MASKED),
    "json_schema": ((), _MASKED),
    "regex": ((), _MASKED),
    "grammar": ((), _MASKED),
    "ebnf": ((), _MASKED),
    "structural_tag": ((), _MASKED),
    "functions": ((), "the retired form; send tools"),
    "function_call": ((), "the retired form; send tool_choice"),
    "top_logprobs": ((0,), "only the sampled token's log-prob is known; leave it out"),
    "prompt_logprobs": ((0, False), _SHOWN),
    "modalities": ((["text"],), "text only; leave it out"),
    "audio": ((), "text only; leave it out"),
    "web_search_options": ((), "nothing is searched; give a search tool under tools"),
    "verbosity": (("medium",), "no family has such a switch; ask for it in a message"),
    "reasoning": (({},), _THINK),
    "thinking": (({},), _THINK),
    "enable_thinking": ((), _THINK),
    "thinking_budget": ((), _THINK),
    "chat_template": ((), _RENDERED),
    "documents": (([],), "give documents in a message"),
    "add_generation_prompt": ((True,), _RENDERED),
    "continue_final_message": ((False,), _RENDERED),
    "add_special_tokens": ((False,), _RENDERED),
    "truncate_prompt_tokens": ((), "history is never cut; compact it in a branching session"),
    "stop_regex": ((), "use stop or stop_token_ids"),
    "no_stop_trim": ((False,), _SHOWN),
    "include_stop_str_in_output": ((False,), _SHOWN),
    "skip_special_tokens": ((True,), _SHOWN),
    "return_token_ids": ((False,), _SHOWN),
    "return_hidden_states": ((False,), _SHOWN),
    "return_routed_experts": ((False,), _SHOWN),
    "lora_path": ((), "sessions are sampled from the policy; leave it out"),
    "echo": ((False,), "not supported; leave it out"),
    "suffix": (("",), "not supported; leave it out"),
}


def unread_fields(fields: Mapping[str, msgspec.Raw], read: Iterable[str]) -> tuple[str, ...]:
    """Names of fields that nothing is known about, in the request's order.

    Args:
        fields: the request, each value as JSON text; null counts as left out.
        read: names that are read.

    Raises:
        BadRequestError: a field that cannot be honoured, with its name and a remedy.
    """
    unknown = []
    for name in fields.keys() - set(read) - ACCEPTED:
        raw = bytes(fields[name])
        if raw == b"null":
            continue
        if name not in REFUSED:
            unknown.append(name)
            continue
        neutral, remedy = REFUSED[name]
        value = msgspec.json.decode(raw)
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
            raise BadRequestError(f"{name}: got {shorten(value)}; {remedy}", param=name)
    return tuple(sorted(unknown))


class UnknownFields:
    """Fields of requests that nothing is known about; each name is logged once.

    A client chooses the names, so only the first few are kept apart.
    """

    LIMIT: Final = 32
    OTHER: Final = "(other)"

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, names: Iterable[str], session_id: str) -> dict[str, int]:
        """Log what is new; what to count under which name."""
        counts: dict[str, int] = {}
        for name in names:
            label = name if len(name) <= 64 and name.isprintable() else self.OTHER
            if label not in self._known and len(self._known) >= self.LIMIT:
                label = self.OTHER
            elif label not in self._known:
                self._known.add(label)
                _log.warning("session %s: field %r of a request is not known and ignored", session_id[:8], label)
            counts[label] = counts.get(label, 0) + 1
        return counts
