"""Tasks from a JSONL file; every bad line is reported, with its number and the reason, in one error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError, Message, MilesError, Task
from miles_rollout.tasks.stream import TaskStream

_SHOWN = 20
_ROLES = ("system", "developer", "user", "assistant", "tool")

LabelCheck = Callable[[Any], str | None]
"""Why a label cannot be used (None: absent), or None when it can."""


class TaskFileError(MilesError, ValueError):
    """A task file has bad lines.

    Attributes:
        path: the file.
        problems: (line number from 1, reason) of every bad line.
        others: of other files of the same task.
    """

    def __init__(self, path: Path, problems: list[tuple[int, str]], *others: TaskFileError) -> None:
        lines = [f"  line {number}: {reason}" for number, reason in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines.append(f"  ... and {len(problems) - _SHOWN} more")
        said = f"{path}: {len(problems)} bad line(s); fix or remove them\n" + "\n".join(lines)
        super().__init__("\n".join([said, *map(str, others)]))
        self.path = path
        self.problems = problems
        self.others = others


class _Item(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    label: Any
    metadata: dict[str, Any]


class JsonlTasks(TaskStream):
    """One JSON object a line: `prompt` (text or chat messages), optional `label` and `metadata`, nothing else.

    Blank lines are skipped. The file is read and checked completely at construction.

    Args:
        path: the file, UTF-8.
        seed: of the order of each epoch.
        shuffle: False keeps the order of the file in every epoch.
        prompt_key: field with the prompt.
        label_key: field with the reference answer.
        metadata_key: field with a JSON object of extras.
        system_prompt: a system message put before prompts that do not start with one.
        skip: leave out the first `skip` items.
        check_label: what the reward asks of the labels of the items that are used.
        limit: use at most `limit` items of the rest, so that one file can hold training and held-out tasks.
        last: so many items at the end are checked by `check_last` instead of `check_label`.
        check_last: what another reward asks of the labels there, None for nothing.

    Raises:
        InvalidFieldError: the file is missing, unreadable or has no items.
        TaskFileError: some lines are bad.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int = 0,
        shuffle: bool = True,
        prompt_key: str = "prompt",
        label_key: str = "label",
        metadata_key: str = "metadata",
        system_prompt: str | None = None,
        skip: int = 0,
        limit: int | None = None,
        check_label: LabelCheck | None = None,
        last: int = 0,
        check_last: LabelCheck | None = None,
    ) -> None:
        self._path = Path(path)
        self._keys = (prompt_key, label_key, metadata_key)
        self._system = system_prompt
        try:
            data = self._path.read_bytes()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise InvalidFieldError("task file", str(self._path), f"cannot be read: {reason}") from error
        if skip < 0 or (limit is not None and limit < 1):
            raise InvalidFieldError("skip, limit", (skip, limit), "need skip >= 0 and limit >= 1")
        used = slice(skip, None if limit is None else skip + limit)
        self._items = self._parse(data, used, check_label, last, check_last)
        found = len(self._items)
        self._items = self._items[used]
        if not self._items:
            raise InvalidFieldError("task file", str(self._path), f"no tasks left of {found} after skipping {skip}")
        self._digest = hashlib.blake2b(msgspec.json.encode(self._items), digest_size=16).hexdigest()
        super().__init__(size=len(self._items), seed=seed, shuffle=shuffle)

    def _parse(
        self, data: bytes, used: slice, check_label: LabelCheck | None, last: int, check_last: LabelCheck | None
    ) -> list[_Item]:
        items: list[_Item] = []
        numbers: list[int] = []
        problems: list[tuple[int, str]] = []
        filled: list[int] = []
        for number, line in enumerate(data.split(b"\n"), start=1):
            if not line.strip():
                continue
            filled.append(number)
            try:
                items.append(self._item(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line))
                numbers.append(number)
            except (ValueError, msgspec.MsgspecError) as error:
                problems.append((number, str(error)))
        boundary = filled[-last] if 0 < last <= len(filled) else None  # bad lines count, too
        for number, item in zip(numbers[used], items[used], strict=True):
            check = check_label if boundary is None or number < boundary else check_last
            problem = check(item.label) if check is not None else None
            if problem is not None:
                problems.append((number, problem))
        if problems:
            raise TaskFileError(self._path, sorted(problems))
        return items

    def _item(self, line: bytes) -> _Item:
        prompt_key, label_key, metadata_key = self._keys
        try:
            record = msgspec.json.decode(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {error.start}") from error
        except msgspec.DecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        if prompt_key not in record:
            raise ValueError(f"no field {prompt_key!r}; it has {', '.join(map(repr, record)) or 'none'}")
        for key in record:
            if key not in self._keys:
                near = get_close_matches(key, self._keys, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]!r}? " if near else ""
                known = ", ".join(self._keys)
                raise ValueError(f"unknown field {key!r}; {hint}known are {known}; extras go into {metadata_key!r}")
        metadata = record.get(metadata_key)
        if metadata is not None and not isinstance(metadata, dict):
            raise ValueError(f"{metadata_key!r} must be an object, got {type(metadata).__name__}")
        messages = parse_prompt(record[prompt_key])
        if self._system is not None and messages[0].role != "system":
            messages = (Message(role="system", content=self._system), *messages)
        return _Item(messages=messages, label=record.get(label_key), metadata=metadata or {})

    def _task(self, item: int, prompt_index: int) -> Task:
        one = self._items[item]
        return Task(
            prompt_index=prompt_index,
            messages=one.messages,
            label=one.label,
            metadata=one.metadata,
            source=self._path.stem,
        )

    def _fingerprint(self) -> str:
        return self._digest


def parse_prompt(prompt: Any) -> tuple[Message, ...]:
    """Chat messages from text (one user message) or from a list of OpenAI message objects.

    Raises:
        ValueError: neither, an empty one, or a role that no chat format has.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty")
        return (Message(role="user", content=prompt),)
    if not isinstance(prompt, list):
        raise ValueError(f"the prompt must be text or a list of messages, got {type(prompt).__name__}")
    if not prompt:
        raise ValueError("the prompt has no messages")
    try:
        messages = tuple(msgspec.convert(prompt, list[Message]))
    except msgspec.ValidationError as error:
        raise ValueError(f"bad message: {error}") from error
    for index, message in enumerate(messages):
        if message.role not in _ROLES:
            raise ValueError(f"unknown role {message.role!r} in message {index}; use one of {', '.join(_ROLES)}")
    return messages
