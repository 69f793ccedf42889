"""A verifiers taskset and a harness that lives in this process: one turn, or two when the first is wrong."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf

__all__ = ["EchoHarness", "EchoTaskset"]


class EchoData(vf.TaskData):
    word: str = ""


class EchoTask(vf.Task[EchoData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        if self.data.word == "unscorable":
            raise RuntimeError("the judge is gone")
        return float(_last(trace) == self.data.word)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(_last(trace)))


def _last(trace: vf.Trace) -> str:
    replies = [m.content or "" for m in trace.messages if isinstance(m, vf.AssistantMessage)]
    return replies[-1].strip() if replies else ""


class EchoConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("alpha", "beta", "gamma")


class EchoTaskset(vf.Taskset[EchoTask, EchoConfig]):
    def load(self):
        for word in self.config.words:
            yield EchoTask(EchoData(prompt=f"Say {word}.", word=word), self.config.task)


class EchoHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(base_url=endpoint, headers={"Authorization": f"Bearer {secret}"}) as client:
            for _ in range(2):
                answer = await client.post("/chat/completions", json={"model": ctx.model, "messages": messages})
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages += [{"role": "assistant", "content": message["content"]}]
                if message["content"].strip() == data.word:
                    break
                messages += [{"role": "user", "content": "No, again."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
