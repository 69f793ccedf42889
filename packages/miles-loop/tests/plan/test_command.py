"""`miles plan`: answers, layers, rates of a run, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loop_toy.recipe import RECIPE

from miles_contracts import InvalidFieldError
from miles_loop import cli
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.options import build, merge
from miles_loop.plan.command import EXAMPLES, SHORT_NAMES, presets
from miles_loop.plan.config import PlanConfig
from miles_loop.plan.measured import layer_of_run
from miles_loop.plan.simulate import simulate
from miles_loop.run_folder import JsonlWriter, RunFolder

RATES = ["--engine.base_s", "0.01", "--trainer.fixed_s", "2", "--batch", "8", "--group-size", "4", "--steps", "20"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_measured_rates_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *RATES, "--new-tokens", "100", "--depths", "0,async"]) == 0
    out = capsys.readouterr().out
    assert "rollout alone 0.5 s a step, training alone 2 s" in out
    assert ["depth", "0", "fully", "asynchronous"] in [line.split() for line in out.splitlines()]
    assert "seconds a step (mean)                                  3                   2" in out


def test_depths_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *RATES, "--new-tokens", "100", "--delay", "1", "--tail", "1")
    steps = [found["depths"][name]["step_s"] for name in ("depth 0", "depth 1", "fully asynchronous")]
    assert steps == pytest.approx([4.0, 2.0, 2.0])
    assert found["bound_s"] == pytest.approx(2.0)
    assert found["depths"]["depth 0"]["of_bound"] == pytest.approx(0.5)
    assert found == plan(capsys, *RATES, "--new-tokens", "100", "--delay", "1", "--tail", "1")


def test_a_heavier_tail_hurts_the_synchronous_run_most(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*RATES, "--new-tokens", "100", "--delay", "2")
    light, heavy = (plan(capsys, *words, "--tail", tail)["depths"] for tail in ("1", "50"))
    assert light["depth 0"]["step_s"] == pytest.approx(1 + 2 + 2)
    assert heavy["depth 0"]["step_s"] > 1.3 * light["depth 0"]["step_s"]
    assert heavy["fully asynchronous"]["step_s"] < 1.1 * light["fully asynchronous"]["step_s"]


def test_the_published_run_beside_its_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--preset", "glm-5.2-terminal", "--depths", "async", "--steps", "16", "--pipeline.warmup", "4")
    found = plan(capsys, *words)
    assert found["published"]["step_s"] == 263.0
    made = found["depths"]["fully asynchronous"]
    assert found["published"]["error"] == pytest.approx(made["median_step_s"] / 263.0 - 1.0)
    assert any("not published" in text for text in found["assumptions"])
    assert cli.main(["plan", *words]) == 0
    assert "measured:  263 s a step (median; the first 30 steps, fully asynchronous)" in capsys.readouterr().out


def test_groups_may_be_as_old_as_in_a_run() -> None:
    limits = [PlanConfig().pipeline_of(depth, engines=1).max_staleness for depth in (0, 3, "async")]
    assert limits == [1, 4, None]
    free = build(PlanConfig, [{"pipeline": {"max_staleness": "none"}}])
    assert free.pipeline_of(3, engines=1).max_staleness is None


def test_depths_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[pipeline]\ndepths = [0, "often"]\n')
    assert cli.main(["plan", *RATES, "--config", str(file)]) == 2
    assert "pipeline.depths: got [0, 'often']; use whole numbers from 0 and async" in capsys.readouterr().err


def test_a_long_answer_is_announced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_loop.plan.command.LONG", 100)
    plan(capsys, *RATES, "--depths", "0")
    assert cli.main(["plan", *RATES, "--depths", "0"]) == 0
    assert capsys.readouterr().err == "simulating 160 trajectories a depth ...\n"


@pytest.mark.parametrize(("ending", "start"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_formats_of_a_picture(tmp_path: Path, ending: str, start: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    plan(capsys, *RATES, "--depths", "0", "--plot", str(tmp_path / f"plan{ending}"))
    assert (tmp_path / f"plan{ending}").read_bytes().startswith(start)


def test_a_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "plan.toml", tmp_path / "plan.png"
    file.write_text(
        "[engine]\nbase_s = 0.01\n[trainer]\nfixed_s = 2\n[pipeline]\nbatch = 8\ngroup_size = 4\nsteps = 12\n"
    )
    found = plan(capsys, "--config", str(file), "--trainer.fixed_s", "30", "--plot", str(picture))
    assert found["training_alone_s"] == 30.0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_presets_help_and_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--preset", "list"]) == 0
    assert capsys.readouterr().out.split() == presets()
    assert cli.main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{name} " in text for name in SHORT_NAMES)
    assert all(line in text for _, line in EXAMPLES)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "hardware.model: got None; give --model NAME"),
        (("--modle", "x"), "did you mean 'model'"),
        (("fast",), "argument: got 'fast'"),
        (("--preset", "glm-5.2"), "did you mean 'glm-5.2-terminal'"),
        (("--from", "nowhere"), "no run there"),
        (("--config", "nowhere.toml"), "cannot be read"),
        ((*RATES, "--tail", "0.5"), "workload.tail: got '0.5'"),
        ((*RATES, "--group-size=3"), "given twice"),
        (("--engine.base_s", "1", "--batch", "8", "--group-size", "3"), "a batch of 8 is no whole number"),
        ((*RATES, "--depths", "abc"), "miles: --depths: got 'abc'; use whole numbers from 0 and async\n"),
        ((*RATES, "--depths", "0,-1"), "miles: --depths: got '-1'; use whole numbers from 0 and async\n"),
        (("--engine.base_s", "1", "--batch", "1000000"), "pipeline.batch: got '1000000'; 60 steps of 1000000 are"),
        ((*RATES[:-1], "1000000"), "pipeline.steps: got '1000000'"),
        ((*RATES, "--in-flight", "1000001"), "pipeline.in_flight: got '1000001'; at most 1,000,000"),
        ((*RATES, "--plot", "plan.xyz"), "--plot: got 'plan.xyz'; use a name that ends in .png, .pdf, .svg"),
        (("--engine.base_s", "1"), "trainer.fixed_s: got None"),
        ((*RATES, "--in-flight", "2"), "pipeline.in_flight: got '2'; one group needs 4"),
        ((*RATES, "--pipeline.warmup", "20"), "pipeline.warmup: got 20; leave it below pipeline.steps (20)"),
        ((*RATES, "--workload.failure_rate", "0.99"), "lower failure_rate"),
        ((*RATES, "--plot", "/nowhere/plan.png"), "--plot"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    assert cli.main(["plan", *words]) == 2
    assert says in capsys.readouterr().err


def made_run(folder: Path, question: PlanConfig, depth: int) -> float:
    """A run folder whose records are those of a simulated run; its mean step in seconds."""
    rates, engines = question.engine_rates(None)
    pipeline = question.pipeline_of(depth, engines)
    made = simulate(pipeline, question.workload_model(), rates, question.trainer_rates(None))
    size = {"groups_per_step": pipeline.batch_groups, "group_size": pipeline.group_size}
    words = ["--pipeline-depth", str(depth), "--sync.mode", "in_place"]
    words += [word for name, value in size.items() for word in (f"--rollout.{name}", str(value))]
    run = RunFolder(folder)
    run.create(config_for(RECIPE, parse(words, TRAIN_FLAGS)))
    writer = JsonlWriter(run.metrics_file)
    for step, record in enumerate(made.records, 1):
        writer.write(
            {
                "step": step,
                "time": 0.0,
                "perf/step_s": record.step_s,
                "perf/collect_wait_s": record.wait_s,
                "perf/train_s": record.train_s,
                "perf/update_weights_s": 0.05,
                "perf/update_weights_paused_s": 0.03,
                "perf/rollout_generation_s": record.generation_s,
                "rollout/trajectories": float(question.pipeline.batch),
                "rollout/groups": float(pipeline.batch_groups),
                "rollout/prompt_length/mean": question.workload.prompt_tokens,
                "rollout/response_length/mean": question.workload.new_tokens,
                "rollout/response_length/min": question.workload.new_tokens,
                "rollout/response_length/max": question.workload.new_tokens,
                "rollout/turns/mean": 1.0,
            }
        )
    writer.close()
    run.unlock()
    return made.step_s


@pytest.mark.parametrize("depth", [0, 1])
def test_rates_of_a_run_predict_the_run(tmp_path: Path, depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"engine": {"base_s": 0.004, "per_sequence_s": 0.0005}}
    trainer = {"trainer": {"fixed_s": 0.2, "prepare_s": 0.02, "pause_s": 0.03, "overhead_s": 0.01}}
    shape = {"pipeline": {"batch": 16, "group_size": 4, "steps": 40}, "workload": {"prompt_tokens": 20}}
    question = build(PlanConfig, [merge(rates, trainer, shape, {"workload": {"new_tokens": 30}})])
    truth = made_run(tmp_path / "run", question, depth)
    layer = layer_of_run(tmp_path / "run")
    assert layer["trainer"]["fixed_s"] == pytest.approx(0.2)
    assert layer["trainer"]["overhead_s"] == pytest.approx(0.01)
    assert layer["trainer"]["measured_ranks"] == layer["pipeline"]["rollout_workers"] == 1
    found = plan(capsys, "--from", str(tmp_path / "run"))
    assert found["published"]["step_s"] == pytest.approx(truth, rel=0.02)
    assert found["depths"][f"depth {depth}"]["step_s"] == pytest.approx(truth, rel=0.03)


def test_trainer_ranks_share_the_time_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--engine.base_s", "0.001", "--trainer.fixed_s", "0.5", "--batch", "8", "--group-size", "4")
    rates += ("--workload.new_tokens", "10", "--workload.prompt_tokens", "10", "--steps", "10", "--depths", "0")
    asked = (*rates, "--trainer.per_token_s", "0.01")
    one = plan(capsys, *asked)
    four = plan(capsys, *asked, "--trainer-ranks", "4")
    assert one["training_alone_s"] == pytest.approx(0.5 + 160 * 0.01)
    assert four["training_alone_s"] == pytest.approx(0.5 + 160 * 0.01 / 4)
    assert any(
        "4 trainer rank(s) instead of 1: a token of the batch takes 0.25 times" in a for a in four["assumptions"]
    )
    half = plan(capsys, *asked, "--trainer-ranks", "4", "--trainer.measured_ranks", "8")
    assert half["training_alone_s"] == pytest.approx(0.5 + 160 * 0.01 * 2)
    assert cli.main(["plan", *rates, "--trainer-ranks", "2"]) == 2
    assert "trainer.ranks: got 2; they share the time for a token" in capsys.readouterr().err


def test_rollout_workers_share_the_turns_and_the_answer_says_how_they_count(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--engine.base_s", "0.0001", "--trainer.fixed_s", "0.01", "--batch", "16", "--group-size", "4")
    rates += ("--workload.new_tokens", "2", "--steps", "10", "--depths", "0")
    free = plan(capsys, *rates, "--rollout-workers", "4")
    assert "processes that make trajectories take no time (pipeline.handling_s), however many they are" in str(free)
    one = plan(capsys, *rates, "--pipeline.handling_s", "0.1")
    four = plan(capsys, *rates, "--pipeline.handling_s", "0.1", "--rollout-workers", "4")
    assert any("4 process(es) make trajectories, 0.1 s for each turn" in a for a in four["assumptions"])
    assert one["rollout_alone_s"] > 3 * four["rollout_alone_s"]


def test_a_run_of_a_few_steps_says_too_little(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create(config_for(RECIPE, parse([], TRAIN_FLAGS)))
    run.unlock()
    with pytest.raises(InvalidFieldError, match="0 usable steps of 0, and at least 8 are needed; the first fifth"):
        layer_of_run(tmp_path / "run")
