"""Metrics under both names, and the periodic log line."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.messages import EngineStats
from paceline.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paceline.errors import ConfigError, EngineDeadError
from paceline.observability import Metrics, RequestObserver, logs
from support.server_cases import Api, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]


def _samples(text: str) -> dict[str, float]:
    """Values by name and, where there is one, finish reason; buckets left out."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "mini"
            if not sample.name.endswith("_bucket"):
                reason = sample.labels.get("finished_reason")
                values[sample.name + (f":{reason}" if reason else "")] = sample.value
    return values


def test_scrape(api: Api, scripted: ScriptedEngine) -> None:
    response = api.chat(n=2)
    api.stream("/v1/chat/completions", messages=HI)
    api.complete(max_tokens=3)
    scrape = api.get("/metrics")
    assert scrape.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = _samples(scrape.text)
    for prefix in ("paceline:", "vllm:"):
        assert values[prefix + "num_requests_running"] == 2
        assert values[prefix + "num_requests_waiting"] == 1
        assert values[prefix + "kv_cache_usage_perc"] == 0.25
        assert values[prefix + "prefix_cache_queries_total"] == 10
        assert values[prefix + "prefix_cache_hits_total"] == 4
        assert values[prefix + "request_success_total:stop"] == 3
        assert values[prefix + "request_success_total:length"] == 1
        assert values[prefix + "time_to_first_token_seconds_count"] == 3
        assert values[prefix + "e2e_request_latency_seconds_count"] == 3
        tokens = response["usage"]["completion_tokens"] * 3 // 2 + 3
        assert values[prefix + "request_generation_tokens_sum"] == tokens
        # every token but the first of each of the four sequences
        assert values[prefix + "inter_token_latency_seconds_count"] == tokens - 4
    assert values["paceline:engine_up"] == 1
    assert "vllm:engine_up" not in values
    assert "_created" not in scrape.text


def test_scrape_of_a_dead_engine(api: Api, scripted: ScriptedEngine) -> None:
    api.chat()
    scripted.dead = True
    values = _samples(api.get("/metrics").text)
    assert values["paceline:engine_up"] == 0
    assert "paceline:num_requests_running" not in values
    assert values["paceline:request_success_total:stop"] == 1


def test_scrape_of_a_busy_engine(api: Api, scripted: ScriptedEngine) -> None:
    """One in a long step is up, as ``/health`` says, and shown as it was last seen, until it counts as
    stuck.
    """
    scripted.busy = True
    values = _samples(api.get("/metrics").text)
    assert values["paceline:engine_up"] == 1
    assert "paceline:num_requests_running" not in values  # it was never seen
    scripted.busy = False
    api.get("/metrics")
    scripted.busy = True
    values = _samples(api.get("/metrics").text)
    assert values["paceline:engine_up"] == 1
    assert values["paceline:num_requests_running"] == 2
    scripted.dead = True
    assert _samples(api.get("/metrics").text)["paceline:engine_up"] == 0
    scripted.dead = False  # another one, in its first step
    values = _samples(api.get("/metrics").text)
    assert values["paceline:engine_up"] == 1 and "paceline:num_requests_running" not in values


def test_times_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("paceline.observability.metrics.time.monotonic", lambda: clock)
    metrics = Metrics("mini")
    observer = RequestObserver(metrics, 1)
    times = RequestMetrics(arrival_s=99.0, first_scheduled_s=99.25, first_token_s=100.0, last_token_s=100.0)

    def see(tokens: int, reason: Any = None) -> None:
        completion = CompletionOutput(0, "", [1] * tokens, finish_reason=reason)
        observer.see(RequestOutput("r", None, [1, 2], [completion], reason is not None, metrics=times))

    see(1)
    clock = times.last_token_s = 100.6
    see(3)  # three tokens of one step share the time since the last
    clock = times.last_token_s = 101.0
    see(1, "stop")
    observer.close()
    observer.close()
    values = _samples(metrics.render().decode())
    expected = {
        "time_to_first_token_seconds": (1, 1.0),
        "inter_token_latency_seconds": (4, 1.0),
        "e2e_request_latency_seconds": (1, 2.0),
        "request_queue_time_seconds": (1, 0.25),
        "request_prefill_time_seconds": (1, 0.75),
        "request_decode_time_seconds": (1, 1.0),
        "request_inference_time_seconds": (1, 1.75),
        "request_prompt_tokens": (1, 2),
        "request_generation_tokens": (1, 5),
    }
    for name, (count, total) in expected.items():
        assert values[f"vllm:{name}_count"] == count, name
        assert values[f"vllm:{name}_sum"] == pytest.approx(total), name
    assert values["vllm:request_success_total:stop"] == 1


def _stats(**values: Any) -> EngineStats:
    return EngineStats(**values)


def test_line_says_what_happened_since_the_last() -> None:
    line = logs.StatsLine()
    assert line.next(_stats(prompt_tokens=100, num_running=1), 0.0) is None
    text = line.next(
        _stats(
            prompt_tokens=300,
            generation_tokens=50,
            num_running=2,
            num_waiting=1,
            kv_cache_usage=0.5,
            prefix_queries=200,
            prefix_hits=50,
        ),
        10.0,
    )
    assert text == (
        "prompt 20.0 tok/s, generation 5.0 tok/s, running 2, waiting 1, K/V 50.0%, prefix hits 25.0%"
    )


def test_no_line_when_idle_or_restarted() -> None:
    line = logs.StatsLine()
    busy = {"generation_tokens": 5, "num_steps": 9}
    assert line.next(_stats(**busy), 0.0) is None
    assert line.next(_stats(**busy), 10.0) is None
    assert line.next(_stats(num_steps=1, generation_tokens=1), 20.0) is None
    text = line.next(_stats(num_steps=2, generation_tokens=11), 30.0)
    assert text is not None and "generation 1.0 tok/s" in text and "prefix hits -" in text
    assert line.next(_stats(num_steps=2, generation_tokens=11, num_waiting=1), 40.0) is not None


def test_the_loop_logs_and_survives_a_dead_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        count = 0
        seen = asyncio.Event()

        async def read() -> EngineStats:
            nonlocal count
            count += 1
            if count == 2:
                raise EngineDeadError("down")
            if count > 4:
                seen.set()
            return _stats(generation_tokens=count, num_steps=count)

        task = asyncio.create_task(logs.log_stats(read, 0.001))
        await asyncio.wait_for(seen.wait(), 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level(logging.INFO, logger="paceline"):
        asyncio.run(main())
    assert "generation" in caplog.text


def test_setup_logging(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger("paceline")
    before = (root.level, root.propagate)
    monkeypatch.setattr(root, "handlers", [])
    try:
        logs.setup_logging("warning")
        logs.setup_logging("warning")
        assert len(root.handlers) == 1
        logging.getLogger("paceline.engine").warning("careful")
        logging.getLogger("paceline.engine").info("chatty")
        err = capsys.readouterr().err
        assert "[paceline.engine] careful" in err and "chatty" not in err
        with pytest.raises(ConfigError, match="log level is 'loud'"):
            logs.setup_logging("loud")
    finally:
        root.setLevel(before[0])
        root.propagate = before[1]
