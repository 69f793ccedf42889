"""Bad input is refused before anything runs, naming field, value and remedy."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from loop_toy.model import build
from loop_toy.recipe import RECIPE, main

from miles_contracts import InvalidFieldError
from miles_loop.arguments import config_for, parse
from miles_loop.assembly import Assembly
from miles_loop.command import TRAIN_FLAGS
from miles_loop.compose import make_rollout, make_tasks
from miles_rollout.tasks import TaskFileError

DEDICATED = ("--evaluation.mode", "dedicated")
AT_ONCE = {
    "misspelt option": (("--trainer.optimizer.rl", "1"), "did you mean 'trainer.optimizer.lr'?"),
    "misspelt short option": (("--step", "3"), "did you mean 'steps'?"),
    "misspelt task": (("--task", "vowel"), "did you mean 'vowels'?"),
    "misspelt target": (("--hardware", "h10"), "did you mean 'h100'?"),
    "value of another type": (("--steps", "many"), "steps: got 'many'"),
    "greedy answers of a group": (
        ("--rollout.filter", "no_signal", "--rollout.sampling.temperature", "0"),
        "rollout.sampling.temperature: got '0'; greedy answers to one prompt are all equal",
    ),
    "value out of range": (("--rollout.sampling.top_p", "2"), "rollout.sampling.top_p: got '2'"),
    "missing configuration": (("--config", "nowhere.toml"), "--config: got 'nowhere.toml'; cannot be read"),
    "target that needs more": (("--hardware", "h100"), "this target needs a GPU"),
    "task without a source": (("--task.source", "reasoning_gym"), "task.dataset: got None"),
    "word": (("steps",), "argument: got 'steps'"),
    "run that is not there": (("--resume", "nowhere"), "no run there"),
    "missing prompts": (("--task", "nowhere.jsonl"), "task.path: got 'nowhere.jsonl'; cannot be read"),
    "misspelt reward": (("--task.reward", "exactt"), "task.reward: got 'exactt'; did you mean 'exact'?"),
    "misspelt reward of evaluation": (("--task.eval_reward", "numberic"), "did you mean 'numeric'?"),
    "no shared memory": (("--sync.directory", "/nowhere"), "sync.directory: got '/nowhere'; weights travel through"),
    "top_k of nothing": (("--rollout.sampling.top_k", "0"), "use -1 (off) or a value of 1 or more"),
    "top_k below": (("--evaluation.sampling.top_k=-5",), "evaluation.sampling.top_k: got '-5'; use -1 (off)"),
    "a stop that is nothing": (('--rollout.sampling.stop=["a", ""]',), "an empty string would end every answer"),
    "more engines than ports": (("--engine.replicas", "99999"), "engine.replicas: got '99999'; a machine has ports"),
    "an option twice": (("--steps", "3", "--steps", "4"), "--steps: got '4'; given twice; keep one"),
    "an endless batch": (("--engine.max_batch", "1000000000"), "engine.max_batch: got '1000000000'; input should be"),
    "threads by the thousand": (("--engine.threads", "99999"), "engine.threads: got 99999; this machine has"),
    "answers by the million": (("--rollout.groups_per_step", "90000000"), "rollout.groups_per_step: got 90000000;"),
    "missing held-out prompts": (("--task.eval_path", "no.jsonl"), "task.eval_path: got 'no.jsonl'; cannot be read"),
    "folder of prompts": (("--task.path", "."), "task.path: got '.'; cannot be read: Is a directory"),
    "missing model": (("--model", "no/model"), "model: got 'no/model'"),
    "port that does not exist": (("--engine.port", "70000"), "engine.port: got '70000'"),
    "last port for two": (("--engine.port", "65535", "--engine.replicas", "2"), "engine.port: got '65535'"),
    "unknown data type": (("--engine.dtype", "float31"), "engine.dtype: got 'float31'"),
    "group of one": (("--rollout.group_size", "1", "--rollout.filter", "none"), "grpo compares the answers of a group"),
    "more ranks than answers": (("--trainer.ranks", "100000"), "runtime.trainer_ranks: got 100000; a batch has"),
    "more workers than memory": (("--rollout.workers", "1000000"), "runtime.rollout_workers: got 1000000; each takes"),
    "reward that is not there": (
        ("--task.reward", "no_such_module:score"),
        "task.reward: got 'no_such_module:score'; there is no module no_such_module",
    ),
    "unknown task": (("--task", "nosuch"), "use one of vowels, sums, or FILE.jsonl, or reasoning_gym:NAME"),
    "missing evaluation program": (
        ("--evaluation.mode", "external", "--evaluation.command", "no-such-program,{checkpoint}"),
        "evaluation.command: got 'no-such-program'; there is no such program here",
    ),
    "evaluation engines without their mode": (
        ("--evaluation.urls", "http://a:1"),
        "they are only used by mode dedicated",
    ),
    "evaluation engine at no address": (
        (*DEDICATED, "--evaluation.urls", "a:30000"),
        "evaluation.urls: got 'a:30000'; give the URL of an engine, like http://127.0.0.1:30000",
    ),
    "evaluation engine at no port": (
        (*DEDICATED, "--evaluation.urls", "http://a:b"),
        "evaluation.urls: got 'http://a:b'",
    ),
    "evaluation engine named twice": ((*DEDICATED, "--evaluation.urls", "http://a:1,http://a:1/"), "named twice"),
    "evaluation engine that trains": (
        (*DEDICATED, "--evaluation.urls", "http://a:1,http://b:1/", "--engine.urls", "http://b:1"),
        "evaluation.urls: got 'http://b:1/'; engine.urls names it too",
    ),
    "evaluation engines without tasks": (
        (*DEDICATED, "--task.eval_size", "0"),
        "task.eval_size: got 0; nothing is held out for evaluation.mode dedicated",
    ),
    "evaluation engines that are not installed": (
        (*DEDICATED, "--engine.kind", "sglang", "--engine.urls", "http://a:1", "--engine.python", "/no/python"),
        "engine.python: got '/no/python'; cannot be run",
    ),
    "engine at no address": (("--engine.urls", "http://"), "engine.urls: got 'http://'"),
    "address of another machine": (("--engine.host", "192.0.2.1"), "engine.host: got '192.0.2.1:0'"),
    "missing prompts, shown only": (("--task", "nowhere.jsonl", "--dry-run"), "cannot be read"),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_a_command_line_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options, expected = AT_ONCE[case]
    assert main(["train", *options]) == 2
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_refused_before_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for command in (["train"], ["eval"]):
            assert main([*command, "--engine.port", str(port)]) == 2
            assert f"engine.port: got '127.0.0.1:{port}'; cannot be listened on" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


MEASURED = {
    "nothing held out": (("--task.eval_size", "0"), "task.eval_size: got 0; nothing is held out"),
    "missing held-out prompts": (("--task.eval_path", "no.jsonl"), "task.eval_path: got 'no.jsonl'; cannot be read"),
    "missing model": (("--model", "no/model"), "model: got 'no/model'"),
    "engine at no address": (("--engine.urls", "a"), "engine.urls: got 'a'"),
    "engine that is not installed": (
        ("--engine.kind", "sglang", "--engine.python", "/no/python"),
        "engine.python: got '/no/python'; cannot be run",
    ),
}


@pytest.mark.parametrize("case", MEASURED)
def test_a_measurement_is_refused_before_anything_starts(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def started(*_: object) -> None:
        raise AssertionError("it was started")

    monkeypatch.setattr("miles_loop.evaluation_session.evaluate_model", started)
    options, expected = MEASURED[case]
    assert main(["eval", *options]) == 2
    assert expected in capsys.readouterr().err


def test_a_program_on_the_path_or_in_the_snapshot_may_measure(capsys: pytest.CaptureFixture[str]) -> None:
    for program in ("sh", "{checkpoint}/measure"):
        command = f"{program},{{checkpoint}}"
        assert main(["train", "--dry-run", "--evaluation.mode", "external", "--evaluation.command", command]) == 0
        assert 'mode = "external"' in capsys.readouterr().out


def test_without_reasoning_gym_its_families_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    assert main(["train", "--task", "sums", "--dry-run"]) == 2
    assert "task.source: got 'reasoning_gym'; reasoning-gym tasks need the extra" in capsys.readouterr().err


def test_a_group_of_one_is_fine_without_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--rollout.group_size", "1", "--rollout.filter", "none", "--trainer.advantage.estimator", "reinforce_pp")
    assert main(["train", "--dry-run", *options]) == 0
    assert "group_size = 1" in capsys.readouterr().out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    folder = tmp_path_factory.mktemp("model")
    build(folder, 0)
    return folder


def assemble(model: Path, *options: str) -> Assembly:
    """What a run does before its first step."""
    return Assembly(RECIPE, config_for(RECIPE, parse(options, TRAIN_FLAGS)), model, 256)


BY_ASSEMBLY = {
    "unknown reward": (("--task.reward", "exakt"), "did you mean 'exact'?"),
    "missing reward": (("--task.reward", "nowhere:reward"), "there is no module nowhere"),
    "missing agent": (("--task.agent", "loop_toy.agent:nobody"), "has no nobody"),
    "missing prompts": (("--task", "nowhere.jsonl"), "cannot be read"),
    "prompt longer than the engine's limit": (("--engine.max_context", "8"), "alone has"),
    "prompt longer than its own limit": (("--rollout.max_prompt_tokens", "9"), "a prompt has"),
    "everything held out": (("--task.eval_size", "24"), "hold out fewer"),
}


@pytest.mark.parametrize("case", BY_ASSEMBLY)
def test_an_assembly_is_refused(case: str, model: Path) -> None:
    options, expected = BY_ASSEMBLY[case]
    with pytest.raises(InvalidFieldError) as caught:
        assemble(model, *options)
    assert expected in str(caught.value)


def test_a_good_one_is_not(model: Path) -> None:
    assemble(model)
    assemble(model, "--task.reward", "exact", "--engine.max_context", "100")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--rollout.group_size", "1", "--rollout.filter", "no_signal"), "a group of one has no reward variance"),
        (("--rollout.buffer_groups", "1"), "a batch has 2 groups"),
        (("--rollout.filter", "no_signl"), "did you mean 'no_signal'"),
        (("--rollout.filter", "loop_toy.scores:nothing"), "has no nothing"),
        (("--rollout.max_in_flight", "3"), "one group alone has 4 answers"),
    ],
)
def test_groups_that_cannot_work_are_refused(options: tuple[str, ...], expected: str) -> None:
    config = config_for(RECIPE, parse(options, TRAIN_FLAGS))
    tasks = make_tasks(config.task, config.seed)

    async def generate(*_: object) -> list[object]:
        return []

    with pytest.raises(InvalidFieldError, match=expected):
        make_rollout(config, tasks.train, generate, 10)  # type: ignore[arg-type]


def test_broken_lines_are_all_named(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": \n{"question": "b"}\n')
    with pytest.raises(TaskFileError) as caught:
        assemble(model, "--task", str(prompts))
    assert "line 2: not JSON" in str(caught.value)
    assert "line 3: no field 'prompt'" in str(caught.value)


def test_labels_are_checked_as_each_reward_needs(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b", "label": "x"}\n{"prompt": "c"}\n')

    def lines(*options: str) -> list[int]:
        with pytest.raises(TaskFileError) as caught:
            assemble(model, "--task", str(prompts), *options)
        assert "(task reward 'exact' compares answers with it)" in str(caught.value)
        return [number for number, _ in caught.value.problems]

    assert lines("--task.reward", "exact", "--task.eval_size", "1") == [1, 3]
    own = ("--task.reward", "loop_toy.recipe:vowels")
    assert lines(*own, "--task.eval_reward", "exact", "--task.eval_size", "1") == [3]
    assert lines(*own, "--task.eval_reward", "exact", "--task.eval_path", str(prompts)) == [1, 3]
    assemble(model, "--task", str(prompts), *own, "--task.eval_size", "1")


def test_labels_for_training_and_for_evaluation_are_reported_together(model: Path, tmp_path: Path) -> None:
    prompts, held_out = tmp_path / "prompts.jsonl", tmp_path / "held_out.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b", "label": "4"}\n{"prompt": "c", "label": "x"}\n')
    held_out.write_text('{"prompt": "d"}\n')
    rewards = ("--task", str(prompts), "--task.reward", "exact", "--task.eval_reward", "numeric")
    with pytest.raises(TaskFileError) as caught:
        assemble(model, *rewards, "--task.eval_size", "1")
    assert [number for number, _ in caught.value.problems] == [1, 3]
    assert "line 1: it has no label (task reward 'exact'" in str(caught.value)
    assert "line 3: there is no number in the label 'x' (task reward 'numeric'" in str(caught.value)
    with pytest.raises(TaskFileError) as caught:
        assemble(model, *rewards, "--task.eval_path", str(held_out))
    assert f"{prompts}: 1 bad line(s)" in str(caught.value)
    assert f"{held_out}: 1 bad line(s)" in str(caught.value)
    assert [error.path for error in caught.value.others] == [held_out]


def test_a_split_trains_on_what_it_does_not_hold_out() -> None:
    tasks = make_tasks(config_for(RECIPE, parse(["--task.eval_size", "5"], TRAIN_FLAGS)).task, seed=1)
    assert tasks.held_out is not None
    trained = {tasks.train.at(i).messages[-1].content for i in range(tasks.train.size)}
    held_out = [tasks.held_out.at(i).messages[-1].content for i in range(tasks.held_out.size)]
    assert held_out == [f"Write {i} letters." for i in range(19, 24)]
    assert len(trained) == 19
    assert not trained & set(held_out)


def test_a_file_of_its_own_may_be_held_out(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    config = config_for(RECIPE, parse(["--task.eval_path", str(held_out), "--task.eval_size", "1"], TRAIN_FLAGS))
    tasks = make_tasks(config.task, 0)
    assert tasks.held_out is not None
    assert (tasks.train.size, tasks.held_out.size) == (24, 1)
    nothing = config_for(RECIPE, parse(["--task.eval_size", "0"], TRAIN_FLAGS))
    assert make_tasks(nothing.task, 0).held_out is None
