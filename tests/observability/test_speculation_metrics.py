"""Speculation in numbers: scrape, log line, per-request metrics, usage, and where each token came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.messages import EngineRequest, EngineStats, HedgeStats, PlannerStats, SequenceOutput
from paceline.engine.outputs import BONUS, PLAIN, RequestMetrics
from paceline.observability import Metrics
from paceline.observability.logs import StatsLine
from support.server_cases import Api, ScriptedEngine

STATS = EngineStats(
    num_drafts=10,
    num_draft_tokens=30,
    num_accepted_tokens=12,
    accepted_per_position=[7, 4, 1],
    accept_lengths=[3, 3, 3, 1],
    draft_refusals={"memory": 2},
    draft_state={"hits": 5, "misses": 1},
    num_steps=5,
)


class DraftingEngine(ScriptedEngine):
    """Commits its script in rounds of three tokens, four drafts each: two accepted and a bonus."""

    def _script(self, request: EngineRequest) -> list[SequenceOutput]:
        singles = [output for output in super()._script(request) if output.index == 0]
        first, rest = singles[0], singles[1:]
        outputs = [first]
        for start in range(0, len(rest), 3):
            group = rest[start : start + 3]
            outputs.append(
                SequenceOutput(
                    request_id=request.request_id,
                    index=0,
                    token_ids=[output.token_ids[0] for output in group],
                    num_draft_tokens=4,
                    num_accepted_tokens=min(2, len(group)),
                    finish_reason=group[-1].finish_reason,
                )
            )
        return outputs


@pytest.fixture
def drafting(text_folder: Path) -> Api:
    return Api(DraftingEngine(text_folder))


def scrape(metrics: Metrics) -> dict[str, float]:
    """Values by name and whatever labels tell samples of a name apart."""
    values = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            values[sample.name + "".join(f":{v}" for v in labels.values())] = sample.value
    return values


def test_totals_under_both_names() -> None:
    metrics = Metrics("mini")
    metrics.update(STATS)
    values = scrape(metrics)
    for prefix in ("paceline:spec_decode_", "vllm:spec_decode_"):
        assert values[prefix + "num_drafts_total"] == 10
        assert values[prefix + "num_draft_tokens_total"] == 30
        assert values[prefix + "num_accepted_tokens_total"] == 12
        assert [values[f"{prefix}num_accepted_tokens_per_pos_total:{i}"] for i in range(3)] == [7, 4, 1]
    ours = "paceline:spec_decode_"
    assert values[ours + "refusals_total:memory"] == 2
    assert values[ours + "draft_state_total:hits"] == 5
    assert values[ours + "accept_length_count"] == 10
    assert values[ours + "accept_length_sum"] == 3 + 6 + 9 + 4
    assert [values[f"{ours}accept_length_bucket:{n}.0"] for n in range(1, 5)] == [3, 6, 9, 10]
    assert "vllm:spec_decode_accept_length_count" not in values


def test_no_speculation_no_metrics() -> None:
    metrics = Metrics("mini")
    metrics.update(EngineStats())
    assert "spec_decode" not in metrics.render().decode()


def test_log_line_counts_the_interval_only() -> None:
    line = StatsLine()
    line.next(EngineStats(num_steps=1), 0.0)
    text = line.next(STATS, 2.0)
    assert text is None, "nothing was generated"
    later = EngineStats(
        num_steps=9,
        num_drafts=14,
        num_draft_tokens=42,
        num_accepted_tokens=20,
        accepted_per_position=[11, 7, 2],
        generation_tokens=12,
    )
    text = line.next(later, 4.0)
    assert text is not None
    assert text.splitlines()[1] == (
        "drafts: accept length 3.00, accepted 8 of 12 tokens (66.7%), 4.0 of 6.0 tok/s, "
        "by position 1.00 0.75 0.25"
    )
    text = line.next(EngineStats(num_steps=10, num_drafts=14, generation_tokens=13), 6.0)
    assert text is not None and "drafts" not in text


def test_a_requests_rounds() -> None:
    metrics = RequestMetrics(0.0)
    assert metrics.accept_length is None
    metrics.add_round(2, 0)
    metrics.add_round(4, 3)
    metrics.add_round(1, 1)
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 7, 4)
    assert metrics.accepted_per_position == [2, 1, 1, 0]
    assert metrics.accept_length == pytest.approx(1 + 4 / 3)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_on_request(drafting: Api, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "hi", "max_tokens": 8, "return_spec_decode_metrics": True}
    if stream:
        events = drafting.stream("/v1/completions", stream_options={"include_usage": True}, **body)
        usage = events[-1]["usage"]
    else:
        usage = drafting.ok("/v1/completions", **body)["usage"]
    assert usage["completion_tokens"] == 8
    # 1 plain, then rounds of 3, 3 and 1 (cut by max_tokens after an accepted draft)
    assert usage["spec_decode"] == {
        "num_drafts": 3,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 5,
        "num_accepted_tokens_per_pos": [3, 2, 0, 0],
        "mean_accept_length": pytest.approx(1 + 5 / 3),
    }
    assert "spec_decode" not in drafting.complete(max_tokens=8)["usage"]


def test_origins_agree_with_the_tokens_and_a_stop_string_cuts_them(drafting: Api) -> None:
    engine = drafting.engine
    params = engine.frontend.default_params(max_tokens=9)
    state = engine.frontend.prepare("a", [1, 2], params)
    for output in engine._script(state.request):
        state.take(output)
    assert state.outputs[0].origins == [PLAIN, 1, 2, BONUS, 1, 2, BONUS, 1, 2]
    text = state.outputs[0].text
    for length in range(2, 8):
        params = engine.frontend.default_params(max_tokens=9, stop=text[length - 1 : length + 1])
        state = engine.frontend.prepare(str(length), [1, 2], params)
        for output in engine._script(state.request):
            state.take(output)
        (cut,) = state.outputs
        assert cut.finish_reason == "stop" and len(cut.origins) == len(cut.token_ids)
        assert state.metrics.num_accepted_tokens == sum(origin > 0 for origin in cut.origins)


def test_planner_families() -> None:
    metrics = Metrics("m")
    planner = PlannerStats(
        rounds=[(7, "drafts pay", 3), (0, "exploring", 1)],
        expected_tokens=12.5,
        realised_tokens=11,
        survival=[0.5, 0.25],
    )
    metrics.update(EngineStats(accepted_per_position=[1, 1], accept_lengths=[0, 1, 1], planner=planner))
    prefix = "paceline:spec_decode_"
    found = {
        (sample.name.removeprefix(prefix), sample.labels.get("drafts", sample.labels.get("position"))): (
            sample.value
        )
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }
    assert found["planned_rounds_total", "7"] == 3 and found["planned_rounds_total", "0"] == 1
    assert found["expected_tokens_total", None] == 12.5 and found["realised_tokens_total", None] == 11
    assert found["survival", "0"] == 0.5 and found["survival", "1"] == 0.25


HEDGING = HedgeStats(chains=3, num_rounds=9, num_chains=27, num_wins=2, num_losses=7, num_tokens=5)


def test_hedge_families() -> None:
    metrics = Metrics("m")
    metrics.update(EngineStats(accepted_per_position=[1, 1], accept_lengths=[0, 1, 1], hedging=HEDGING))
    prefix = "paceline:spec_decode_hedge"
    found = {
        (sample.name.removeprefix(prefix), sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }
    assert found == {
        ("d_rounds_total", None): 9,
        ("_chains_total", None): 27,
        ("d_spans_total", "win"): 2,
        ("d_spans_total", "loss"): 7,
        ("_tokens_total", None): 5,
        ("_positions", None): 3,
    }


def test_log_line_of_hedges() -> None:
    line = StatsLine()
    line.next(EngineStats(accepted_per_position=[0, 0], hedging=HedgeStats(num_wins=1, num_tokens=1)), 0.0)
    stats = EngineStats(
        generation_tokens=9,
        num_drafts=9,
        num_draft_tokens=18,
        num_accepted_tokens=9,
        accepted_per_position=[6, 3],
        hedging=HEDGING,
    )
    text = line.next(stats, 10.0)
    assert text is not None
    assert text.splitlines()[-1] == "hedges: 3 chains each, 1 of 8 spans won, 4 tokens gained"
