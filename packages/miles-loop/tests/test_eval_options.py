"""`eval` knows the options that a measurement uses, and no others; another command's are said to be that one's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from loop_toy.harness import Command, alive, children, wait_for
from loop_toy.recipe import RECIPE, main

from miles_contracts import InvalidFieldError
from miles_loop.arguments import Parsed, config_for, parse
from miles_loop.command import EVAL_FLAGS, TRAIN_FLAGS
from miles_loop.config import RunConfig
from miles_loop.eval_options import eval_config, uses
from miles_loop.machine import TORCH_MIB, check_room
from miles_loop.options import options
from miles_loop.run_folder import RunFolder


def option_names(text: str) -> set[str]:
    return set(re.findall(r"^  (--\S+)", text, flags=re.MULTILINE))


def test_help_lists_what_is_used_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--help"]) == 0
    shown = capsys.readouterr().out
    names = option_names(shown)
    assert {"--run", "--json", "--config", "--model", "--task", "--evaluation.samples", "--engine.replicas"} <= names
    for foreign in (
        *("--steps", "--run-dir", "--pipeline-depth", "--checkpoint-every", "--trainer.ranks", "--plain", "--resume"),
        *("--trainer.optimizer.lr", "--evaluation.every", "--rollout.group_size", "--sync.transport", "--record.plot"),
        "--runtime.ray.trainer_cpus",
    ):
        assert foreign not in names
    assert "optimizer" not in shown
    assert main(["train", "--help"]) == 0
    everything = option_names(capsys.readouterr().out)
    assert {f"--{o.path}" for o in options(RunConfig) if o.path != "recipe"} <= everything


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval", "--steps", "5"], "--steps: got '5'; it is about training, and has no influence here; leave it out"),
        (["eval", "--trainer.optimizer.lr=1"], "--trainer.optimizer.lr: got '1'; it is about training"),
        (["eval", "--checkpoint_every", "2"], "--checkpoint_every: got '2'; it is about training"),
        (["eval", "--plain"], "--plain: got None; it is an option of train, not of eval; see miles-toy eval --help"),
        (["eval", "--resume", "runs/x"], "--resume: got 'runs/x'; it is an option of train, not of eval"),
        (["eval", "--step", "3"], "--step: got '3'; it is an option of export, not of eval"),
        (["eval", "--rn", "runs/x"], "--rn: got 'rn'; did you mean 'run'? no option has this name"),
        (["eval", "--evaluation.sample", "4"], "did you mean 'evaluation.samples'?"),
        (["train", "--step", "3"], "--step: got '3'; did you mean 'steps'? it is an option of export, not of train"),
        (["train", "--json"], "--json: got None; it is an option of eval, not of train"),
        (["train", "--run", "runs/x"], "--run: got 'runs/x'; it is an option of eval, not of train"),
        (["export", "--steps", "3"], "--steps: got '3'; did you mean 'step'? it is about training"),
        (["export", "--plain"], "--plain: got None; it is an option of train, not of export"),
        (["export", "--stpe", "3"], "did you mean 'step'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_of_another_command_is_named_as_such(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_suggestions_are_options_of_the_command() -> None:
    offered = {o.path for o in options(RunConfig) if uses(o.path)} | {flag.name for flag in EVAL_FLAGS}
    offered |= {"task", "runtime", "address", "rollout.workers", "rollout.engine", "rollout.engines"}
    for word in ("plian", "resum", "stesp", "trainer.optimizer.lrr", "record.plto", "evaluation.evry", "sync.mod"):
        with pytest.raises(InvalidFieldError) as caught:
            parse([f"--{word}", "1"], EVAL_FLAGS, uses)
        found = re.search(r"did you mean '([^']+)'", str(caught.value))
        assert found is None or found[1] in offered


def test_a_file_may_hold_the_whole_configuration_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 5\n[evaluation]\nsamples = 3\n")
    assert eval_config(RECIPE, parse(["--config", str(file)], EVAL_FLAGS, uses)).evaluation.samples == 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint, as far as a command line looks at it."""
    folder = RunFolder(tmp_path / "run")
    words = ["--task.eval_size", "3", "--task.reward", "exact", "--task.system_prompt", "be brief"]
    folder.create(config_for(RECIPE, parse([*words, "--steps", "7"], TRAIN_FLAGS)))
    (folder.checkpoints / "step_000007" / "hf").mkdir(parents=True)
    (folder.checkpoints / "step_000007" / "checkpoint.json").write_text("{}")
    folder.unlock()
    return folder.path


def measured(run: Path, *words: str) -> RunConfig:
    return eval_config(RECIPE, parse(["--run", str(run), *words], EVAL_FLAGS, uses))


def test_a_run_is_measured_on_its_own_task_or_wholly_on_another(run: Path, tmp_path: Path) -> None:
    own = measured(run, "--evaluation.samples", "2")
    assert (own.task.name, own.task.eval_size, own.task.reward, own.evaluation.samples) == ("vowels", 3, "exact", 2)
    assert own.model.endswith("step_000007/hf")
    assert measured(run, "--task.eval_size", "2").task.system_prompt == "be brief"
    assert measured(run, "--task", "vowels").task.eval_size == 3, "the run's own task by its name"
    other = measured(run, "--task", "sums").task
    assert (other.name, other.source, other.path, other.system_prompt) == ("sums", "reasoning_gym", None, None)
    mine = measured(run, "--task", "mine.jsonl", "--task.eval_size", "1").task
    assert (mine.name, str(mine.path), mine.reward, mine.eval_size) == ("mine", "mine.jsonl", "exact", 1)
    file = tmp_path / "task.toml"
    file.write_text('[task]\npreset = "sums"\n')
    assert measured(run, "--config", str(file)).task.name == "sums"


@pytest.mark.parametrize(("name", "value"), [("model", "tiny"), ("hardware", "h100")])
def test_what_a_run_says_itself_cannot_be_said_again(run: Path, name: str, value: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"{name}: got '{value}'; --run says it already"):
        measured(run, f"--{name}", value)


def test_a_run_of_another_recipe(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('recipe = "toy"', 'recipe = "other"'))
    with pytest.raises(InvalidFieldError, match="--run: got .*it is a run of miles-other"):
        measured(run)


def test_a_measurement_needs_no_room_for_a_trainer() -> None:
    config = config_for(RECIPE, Parsed({"runtime": {"trainer_ranks": 8, "share_imports": False}}, {}, ()))
    with pytest.raises(InvalidFieldError, match="runtime.trainer_ranks"):
        check_room(config, 4 * TORCH_MIB)
    check_room(config, 4 * TORCH_MIB, training=False)


def test_every_option_that_a_measurement_reads_is_offered(tmp_path: Path) -> None:
    command = Command("loop_toy.traced", tmp_path)
    try:
        read = json.loads(command.run("eval", "--json", "--task.eval_size", 2).splitlines()[-1])
    finally:
        command.close()
    assert {"task.eval_size", "engine.replicas", "evaluation.samples", "evaluation.sampling.temperature"} <= set(read)
    # Told to the parts that training shares with it, and of no influence without a trainer.
    assert {path for path in read if not uses(path)} <= {
        *("pipeline_depth", "runtime.trainer_ranks", "runtime.trainer_threads", "runtime.step_timeout_s"),
        *("sync.deadline_s", "sync.mode", "sync.transport", "sync.canary", "sync.verify", "trainer.replay.enabled"),
    }


def test_a_measurement_that_is_told_to_end_leaves_nothing_behind(fast: Command, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = fast.start("eval", "--evaluation.samples", 4096, TMPDIR=str(scratch))
    wait_for(lambda: list(scratch.glob("miles-eval-*/logs/engine-0.log")))
    started = children(process.pid)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert list(scratch.glob("miles-eval-*")) == []
    wait_for(lambda: not any(alive(pid) for pid in started))
