"""An agent's episode becomes trajectories; how it ended is a status, never a reward of zero."""

from __future__ import annotations

import asyncio
import importlib

import pytest
from session_factories import WEATHER, ScriptedEngine, user

from miles_contracts import AgentResult, InvalidFieldError, SamplingParams, Status, Task, Trajectory
from miles_rollout.session import AgentGenerate, Policy, SessionConfig, SessionServer, agent_generate, audit

openai = pytest.importorskip("openai")
TASK = Task(prompt_index=4, messages=(user("Weather in Oslo?"),), label="rain", metadata={"k": 1})
SAMPLING = SamplingParams(max_new_tokens=200, temperature=0.9)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


async def asks_twice(base_url, task, params, metadata) -> AgentResult:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=metadata["api_key"], max_retries=0) as client:
        messages = [m.to_dict() for m in task.messages]
        for _ in range(4):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[WEATHER], temperature=0.0
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            messages.append({"role": "tool", "content": "rain", "tool_call_id": message.tool_calls[0].id})
    return AgentResult(reward=1.0, metrics={"tool_calls": 1.0}, metadata={"answer": message.content})


async def run(renderer, agent, replies=(), **options) -> tuple[tuple[Trajectory, ...], AgentGenerate, SessionServer]:
    engine = ScriptedEngine(renderer, replies)
    async with SessionServer(engine, renderer, SessionConfig(), token="t") as server:
        generate = agent_generate(agent, server, sampling=SAMPLING, run_seed=3, **options)
        found = tuple(await generate(TASK, member=1, attempt=2))
        assert server.service.num_sessions == 0
    return found, generate, server


async def test_an_episode(renderer) -> None:
    (trajectory,), generate, _server = await run(renderer, asks_twice, [CALL, "It rains."])
    identity = trajectory.identity
    assert (identity.prompt_index, identity.member, identity.attempt, identity.leaf) == (4, 1, 2, 0)
    assert trajectory.status is Status.FINISHED
    assert trajectory.reward == 1.0
    assert trajectory.metrics["tool_calls"] == 1.0
    assert trajectory.metrics["turns"] == 2.0
    assert trajectory.metrics["episode_seconds"] > 0
    assert trajectory.metadata["answer"] == "It rains."
    assert [m["role"] for m in trajectory.metadata["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.sampling.temperature == 0.9
    assert generate.report.tokens_audited == trajectory.num_trained
    metrics = generate.report.to_metrics()
    assert metrics["mismatches"] == 0
    assert metrics["session/sampling_overrides"] == 2
    assert metrics["session/abandoned_turns"] == 0
    assert audit([trajectory]).mismatches == 0


async def test_an_exception_is_a_failure_and_keeps_what_was_sampled(renderer) -> None:
    async def breaks(base_url, task, params, metadata) -> AgentResult:
        await asks_twice(base_url, task, params, metadata)
        raise KeyError("tool")

    (trajectory,), _, _ = await run(renderer, breaks, [CALL, "It rains."])
    assert trajectory.status is Status.FAILED
    assert trajectory.reward is None
    assert trajectory.error.startswith("the agent failed: KeyError: 'tool' (")
    assert trajectory.num_sampled > 0


async def test_where_an_agent_raised_is_in_the_status_and_logged_once(renderer, tmp_path, monkeypatch, caplog) -> None:
    file = tmp_path / "raising_agent.py"
    file.write_text(
        "import json\n\nasync def play(base_url, task, params, metadata):\n    return parse(task.label)\n\n"
        "def parse(text):\n    return json.loads(text)\n\n"
        "def reward(task, response):\n    return 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("raising_agent")
    for _ in range(3):
        (trajectory,), _, _ = await run(renderer, module.play)
        assert trajectory.status is Status.FAILED
        assert trajectory.error.startswith("the agent failed: JSONDecodeError: Expecting value")
        assert trajectory.error.endswith(f"({file}:7)"), "the line of the user's file, not of json's"

    async def silent(base_url, task, params, metadata) -> AgentResult:
        await asks_twice(base_url, task, params, metadata)
        return AgentResult()

    for _ in range(2):
        (trajectory,), _, _ = await run(renderer, silent, ["It rains."], reward=module.reward)
        assert trajectory.error == f"the reward failed: ZeroDivisionError: division by zero ({file}:10)"
    told = [r.getMessage() for r in caplog.records if str(file) in r.getMessage()]
    assert told == [f"the agent raised at {file}:7 (logged once)", f"the reward raised at {file}:10 (logged once)"]
    assert f'File "{file}", line 7, in parse' in caplog.text


async def test_a_timeout_is_an_abort_whether_or_not_there_was_a_turn(renderer) -> None:
    for replies in (["It rains."], []):

        async def sleeps(base_url, task, params, metadata, asks=bool(replies)) -> AgentResult:
            if asks:
                await asks_twice(base_url, task, params, metadata)
            await asyncio.sleep(60)
            return AgentResult(reward=0.0)

        (trajectory,), _, _ = await run(renderer, sleeps, replies, timeout_s=0.5)
        assert trajectory.status is Status.ABORTED
        assert trajectory.reward is None
        assert trajectory.error == "the episode took longer than 0.5 s"


async def test_a_timeout_inside_the_agent_is_a_failure(renderer) -> None:
    async def gives_up(base_url, task, params, metadata) -> AgentResult:
        raise TimeoutError("environment")

    (trajectory,), _, _ = await run(renderer, gives_up)
    assert trajectory.status is Status.FAILED
    assert trajectory.num_tokens == 0
    assert trajectory.error.startswith("the agent failed: TimeoutError: environment (")


async def test_an_agent_that_never_asks_leaves_one_empty_failure(renderer) -> None:
    async def idles(base_url, task, params, metadata) -> AgentResult:
        return AgentResult(reward=1.0)

    (trajectory,), _, _ = await run(renderer, idles)
    assert trajectory.status is Status.FAILED
    assert trajectory.reward is None
    assert trajectory.error == "the agent ended without a single turn"


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (AgentResult(reward=float("nan")), "reward is nan"),
        (AgentResult(reward=1.0, metrics={"x": float("inf")}), "metric 'x'"),
        (None, "returned NoneType"),
    ],
)
async def test_nonsense_from_an_agent_is_a_failure(renderer, result, says) -> None:
    async def agent(base_url, task, params, metadata):
        await asks_twice(base_url, task, params, metadata)
        return result

    (trajectory,), _, _ = await run(renderer, agent)
    assert trajectory.status is Status.FAILED
    assert says in trajectory.error


async def test_a_reward_scores_the_last_reply(renderer) -> None:
    async def agent(base_url, task, params, metadata) -> AgentResult:
        await asks_twice(base_url, task, params, metadata)
        return AgentResult()

    async def exact(task, response) -> float:
        return 1.0 if task.label in response else 0.25

    (trajectory,), _, _ = await run(renderer, agent, [CALL, "rain it is"], reward=exact)
    assert trajectory.reward == 1.0
    (trajectory,), _, _ = await run(renderer, agent, [CALL, "sun"], reward=lambda task, response: 0.25)
    assert trajectory.reward == 0.25

    def broken(task, response) -> float:
        raise ZeroDivisionError

    (trajectory,), _, _ = await run(renderer, agent, [CALL, "sun"], reward=broken)
    assert trajectory.status is Status.FAILED
    assert trajectory.reward is None
    (trajectory,), _, _ = await run(renderer, agent, [CALL, "sun"], reward=lambda task, response: float("inf"))
    assert trajectory.status is Status.FAILED


async def test_truncation_keeps_its_status_and_reward(renderer) -> None:
    async def agent(base_url, task, params, metadata) -> AgentResult:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=metadata["api_key"]) as client:
            await client.chat.completions.create(
                model="policy", messages=[m.to_dict() for m in task.messages], max_tokens=3
            )
        return AgentResult(reward=0.5)

    (trajectory,), _, _ = await run(renderer, agent, ["much too long"])
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.reward == 0.5


async def test_members_and_attempts_draw_different_seeds(renderer) -> None:
    engine = ScriptedEngine(renderer)
    async with SessionServer(engine, renderer) as server:
        generate = agent_generate(asks_twice, server, sampling=SAMPLING, policy=Policy.BRANCHING)
        await asyncio.gather(*(generate(TASK, m, a) for m in range(3) for a in range(2)))
    assert len({params.seed for _, params in engine.calls}) == 6


def test_bad_timeout(renderer) -> None:
    server = SessionServer(ScriptedEngine(renderer), renderer)
    with pytest.raises(InvalidFieldError, match="timeout_s"):
        agent_generate(asks_twice, server, sampling=SAMPLING, timeout_s=0)


async def test_the_openai_agents_framework(renderer) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"rain in {city}"

    async def harness(base_url, task, params, metadata) -> AgentResult:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=metadata["api_key"], max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
            agent = agents.Agent(name="helper", instructions="Use the tool.", model=model, tools=[weather])
            result = await agents.Runner.run(agent, task.messages[0].content)
        return AgentResult(reward=1.0, metadata={"answer": result.final_output})

    replies = [f"<think>\nI need the tool.\n</think>\n\n{CALL}", CALL, "<think>\nok\n</think>\n\nIt rains."]
    (trajectory,), generate, _ = await run(renderer, harness, replies)
    assert trajectory.metadata["answer"] == "It rains."
    assert len(trajectory.turns) == 3
    assert trajectory.status is Status.FINISHED
    assert "rain in Oslo" in renderer.decode(trajectory.token_ids.tolist())
    assert generate.report.mismatches == 0
