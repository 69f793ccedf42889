"""A JSONL file is read whole; all of its bad lines are reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_contracts import InvalidFieldError, Message
from miles_rollout.rewards import exact_label, numeric_label
from miles_rollout.tasks import JsonlTasks, TaskFileError


def file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_text_and_messages(tmp_path: Path) -> None:
    text = (
        '{"prompt": "1+1?", "label": "2", "metadata": {"hard": false}}\n\n'
        '{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "label": [1, 2]}\r\n'
        '{"prompt": "no newline at the end"}'
    )
    tasks = JsonlTasks(file(tmp_path, text), shuffle=False)
    first, second, third = (tasks.next() for _ in range(3))
    assert first.messages == (Message(role="user", content="1+1?"),)
    assert (first.label, first.metadata, first.source) == ("2", {"hard": False}, "tasks")
    assert [m.role for m in second.messages] == ["system", "user"]
    assert second.label == [1, 2]
    assert (third.label, third.metadata) == (None, {})


def test_system_prompt_is_put_before_prompts_without_one(tmp_path: Path) -> None:
    text = '{"prompt": "a"}\n{"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}]}\n'
    tasks = JsonlTasks(file(tmp_path, text), shuffle=False, system_prompt="be brief")
    assert tasks.at(0).messages[0] == Message(role="system", content="be brief")
    assert tasks.at(1).messages[0] == Message(role="system", content="own")


def test_own_field_names(tmp_path: Path) -> None:
    path = file(tmp_path, '{"question": "q", "answer": 4, "info": {"a": 1}}\n')
    task = JsonlTasks(path, prompt_key="question", label_key="answer", metadata_key="info").next()
    assert (task.messages[0].content, task.label, task.metadata) == ("q", 4, {"a": 1})


def test_all_bad_lines_are_named(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "good"}',
        b'{"prompt": "cut',
        b"[1, 2]",
        b'{"promt": "typo"}',
        b'{"prompt": 5}',
        b'{"prompt": ""}',
        b'{"prompt": []}',
        b'{"prompt": [{"content": "no role"}]}',
        b'{"prompt": "x", "metadata": [1]}',
        b'{"prompt": "\xff"}',
        b'{"prompt": [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]}',
        b'{"prompt": "x", "lable": "y"}',
        b'{"prompt": "x", "id": 7}',
    ]
    with pytest.raises(TaskFileError) as caught:
        JsonlTasks(file(tmp_path, b"\n".join(lines)))
    problems = dict(caught.value.problems)
    assert sorted(problems) == list(range(2, 14))
    assert "not JSON" in problems[2]
    assert "expected a JSON object, got list" in problems[3]
    assert "no field 'prompt'; it has 'promt'" in problems[4]
    assert "got int" in problems[5]
    assert "empty" in problems[6]
    assert "no messages" in problems[7]
    assert "role" in problems[8]
    assert "must be an object, got list" in problems[9]
    assert "not UTF-8 at byte 12" in problems[10]
    assert "unknown role 'robot' in message 1; use one of system, developer, user" in problems[11]
    assert "unknown field 'lable'; did you mean 'label'?" in problems[12]
    assert "unknown field 'id'; known are prompt, label, metadata; extras go into 'metadata'" in problems[13]
    assert "12 bad line(s)" in str(caught.value)
    assert "line 4: no field" in str(caught.value)


def test_a_flood_of_bad_lines_is_shortened(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="and 30 more") as caught:
        JsonlTasks(file(tmp_path, "x\n" * 50))
    assert len(caught.value.problems) == 50


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    assert JsonlTasks(file(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n')).size == 1


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_tasks_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidFieldError, match="no tasks"):
        JsonlTasks(file(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="nothere.jsonl.*No such file"):
        JsonlTasks(tmp_path / "nothere.jsonl")
    with pytest.raises(InvalidFieldError, match="Is a directory"):
        JsonlTasks(tmp_path)


def test_one_file_split_in_two(tmp_path: Path) -> None:
    path = file(tmp_path, "".join(f'{{"prompt": "q{i}", "label": {i}}}\n' for i in range(10)))
    train, held = JsonlTasks(path, limit=7), JsonlTasks(path, skip=7)
    assert sorted(train.at(i).label for i in range(7)) == list(range(7))
    assert sorted(held.at(i).label for i in range(3)) == [7, 8, 9]
    with pytest.raises(InvalidFieldError, match="no tasks left of 10"):
        JsonlTasks(path, skip=10)
    with pytest.raises(InvalidFieldError, match="limit"):
        JsonlTasks(path, limit=0)


def test_labels_are_checked_where_the_reward_needs_them(tmp_path: Path) -> None:
    lines = ['{"prompt": "a", "label": "1"}', "", '{"prompt": "b"}', "{", '{"prompt": "c", "label": [1]}']
    path = file(tmp_path, "\n".join([*lines, '{"prompt": "d", "label": 2}', '{"prompt": "e", "label": "two"}']))
    with pytest.raises(TaskFileError) as caught:
        JsonlTasks(path, check_label=numeric_label)
    problems = dict(caught.value.problems)
    assert list(problems) == [3, 4, 5, 7], "in the order of the file, whatever is wrong"
    assert problems[3] == "it has no label"
    assert problems[5] == "the label must be text or a number, got list"
    assert problems[7] == "there is no number in the label 'two'"


def test_only_labels_of_used_items_are_checked(tmp_path: Path) -> None:
    path = file(tmp_path, '{"prompt": "a"}\n{"prompt": "b", "label": "x"}\n{"prompt": "c", "label": true}\n')
    assert JsonlTasks(path, skip=1, limit=1, check_label=exact_label).size == 1
    with pytest.raises(TaskFileError, match=r"line 1: it has no label"):
        JsonlTasks(path, limit=2, check_label=exact_label)
    with pytest.raises(TaskFileError, match=r"line 3: the label must be text or a number, got bool"):
        JsonlTasks(path, skip=1, check_label=exact_label)


def test_the_labels_at_the_end_may_be_for_another_reward(tmp_path: Path) -> None:
    """Lines that are bad themselves count as items, as they will once they are mended."""
    lines = ['{"prompt": "a", "label": "x"}', "{", "", '{"prompt": "b"}', '{"prompt": "c", "label": "y"}', "{"]
    path = file(tmp_path, "\n".join(lines) + "\n")

    def bad(**options: Any) -> list[int]:
        with pytest.raises(TaskFileError) as caught:
            JsonlTasks(path, **options)
        return [number for number, _ in caught.value.problems]

    assert bad(check_label=numeric_label, last=2, check_last=exact_label) == [1, 2, 4, 6]
    assert bad(check_label=exact_label, last=2, check_last=numeric_label) == [2, 4, 5, 6]
    assert bad(check_label=exact_label, last=3, check_last=None) == [2, 6]
    assert bad(check_label=None, last=99, check_last=numeric_label) == [2, 6], "more than there are: the caller refuses"
    assert bad(check_label=None, last=5, check_last=numeric_label) == [1, 2, 4, 5, 6]
