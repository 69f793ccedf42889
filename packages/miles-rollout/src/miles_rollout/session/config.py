"""Configuration of a session server; every limit has a clear error of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from miles_rollout.session.matching import ALL_REPAIRS, Repair, load_matcher
from miles_rollout.session.tree import Policy

_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SessionConfig(BaseModel):
    """How sessions behave and how much they may hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Policy = Policy.LINEAR
    """Linear (one trajectory a session) or branching (one a leaf); a session may choose its own at creation."""
    matcher: str = "strict"
    """`strict`, `loose_tool_call`, `role_content_only`, or `package.module:function`."""
    repairs: frozenset[Repair] = ALL_REPAIRS
    """What may be overlooked in a harness's copy of the policy's own messages; empty for none."""
    wait_when_busy: bool = False
    """A second request on a linear session waits for the first instead of being refused with 409."""
    best_effort_tool_choice: bool = False
    """Serve a forced `tool_choice` as "auto" (counted) where a call cannot be opened exactly, instead of refusing."""
    record_routing: bool = False
    """Ask the engine for the expert choices of every token (mixture-of-experts models)."""
    num_experts: _Positive | None = None
    """Experts a layer, needed to store routing in its narrowest form."""
    default_max_tokens: _Positive = 1024
    """Budget of a turn for which neither the request nor the session names one."""
    max_context_tokens: _Positive | None = None
    """Longest prompt plus completion; a turn's budget is cut to fit. None goes by what engines say."""
    live_streams: bool = True
    """Stream chat content while the engine samples, if it can; otherwise streams are cut from the finished turn."""
    engine_timeout_s: _Seconds = 1800.0
    """Longest wait for one generation."""
    max_sessions: _Positive = 4096
    """Sessions open at a time."""
    max_nodes: _Positive = 1024
    """Turns a session may hold, abandoned ones included."""
    max_body_bytes: _Positive = 32 << 20
    """Largest request body."""
    idle_timeout_s: _Seconds = 3600.0
    """A session that nobody used for so long is closed."""

    @field_validator("matcher")
    @classmethod
    def _matcher_exists(cls, value: str) -> str:
        load_matcher(value)
        return value
