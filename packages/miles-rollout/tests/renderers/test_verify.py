from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from renderer_fixtures import ADDED, folder_of, renderer_of, write_tokenizer

from miles_rollout.renderers import load_renderer
from miles_rollout.renderers.verify import (
    Outcome,
    checks,
    random_conversations,
    run,
    standard_conversations,
    verify_renderer,
)
from miles_rollout.renderers.verify.controls import CONTROLS, _Broken

DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_command_proves_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", str(folder_of("qwen3")), "--random", "3"]) == 0
    out = capsys.readouterr().out
    assert "family: qwen3 (" in out
    assert "several calls in one turn" in out
    assert "random 0/2" in out
    assert "FAIL" not in out
    assert "qwen3: append-only (17 conversations)" in out


def test_the_command_fails_on_a_template_that_rewrites_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    special, plain = ADDED["chatml"]
    folder = write_tokenizer(tmp_path, special, plain, eos="<|im_end|>", template=DROPS)
    assert run(["--model", str(folder), "--family", "default", "--random", "2"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "the chat template renders the history differently once messages follow it" in out
    assert "NOT proven append-only" in out


def test_the_command_says_why_it_cannot_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", str(tmp_path)]) == 2
    assert "needs a tokenizer.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        run([])
    assert caught.value.code == 2
    assert "--model is needed" in capsys.readouterr().err


def test_options_reach_the_renderer(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(folder_of("gpt_oss"))
    assert run(["--model", folder, "--thinking", "off", "--random", "0"]) == 2
    assert run(["--model", folder, "--reasoning-effort", "low", "--random", "0"]) == 0
    assert "gpt_oss: append-only" in capsys.readouterr().out


def test_the_list_of_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18
    assert any(line.startswith("inkling ") and "tml-renderers" in line for line in lines)
    assert any(line.startswith("qwen3_next ") and "miles-tito-tokenizers" in line for line in lines)
    assert not any("unproven" in line for line in lines)


@pytest.mark.parametrize("family", ["qwen3", "glm", "gpt_oss", "gemma4", "inkling"])
@pytest.mark.parametrize("name", CONTROLS)
def test_every_broken_renderer_fails(family: str, name: str) -> None:
    version = CONTROLS[name](renderer_of(family))
    assert any(checks.examine(version, c).failed for c in standard_conversations())


def test_a_control_that_is_not_caught_fails_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTROLS, "late", _Broken)
    monkeypatch.setattr(checks, "_differs", lambda *_: True)
    report = verify_renderer(renderer_of("qwen3"), random_count=0)
    assert report.controls["late"] is False
    assert not report.ok
    assert "NOT CAUGHT" in report.table()


def test_a_form_that_a_family_lacks_is_not_a_failure_unless_it_is_basic() -> None:
    report = verify_renderer(renderer_of("minimax_m2"), random_count=0)
    finding = next(f for f in report.findings if f.conversation == "system message in the middle")
    assert finding.outcomes["append-only"] is Outcome.NO_FORM
    assert not finding.failed
    assert "only at the start" in finding.details[0]
    assert report.ok


def test_the_suite_has_what_harnesses_do() -> None:
    conversations = standard_conversations()
    assert all(sum(m.role == "assistant" for m in c.messages) >= 3 for c in conversations)
    assert sum(c.required for c in conversations) == 2
    names = {c.name for c in conversations}
    assert {"system message in the middle", "empty content", "unicode", "user after user"} <= names


def test_random_conversations_repeat_by_seed() -> None:
    assert random_conversations(3, 4) == random_conversations(3, 4)
    assert random_conversations(3, 4) != random_conversations(4, 4)


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from miles_rollout.renderers.verify import run; "
        f"assert run(['--model', {str(folder_of('qwen3'))!r}, '--random', '1']) == 0; "
        "assert not {'torch', 'transformers', 'aiohttp'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_default_family_is_proven_where_its_template_is_good(tmp_path: Path) -> None:
    special, plain = ADDED["chatml"]
    template = DROPS.replace(" and loop.last", "")
    renderer = load_renderer(write_tokenizer(tmp_path, special, plain, eos="<|im_end|>", template=template), "default")
    report = verify_renderer(renderer, random_count=0)
    assert report.ok, report.table()
    calls = next(f for f in report.findings if f.conversation == "one call a turn")
    assert calls.outcomes["views"] is Outcome.NOT_APPLICABLE  # this template writes no calls
    assert "not known" in calls.details[0]
