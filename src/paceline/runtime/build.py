"""From engine options to a device that is ready to run steps."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.config import EngineConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.models.attention import KVCache
from paceline.models.checkpoint import resolve_dtype, resolve_folder
from paceline.models.config import Qwen3Config
from paceline.models.drafter import WHOLE_VOCABULARY, Drafter
from paceline.models.drafter_loader import load_drafter
from paceline.models.loader import load_model
from paceline.models.qwen3 import Qwen3ForCausalLM, make_deterministic
from paceline.runtime.few_rows import FewRows
from paceline.runtime.memory import (
    CaptureMemory,
    MemoryPlan,
    StepLimits,
    budget_left,
    given_budget,
    kv_bytes,
    plan_memory,
)
from paceline.runtime.precompile import precompile
from paceline.runtime.runner import Runner
from paceline.runtime.warmup import settle
from paceline.speculation.config import DEFAULT_MARKOV_CANDIDATES, SpeculativeConfig
from paceline.speculation.hedging import DEFAULT_POSITIONS, HedgeLimits
from paceline.speculation.synthetic import conditional_rate
from paceline.text.generation_config import load_generation_defaults

logger = logging.getLogger(__name__)

GRAPH_BYTES = 16 * 2**20
"""Memory the driver may take for a CUDA graph, beside the pool that graphs share."""


@dataclass(frozen=True, slots=True)
class Built:
    """A ready device and the limits it was built for."""

    runner: Runner
    folder: Path
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    weights_bytes: int
    num_drafts: int
    draft_block_rows: int
    hedging: HedgeLimits | None
    """What there may be of hedge chains."""
    captures: CaptureMemory | None
    """Set when draft state is captured; the draft K/V then has ``num_blocks`` blocks of its own."""


def pick_device(name: str) -> torch.device:
    """The device to run on; ``auto`` prefers a GPU.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU here. Use device='cpu' or 'auto'.")
    return torch.device(name)


def build(engine: EngineConfig) -> Built:
    """Load the models, size and allocate the caches, and make the runner.

    Raises:
        ConfigError, CheckpointError: with what was given and what would work.
    """
    started = time.perf_counter()
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    device = pick_device(engine.device)
    folder = resolve_folder(engine.model_path, revision=engine.revision)
    drafter_folder = _drafter_folder(engine)
    config = Qwen3Config.from_pretrained(folder)
    max_model_len = _max_model_len(engine, config)
    limits = _step_limits(engine, max_model_len, on_gpu=device.type == "cuda")
    if not engine.enforce_eager and not engine.deterministic:
        dtype = resolve_dtype(engine.dtype, config.dtype, {})
        FewRows.compile_early(config, device, dtype, engine.block_size)
    model = load_model(
        folder,
        device=device,
        # Half precision is emulated on most CPUs and saves nothing there.
        dtype="float32" if engine.dtype == "auto" and device.type == "cpu" else engine.dtype,
        load_format=engine.load_format,
        show_progress=engine.show_progress,
    )
    if engine.deterministic:
        make_deterministic(model)
        logger.info("Deterministic: logits do not depend on batch, chunking, speculation or cache")
    dtype = model.embed_tokens.weight.dtype
    drafter = None if drafter_folder is None else _load_drafter(engine, drafter_folder, model)
    if drafter is not None and engine.speculation is not None:
        wanted = engine.speculation.num_speculative_tokens
        limits = replace(limits, num_drafts=drafter.config.num_drafts(wanted))
    hedging = _hedging(engine, limits)
    if hedging is not None:
        limits = replace(limits, hedge_rows=hedging.max_rows)
    eos = _end_tokens(folder, config)
    rate = _synthetic_rate(engine.speculation, limits.num_drafts)
    parts = _Parts(engine, model, drafter, limits, eos, rate, device, hedging)
    memory = plan_memory(engine, config, None if drafter is None else drafter.config, limits, dtype)
    if device.type == "cuda":
        parts.precompile(memory)
    worst = None
    if engine.num_blocks is None:
        budget = given_budget(engine, device)
        if budget is None:
            budget, worst = _measured_budget(parts, memory)
        memory = memory.within(*budget)
    _log_cache(memory, engine.block_size, max_model_len)
    runner = parts.runner(memory)
    if device.type == "cuda":
        settle(runner, limits, worst)
        _capture_first(runner)
    logger.info("Engine built in %.2f s on %s, %s", time.perf_counter() - started, device, dtype)
    return Built(
        runner=runner,
        folder=folder,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_blocks=memory.num_blocks,
        eos_token_ids=eos,
        device=device,
        dtype=dtype,
        weights_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        num_drafts=limits.num_drafts,
        draft_block_rows=0 if drafter is None else drafter.config.block_size,
        hedging=hedging,
        captures=memory.captures,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runners are made of, apart from the sizes of their caches."""

    engine: EngineConfig
    model: Qwen3ForCausalLM
    drafter: Drafter | None
    limits: StepLimits
    eos_token_ids: tuple[int, ...]
    synthetic_rate: float | None
    device: torch.device
    hedging: HedgeLimits | None = None

    def precompile(self, memory: MemoryPlan) -> None:
        """Compile all kernels of a start, if it is the first of its kind on this machine."""
        smallest = memory.smallest()
        precompile(lambda: self.runner(smallest), self.limits, planned=self.planned, facts=self.kernel_facts)

    @property
    def kernel_facts(self) -> tuple[object, ...]:
        """What decides which kernels a start runs. Something left out would cost time, and nothing else."""
        engine, drafter, speculation = self.engine, self.drafter, self.engine.speculation
        return (
            self.model.config,
            None if drafter is None else drafter.config,
            self.model.embed_tokens.weight.dtype,
            self.limits,
            self.hedging,
            self.planned,
            engine.block_size,
            engine.deterministic,
            engine.enforce_eager,
            None if speculation is None else (speculation.draft_state, speculation.draft_window),
            None if speculation is None else speculation.markov_candidates,
            self.synthetic_rate is None,
        )

    @property
    def planned(self) -> bool:
        """Whether there is a verify planner."""
        speculation = self.engine.speculation
        return speculation is not None and speculation.verify_planner != "off"

    def runner(self, memory: MemoryPlan) -> Runner:
        """Allocate the caches and make the runner."""
        engine, drafter, limits, device = self.engine, self.drafter, self.limits, self.device
        dtype = self.model.embed_tokens.weight.dtype
        speculation = engine.speculation
        return Runner(
            self.model,
            _allocate(self.model.config, memory.target_blocks, engine.block_size, dtype, device),
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            device=device,
            eos_token_ids=self.eos_token_ids,
            drafter=drafter,
            num_drafts=limits.num_drafts,
            draft_cache=None
            if drafter is None
            else _allocate(drafter.config.layers, memory.draft_blocks, engine.block_size, dtype, device),
            draft_window=None if speculation is None else speculation.draft_window,
            captures=_allocate_captures(memory.captures, drafter, engine.block_size),
            synthetic_rate=self.synthetic_rate,
            predict=self.planned,
            rounds="none" if not memory.rounds else "captured" if device.type == "cuda" else "eager",
            hedging=self.hedging,
        )


def _measured_budget(parts: _Parts, memory: MemoryPlan) -> tuple[tuple[int, str], int]:
    """What a GPU has left for the caches, with what steps need measured on a runner made for it, which then
    goes; and those bytes, without those of graphs.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(parts.device)
    runner = parts.runner(memory.smallest())
    worst = settle(runner, parts.limits)
    steps = free - torch.cuda.mem_get_info(parts.device)[0]
    for part in (runner.rounds, runner.passes, runner.deferred):
        steps += 0 if part is None else len(part.graphs.missing) * GRAPH_BYTES
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return budget_left(parts.engine.gpu_memory_utilization, total - free, steps, total), worst


@torch.inference_mode()
def _capture_first(runner: Runner) -> None:
    """Capture the decode rounds and short passes that are to be there from the start."""
    if runner.rounds is None or runner.passes is None:
        return
    started, missing = time.perf_counter(), len(runner.rounds.graphs.missing)
    before = torch.cuda.mem_get_info(runner.device)[0]
    runner.rounds.capture_first()
    runner.passes.capture_first()
    logger.info(
        "Captured %d decode rounds in %.2f s, %.2f GiB; %d follow while the engine is idle or when needed",
        missing - len(runner.rounds.graphs.missing),
        time.perf_counter() - started,
        (before - torch.cuda.mem_get_info(runner.device)[0]) / 2**30,
        len(runner.rounds.graphs.missing),
    )


def _synthetic_rate(speculation: SpeculativeConfig | None, num_drafts: int) -> float | None:
    """At which rate to accept drafts, when they are not verified."""
    if speculation is None or speculation.synthetic_accept_length is None:
        return None
    length = speculation.synthetic_accept_length
    rate = conditional_rate(length, num_drafts)
    logger.warning(
        "SYNTHETIC ACCEPTANCE: drafts are accepted at random, %.4g tokens per round on average. For "
        "measuring only: the tokens are meaningless.",
        length,
    )
    return rate


def _hedging(engine: EngineConfig, limits: StepLimits) -> HedgeLimits | None:
    """What there may be of hedge chains; None when nothing is hedged."""
    speculation = engine.speculation
    if speculation is None or not speculation.hedge:
        return None
    if engine.enforce_eager:
        raise ConfigError("hedge needs decode rounds, and enforce_eager has none. Drop one of them.")
    given = speculation.hedge_positions
    if given is not None and given[-1] >= limits.num_drafts:
        raise ConfigError(
            f"hedge_positions names draft {given[-1]}, but rounds have {limits.num_drafts} drafts. Name "
            f"positions in 0..{limits.num_drafts - 1}."
        )
    positions = given or tuple(p for p in DEFAULT_POSITIONS if p < limits.num_drafts)
    most = len(positions)
    counts = tuple(range(1, most + 1)) if speculation.hedge_auto else (most,)
    return HedgeLimits(min(speculation.hedge, limits.max_num_seqs), positions, limits.num_drafts, counts)


def _end_tokens(folder: Path, config: Qwen3Config) -> tuple[int, ...]:
    """Ids that end a sequence, from both files that may name them."""
    eos = {*config.eos_token_ids, *load_generation_defaults(folder, "none").eos_token_ids}
    beyond = sorted(token for token in eos if not 0 <= token < config.vocab_size)
    if beyond:
        raise CheckpointError(
            f"{folder}: eos_token_id names {beyond}, but the model has {config.vocab_size} token ids; "
            "correct config.json or generation_config.json"
        )
    return tuple(sorted(eos))


def _max_model_len(engine: EngineConfig, config: Qwen3Config) -> int:
    """The longest sequence, as asked for or as the checkpoint allows."""
    if engine.max_model_len is None:
        return config.max_context_len
    if engine.max_model_len > config.max_context_len:
        raise ConfigError(
            f"max_model_len is {engine.max_model_len}, but {engine.model_path} was made for at most "
            f"{config.max_context_len} tokens. Lower max_model_len, or add rope scaling to the checkpoint's "
            "config."
        )
    return engine.max_model_len


def _step_limits(engine: EngineConfig, max_model_len: int, *, on_gpu: bool) -> StepLimits:
    """Sequences and rows per step, as asked for or by the kind of device."""
    max_num_seqs = engine.max_num_seqs or (256 if on_gpu else 32)
    max_rows = engine.max_num_batched_tokens or max(8192 if on_gpu else 512, max_num_seqs)
    if max_rows < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {max_rows}, less than max_num_seqs ({max_num_seqs}): not every "
            "running "
            "sequence could get a row per step. Raise the former or lower the latter."
        )
    return StepLimits(max_num_seqs, max_rows, max_model_len, engine.max_logprobs)


def _log_cache(memory: MemoryPlan, block_size: int, max_model_len: int) -> None:
    tokens = memory.num_blocks * block_size
    logger.info(
        "K/V cache: %s tokens in %d blocks (%.2f GiB, %.0f%% of it draft state). Maximum concurrency at %s "
        "tokens per request: %.2fx",
        f"{tokens:,}",
        memory.num_blocks,
        memory.num_blocks * memory.block_bytes / 2**30,
        100 * memory.draft_block_bytes / memory.block_bytes,
        f"{max_model_len:,}",
        tokens / max_model_len,
    )
    if tokens < max_model_len:
        logger.warning(
            "The K/V cache holds %s tokens, and sequences may have %s: longer requests than the former are "
            "refused. Give the cache more memory, or lower max_model_len.",
            f"{tokens:,}",
            f"{max_model_len:,}",
        )


def _drafter_folder(engine: EngineConfig) -> Path | None:
    """Where the drafter is; None without one."""
    speculation = engine.speculation
    if speculation is None:
        return None
    assert speculation.model is not None
    try:
        return resolve_folder(speculation.model, revision=speculation.revision)
    except CheckpointError as error:
        raise CheckpointError(f"The drafter in speculative_config: {error}") from error


def _load_drafter(engine: EngineConfig, folder: Path, target: Qwen3ForCausalLM) -> Drafter:
    """The drafter a config names, checked against the method it names."""
    speculation = engine.speculation
    assert speculation is not None
    drafter = load_drafter(folder, target, load_format=engine.load_format, show_progress=engine.show_progress)
    if speculation.method not in (None, drafter.config.method):
        raise ConfigError(
            f"speculative_config asks for method {speculation.method!r}, but {speculation.model} is a "
            f"{drafter.config.method!r} drafter. Drop the method or name another drafter."
        )
    _restrict(drafter, target, speculation.markov_candidates)
    return drafter


def _restrict(drafter: Drafter, target: Qwen3ForCausalLM, candidates: int | None) -> None:
    """Let a Markov head choose among few tokens where it gains; tell of a number that changes nothing."""
    if candidates is None:
        return
    vocab_size = f"{drafter.config.draft_vocab_size:,}"
    if target.embed_tokens.weight.is_cuda and drafter.restrict(candidates):
        logger.info(
            "Markov head: each draft is chosen among %d tokens and %d successors of the one before it, of %s",
            candidates,
            candidates // 2,
            vocab_size,
        )
    elif candidates != DEFAULT_MARKOV_CANDIDATES:
        logger.warning(
            "markov_candidates is %d and changes nothing here: it is for vanilla Markov heads on a GPU, over "
            "vocabularies of at least %d times as many tokens (this one has %s). Drop it.",
            candidates,
            WHOLE_VOCABULARY,
            vocab_size,
        )


def _allocate(
    config: Qwen3Config, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    try:
        return KVCache.allocate(
            config.num_hidden_layers,
            blocks,
            block_size,
            config.num_key_value_heads,
            config.head_dim,
            dtype=dtype,
            device=device,
        )
    except (MemoryError, torch.OutOfMemoryError, ValueError) as error:  # ValueError: larger than any array
        wanted = blocks * block_size * kv_bytes(config, dtype) / 2**30
        raise ConfigError(
            f"A K/V cache of {blocks} blocks takes {wanted:,.1f} GiB, which {device} does not have. "
            "Lower num_blocks or kv_cache_memory_bytes, or leave both out."
        ) from error


def _allocate_captures(
    captures: CaptureMemory | None, drafter: Drafter | None, block_size: int
) -> torch.Tensor | None:
    """The store of captured tap rows, [capture slots, P, n * d]."""
    if captures is None or drafter is None:
        return None
    width = len(drafter.config.tap_layer_ids) * drafter.config.layers.hidden_size
    like = drafter.fc.weight
    return torch.zeros(captures.num_physical, block_size, width, dtype=like.dtype, device=like.device)
