"""Steady traffic: always as many requests open, whose ends are spread over time, as a server sees it.

Requests that begin together end together, and share the passes over their prompts; those that come one by one
cost more. So the first ones are cut short at different lengths, and the rest follow as they end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest
from paceline.sampling.params import SamplingParams
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.planner import Planner


class NeverDraft(Planner):
    """Plain decoding with a drafter loaded."""

    def decide(self, batch: Batch) -> Decision:
        """No drafts."""
        return Decision(0, None, False, "plain is faster")


class SteadyTraffic:
    """Requests on an engine, a new one whenever one ends.

    Args:
        core: the engine; nobody else adds requests.
        prompts: token ids, taken in turn.
        num_open: requests that are open at any time.
        params: of every request; each gets a seed of its own, and the first ``num_open`` end early.
    """

    def __init__(
        self, core: EngineCore, prompts: Sequence[list[int]], num_open: int, params: SamplingParams
    ) -> None:
        self._core, self._prompts, self._num_open, self._params = core, prompts, num_open, params
        self._count = 0

    def window(self, seconds: float) -> float:
        """Tokens per second of so many seconds; they begin where the last window ended."""
        start, tokens = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            self._fill()
            tokens += sum(len(output.token_ids) for output in self._core.step())
        return tokens / (time.perf_counter() - start)

    def drain(self) -> None:
        """Run what is open to its end."""
        while self._core.has_work:
            self._core.step()

    def _fill(self) -> None:
        scheduler = self._core.scheduler
        while scheduler.num_running + scheduler.num_waiting < self._num_open:
            longest = self._params.max_tokens
            assert longest is not None
            length = max(1, longest * (self._count + 1) // self._num_open)
            params = msgspec.structs.replace(self._params, seed=self._count, max_tokens=min(length, longest))
            prompt = self._prompts[self._count % len(self._prompts)]
            self._core.add(
                EngineRequest(request_id=f"steady-{self._count}", prompt_token_ids=prompt, params=params)
            )
            self._count += 1
