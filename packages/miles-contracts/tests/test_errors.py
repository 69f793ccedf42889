from __future__ import annotations

from miles_contracts import DeadlineExceededError, EngineError, InvalidFieldError, Message, WeightUpdateError
from miles_contracts.messages import FunctionCall, ToolCall


def test_messages_name_field_value_and_remedy() -> None:
    error = InvalidFieldError("trainer.lr", "x" * 5000, "use a number")
    assert str(error).startswith("trainer.lr: got 'xxx")
    assert str(error).endswith("; use a number")
    assert len(str(error)) < 450
    path = str(InvalidFieldError("task.path", "/home/" + "deep/" * 100 + "prompts.jsonl", "no such file"))
    assert path.startswith("task.path: got '/home/deep")
    assert path.endswith("deep/prompts.jsonl'; no such file")
    assert str(EngineError("http://e", "refused", 503)) == "engine http://e: refused (HTTP 503)"
    assert "waited 3 s for the trainer" in str(DeadlineExceededError("the trainer", 3.0, "raise --x"))
    text = str(WeightUpdateError("digest differs", engine="http://e", tensor="lm_head.weight"))
    assert "http://e" in text
    assert "lm_head.weight" in text
    assert "previous version keeps serving" in text


def test_message_to_openai_form() -> None:
    call = ToolCall(id="c1", function=FunctionCall(name="f", arguments='{"x": 1}'))
    full = Message(role="assistant", content=None, reasoning_content="r", tool_calls=(call,)).to_dict()
    assert full == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    assert Message(role="tool", content="3", tool_call_id="c1", name="f").to_dict() == {
        "role": "tool",
        "content": "3",
        "tool_call_id": "c1",
        "name": "f",
    }
