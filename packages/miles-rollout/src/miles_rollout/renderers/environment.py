"""The Jinja sandbox in which chat templates expect to run."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from miles_contracts import InvalidFieldError
from miles_rollout.renderers.errors import RenderError


class GenerationBlocks(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which mark trainable text for others; here masks come from
    the ids, so the block is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The body as a block of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def compile_template(source: str, today: datetime.date) -> jinja2.Template:
    """A chat template, sandboxed, with the filters and functions that published templates use.

    Args:
        source: the template.
        today: what `strftime_now` formats (midnight of that day).

    Raises:
        InvalidFieldError: the template is not Jinja.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _clock(today)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidFieldError(
            "chat_template", source.splitlines()[error.lineno - 1] if source else "", f"line {error.lineno}: {error}"
        ) from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise RenderError(f"the chat template refuses the conversation: {message}")


def _clock(today: datetime.date) -> Callable[[str], str]:
    midnight = datetime.datetime.combine(today, datetime.time())
    return midnight.strftime
