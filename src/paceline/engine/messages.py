"""What crosses the border between the text side and the engine: msgspec structs, in process or over a
socket.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.engine.outputs import FinishReason
from paceline.sampling.logprobs import Logprob
from paceline.sampling.params import SamplingParams


class EngineRequest(msgspec.Struct, kw_only=True, tag="request"):
    """A validated request: token ids in, ``params.n`` sequences out."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    """``max_tokens`` is always set here: the text side fills in what the context leaves."""
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""
    cache_salt: str = ""
    """Requests share cached blocks only under the same salt."""


class AbortRequests(msgspec.Struct, kw_only=True, tag="abort"):
    """Stop these requests, whatever they are doing. Unknown ids are ignored: they have just finished."""

    request_ids: list[str]


class StopSequence(msgspec.Struct, kw_only=True, tag="stop_sequence"):
    """The text side found a stop string: end this one continuation. No output follows for it."""

    request_id: str
    index: int


class StatsQuery(msgspec.Struct, kw_only=True, tag="stats"):
    """Ask for a snapshot of the engine's counters."""

    query_id: int


class ResetPrefixCache(msgspec.Struct, kw_only=True, tag="reset_cache"):
    """Forget all cached prefixes (only done while nothing runs)."""

    query_id: int


class Shutdown(msgspec.Struct, kw_only=True, tag="shutdown"):
    """Leave the loop and exit."""


ToEngine = EngineRequest | AbortRequests | StopSequence | StatsQuery | ResetPrefixCache | Shutdown


class SequenceOutput(msgspec.Struct, kw_only=True, tag="output"):
    """New tokens of one continuation after a step, or its end."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Sent once, with the first tokens of continuation 0."""
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    """Drafts the step verified for this continuation."""
    num_accepted_tokens: int = 0
    """How many of them stand: they are the first of ``token_ids``."""
    first_scheduled_s: float = 0.0
    """CLOCK_MONOTONIC time of the first step the sequence took part in."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    """With finish_reason ``error``: what went wrong inside the engine for this request."""


class RequestRefused(msgspec.Struct, kw_only=True, tag="refused"):
    """The engine does not take a request: what its ``RequestError`` says."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class EngineInfo(msgspec.Struct, kw_only=True, tag="info"):
    """Sent once when the engine is ready: what the text side must know to validate requests."""

    model: str
    folder: str
    """Local folder of the checkpoint: where the text side finds tokenizer, template and defaults."""
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    eos_token_ids: list[int]
    max_logprobs: int
    device: str
    dtype: str
    weights_bytes: int
    ready_s: float
    """Seconds from the start of loading to ready."""


class PlannerStats(msgspec.Struct, kw_only=True):
    """What the verify planner chose since start, and what it goes by."""

    rounds: list[tuple[int, str, int]] = []
    """Rounds planned: drafts verified per sequence on average, why, and how many."""
    expected_tokens: float = 0.0
    """Tokens planned rounds should have committed."""
    realised_tokens: int = 0
    """Tokens they committed."""
    survival: list[float] = []
    """Chance that the draft at each position and all before it stand, as estimated now."""
    slope: float = 0.0
    """By how much a draft is likelier to stand, as a share of what the drafter says."""


class HedgeStats(msgspec.Struct, kw_only=True):
    """What hedge chains did since start."""

    chains: int = 0
    """Chains of each hedged sequence in the next round."""
    num_rounds: int = 0
    """Rounds in which chains were verified."""
    num_chains: int = 0
    """Chains verified."""
    num_wins: int = 0
    """Hedged spans in which a chain won."""
    num_losses: int = 0
    """Hedged spans in which none did."""
    num_tokens: int = 0
    """Tokens committed because a chain won."""


class EngineStats(msgspec.Struct, kw_only=True, tag="stats_reply"):
    """A snapshot of the engine's gauges and its counters since start."""

    query_id: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of blocks in use, 0..1."""
    num_steps: int = 0
    num_rows: int = 0
    """Rows forwarded by the target."""
    num_preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = {}
    """Continuations ended, by finish reason."""
    num_drafts: int = 0
    """Verify spans: one per sequence and round that had drafts."""
    num_draft_tokens: int = 0
    """Drafts verified."""
    num_accepted_tokens: int = 0
    """Drafts that became part of an output."""
    accepted_per_position: list[int] = []
    """How often the draft at each position stood."""
    accept_lengths: list[int] = []
    """Verify spans that committed 1, 2, ... tokens."""
    draft_refusals: dict[str, int] = {}
    """Rounds a sequence went without drafts it could have had, by reason."""
    draft_state: dict[str, int] = {}
    """What became of kept draft state, by event; only with strategies that keep it apart from the blocks."""
    planner: PlannerStats | None = None
    """Set when a verify planner decides about drafts."""
    hedging: HedgeStats | None = None
    """Set when sequences may be hedged."""
    schedule_s: float = 0.0
    """Host seconds spent in the scheduler and the cache, summed over steps."""
    cache_reset: bool = False
    """Reply to ResetPrefixCache: whether it was done."""


class EngineFailure(msgspec.Struct, kw_only=True, tag="failure"):
    """The engine could not start or is about to exit."""

    message: str
    kind: Literal["config", "checkpoint", "internal"] = "internal"


FromEngine = SequenceOutput | RequestRefused | EngineInfo | EngineStats | EngineFailure


class OutputBatch(msgspec.Struct, kw_only=True, tag="batch"):
    """Everything one step produced, as one message."""

    items: list[FromEngine]
