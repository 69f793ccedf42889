"""A session service in front of a scripted engine, asked as a client asks it."""

from __future__ import annotations

import json

from session_factories import ScriptedEngine, body

from miles_rollout.session import EngineSampler, SessionConfig, SessionService
from miles_rollout.session.responses import chat_body


def make(renderer, replies=(), **config):
    engine = ScriptedEngine(renderer, replies)
    return SessionService(EngineSampler(engine), renderer, SessionConfig(**config)), engine


async def ask(service, session, messages, **fields):
    answer, _ = await service.chat(session.id, body(messages, **fields))
    return json.loads(chat_body(answer))


def reply_of(answer):
    return answer["choices"][0]["message"]
