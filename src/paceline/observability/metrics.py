"""Prometheus metrics of one server.

Two sources: snapshots of the engine's own counters (``EngineStats``), and what the server sees of each
request. Every metric is exposed as ``paceline:NAME`` and, where vLLM has one of that meaning, under vLLM's
name ``vllm:NAME`` too, so that dashboards made for vLLM work unchanged. There is one set of values; the
second name is written at scrape time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from paceline.engine.messages import EngineStats, HedgeStats, PlannerStats
    from paceline.engine.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "paceline:"
_ALIAS_PREFIX = "vllm:"
_LABELS = ("model_name", "engine")

_OWN_ONLY = frozenset(
    (
        "engine_up",
        "engine_steps",
        "engine_rows",
        "schedule_seconds",
        "spec_decode_accept_length",
        "spec_decode_refusals",
        "spec_decode_draft_state",
        "spec_decode_planned_rounds",
        "spec_decode_expected_tokens",
        "spec_decode_realised_tokens",
        "spec_decode_survival",
        "spec_decode_confidence_slope",
        "spec_decode_hedged_rounds",
        "spec_decode_hedge_chains",
        "spec_decode_hedged_spans",
        "spec_decode_hedge_tokens",
        "spec_decode_hedge_positions",
        "request_accept_length",
    )
)
"""Metrics vLLM has no equal of."""

_LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
_ACCEPT_LENGTH_BUCKETS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 16)
_TOKENS_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Metrics(Collector):
    """The metrics of one served model.

    Attributes:
        registry: what ``/metrics`` exposes.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, "0")
        self._stats: EngineStats | None = None
        self._up = False
        self._inner = CollectorRegistry()
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens of a sequence; tokens that arrive together share the time since the last.",
            _TOKEN_LATENCY_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _REQUEST_BUCKETS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_BUCKETS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_BUCKETS
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "From the first step to the last token.", _REQUEST_BUCKETS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKENS_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens per request, all its sequences.", _TOKENS_BUCKETS
        )
        self.request_accept_length = self._histogram(
            "request_accept_length",
            "Mean tokens per verify step of each request that drafted, the bonus included.",
            _ACCEPT_LENGTH_BUCKETS,
        )
        self._success = Counter(
            _PREFIX + "request_success",
            "Sequences ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._inner,
        )
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(_PREFIX + name, text, _LABELS, buckets=buckets, registry=self._inner)
        return family.labels(*self._labels)

    def update(self, stats: EngineStats | None) -> None:
        """Take the engine's latest snapshot; None when it is down."""
        self._stats = stats
        self._up = stats is not None

    def busy(self) -> None:
        """The engine lives but is in a step: its last snapshot stands, if there is one."""
        self._up = True

    def finished(self, reason: str) -> None:
        """Count the end of a sequence."""
        self._success.labels(*self._labels, reason).inc()

    def render(self) -> bytes:
        """The text format for a scrape."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Everything under both names. Called by the registry."""
        for family in (*self._engine_families(), *self._inner.collect()):
            # creation times double the output and nobody reads them
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            name = family.name.removeprefix(_PREFIX)
            if name not in _OWN_ONLY:
                alias = Metric(_ALIAS_PREFIX + name, family.documentation, family.type)
                alias.samples = [
                    sample._replace(name=_ALIAS_PREFIX + sample.name.removeprefix(_PREFIX))
                    for sample in family.samples
                ]
                yield alias

    def _engine_families(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._gauge("engine_up", "Whether the engine lives and answers.", self._up)
        if stats is None:
            return
        yield self._gauge("num_requests_running", "Sequences in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting for a place.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of K/V blocks in use, 0 to 1.", stats.kv_cache_usage)
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            (
                "num_preemptions",
                "Sequences stopped to make room, to be computed again.",
                stats.num_preemptions,
            ),
            ("engine_steps", "Steps run.", stats.num_steps),
            ("engine_rows", "Token positions forwarded.", stats.num_rows),
            ("schedule_seconds", "Host time in scheduler and cache.", stats.schedule_s),
        )
        for name, text, value in counters:
            yield self._counter(name, text, {(): value})
        if stats.accepted_per_position:
            yield from self._speculation_families(stats)

    def _speculation_families(self, stats: EngineStats) -> Iterator[Metric]:
        prefix = "spec_decode_"
        yield self._counter(prefix + "num_drafts", "Verify spans.", {(): stats.num_drafts})
        yield self._counter(
            prefix + "num_draft_tokens", "Drafted tokens verified.", {(): stats.num_draft_tokens}
        )
        yield self._counter(
            prefix + "num_accepted_tokens", "Drafted tokens accepted.", {(): stats.num_accepted_tokens}
        )
        yield self._counter(
            prefix + "num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by position in the draft.",
            {(str(i),): count for i, count in enumerate(stats.accepted_per_position)},
            ("position",),
        )
        yield self._counter(
            prefix + "refusals",
            "Rounds a sequence went without drafts it could have had.",
            {(reason,): count for reason, count in sorted(stats.draft_refusals.items())},
            ("reason",),
        )
        if stats.draft_state:
            yield self._counter(
                prefix + "draft_state",
                "What became of draft state kept apart from the K/V blocks.",
                {(event,): count for event, count in sorted(stats.draft_state.items())},
                ("event",),
            )
        yield self._accept_lengths(stats.accept_lengths)
        if stats.planner is not None:
            yield from self._planner_families(stats.planner)
        if stats.hedging is not None:
            yield from self._hedge_families(stats.hedging)

    def _hedge_families(self, hedging: HedgeStats) -> Iterator[Metric]:
        prefix = "spec_decode_"
        yield self._counter(prefix + "hedged_rounds", "Rounds with hedge chains.", {(): hedging.num_rounds})
        yield self._counter(prefix + "hedge_chains", "Hedge chains verified.", {(): hedging.num_chains})
        yield self._counter(
            prefix + "hedged_spans",
            "Verify spans with hedge chains beside them, by whether a chain won.",
            {("win",): hedging.num_wins, ("loss",): hedging.num_losses},
            ("outcome",),
        )
        yield self._counter(
            prefix + "hedge_tokens", "Tokens committed because a chain won.", {(): hedging.num_tokens}
        )
        yield self._gauge(
            prefix + "hedge_positions", "Drafts hedged of each sequence that is, at most.", hedging.chains
        )

    def _planner_families(self, planner: PlannerStats) -> Iterator[Metric]:
        prefix = "spec_decode_"
        yield self._counter(
            prefix + "planned_rounds",
            "Decode rounds, by drafts of a sequence on average that they had rows for, and why so many.",
            {(str(drafts), reason): count for drafts, reason, count in sorted(planner.rounds)},
            ("drafts", "reason"),
        )
        yield self._counter(
            prefix + "expected_tokens",
            "Tokens planned rounds should have committed.",
            {(): planner.expected_tokens},
        )
        yield self._counter(
            prefix + "realised_tokens",
            "Tokens that stood in planned rounds, past the ends of texts too.",
            {(): planner.realised_tokens},
        )
        survival = GaugeMetricFamily(
            _PREFIX + prefix + "survival",
            "Estimated chance that a draft and all before it stand.",
            labels=(*_LABELS, "position"),
        )
        for position, chance in enumerate(planner.survival):
            survival.add_metric((*self._labels, str(position)), chance)
        yield survival
        yield self._gauge(
            prefix + "confidence_slope",
            "By how much drafts are likelier to stand, as a share of what the drafter says.",
            planner.slope,
        )

    def _accept_lengths(self, lengths: Sequence[int]) -> Metric:
        """The histogram of tokens committed per verify span, one bucket per length."""
        family = HistogramMetricFamily(
            _PREFIX + "spec_decode_accept_length",
            "Tokens committed per verify span, the bonus included.",
            labels=_LABELS,
        )
        total, buckets = 0, []
        for length, count in enumerate(lengths, start=1):
            total += count
            buckets.append((str(float(length)), total))
        buckets.append(("+Inf", total))
        family.add_metric(
            self._labels, buckets, sum(length * count for length, count in enumerate(lengths, start=1))
        )
        return family

    def _counter(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()
    ) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=(*_LABELS, *labels))
        for extra, value in values.items():
            family.add_metric((*self._labels, *extra), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


class RequestObserver:
    """Follows one request from its outputs and records it once."""

    def __init__(self, metrics: Metrics, num_sequences: int) -> None:
        self._metrics = metrics
        self._last_s: dict[int, float] = {}
        self._open = num_sequences
        self._num_tokens = 0
        self._output: RequestOutput | None = None

    def see(self, output: RequestOutput) -> None:
        """Record an increment."""
        metrics = self._metrics
        now = time.monotonic()
        if self._output is None and output.metrics is not None:
            metrics.time_to_first_token.observe(now - output.metrics.arrival_s)
        self._output = output
        for completion in output.outputs:
            count = len(completion.token_ids)
            self._num_tokens += count
            before = self._last_s.get(completion.index)
            if before is not None:
                for _ in range(count):
                    metrics.inter_token_latency.observe((now - before) / count)
            if count:
                self._last_s[completion.index] = now
            if completion.finish_reason is not None:
                self._open -= 1
                metrics.finished(completion.finish_reason)

    def close(self, *, failed: bool = False) -> None:
        """Record the end of the request, whatever ended it: all sequences done, a failure, or the client
        left."""
        metrics = self._metrics
        for _ in range(self._open):
            metrics.finished("error" if failed else "abort")
        self._open = 0
        output, self._output = self._output, None
        if output is None:
            return
        metrics.request_prompt_tokens.observe(len(output.prompt_token_ids))
        metrics.request_generation_tokens.observe(self._num_tokens)
        times = output.metrics
        if times is None or times.first_token_s is None or times.last_token_s is None:
            return
        if times.accept_length is not None:
            metrics.request_accept_length.observe(times.accept_length)
        metrics.e2e_latency.observe(times.last_token_s - times.arrival_s)
        metrics.decode_time.observe(times.last_token_s - times.first_token_s)
        if times.first_scheduled_s is not None:
            metrics.queue_time.observe(times.first_scheduled_s - times.arrival_s)
            metrics.prefill_time.observe(times.first_token_s - times.first_scheduled_s)
            metrics.inference_time.observe(times.last_token_s - times.first_scheduled_s)
