"""Decoding speed by batch size, beside a bare loop over the same model and beside the memory limit."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline import ops
from paceline.bench.machine import describe_machine, read_bandwidth
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import EngineRequest
from paceline.errors import ConfigError
from paceline.models.attention import AttentionSpec, split_heads
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.models.rope import apply_rope
from paceline.runtime.runner import Runner
from paceline.sampling.params import SamplingParams
from paceline.speculation.config import SpeculativeConfig


@dataclass(frozen=True)
class DecodeResult:
    """Medians over the repeats of one batch size.

    Attributes:
        tokens_per_s: generated tokens of all sequences over the time of the decode steps.
        bare_tokens_per_s: the same for a loop without scheduler, paging or sampling (batch 1 only).
        limit_share: tokens_per_s over what reading every weight once per step would allow.
        step_ms: time of one decode step.
        host_ms: of which scheduler and cache.
    """

    batch_size: int
    tokens_per_s: float
    limit_share: float
    step_ms: float
    host_ms: float
    bare_tokens_per_s: float | None = None


class GrowingContext:
    """Attention over one contiguous cache per layer: what a minimal decode loop uses, as the yardstick."""

    def __init__(self, num_layers: int, max_len: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        shape = (num_layers, 1, kv_heads, max_len, head_dim)
        self.k = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.v = torch.empty_like(self.k)
        self.length = 0

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """See :meth:`paceline.models.attention.AttentionContext.attend`; rows are [R] of one sequence."""
        q, k, v = split_heads(qkv, spec)
        angles = cos_sin[positions]
        q = apply_rope(ops.rms_norm(q, q_norm, spec.eps), angles)
        k = apply_rope(ops.rms_norm(k, k_norm, spec.eps), angles)
        end = self.length + qkv.shape[0]
        self.k[layer, 0, :, self.length : end] = k.transpose(0, 1)
        self.v[layer, 0, :, self.length : end] = v.transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            self.k[layer, :, :, :end],
            self.v[layer, :, :, :end],
            is_causal=self.length == 0,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
        return out[0].transpose(0, 1).flatten(-2)


@torch.inference_mode()
def bare_loop(model: Qwen3ForCausalLM, prompt: list[int], output_len: int) -> float:
    """Tokens per second of greedy decoding with nothing around the model."""
    config = model.config
    weight = model.embed_tokens.weight
    context = GrowingContext(
        config.num_hidden_layers,
        len(prompt) + output_len,
        config.num_key_value_heads,
        config.head_dim,
        weight,
    )
    tokens = torch.tensor(prompt, device=weight.device)
    started = 0.0
    for i in range(output_len):
        positions = torch.arange(context.length, context.length + len(tokens), device=weight.device)
        hidden = model(tokens, positions, context).hidden[-1:]
        context.length += len(tokens)
        tokens = model.logits(hidden).argmax(-1)
        tokens.tolist()  # a stream needs every token as it comes
        if i == 0:
            started = time.perf_counter()
    return (output_len - 1) / (time.perf_counter() - started)


def decode_once(core: EngineCore, prompts: list[list[int]], output_len: int) -> tuple[float, int, float]:
    """Seconds of the steps after the last prefill, their number, and the host seconds within them."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(request_id=f"bench-{i}", prompt_token_ids=prompt, params=params))
    waiting = {f"bench-{i}" for i in range(len(prompts))}
    while waiting:
        waiting -= {output.request_id for output in core.step()}
    before = core.stats()
    steps, host = before.num_steps, before.schedule_s
    started = time.perf_counter()
    while core.has_work:
        core.step()
    seconds = time.perf_counter() - started
    after = core.stats()
    return seconds, after.num_steps - steps, after.schedule_s - host


def parse_batch_sizes(text: str, limit: int) -> list[int]:
    """Numbers separated by commas, each in 1..limit.

    Raises:
        ConfigError: anything else.
    """
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--batch-sizes is {text!r}; give numbers such as 1,2,4.") from error
    if min(sizes) < 1 or max(sizes) > limit:
        raise ConfigError(f"--batch-sizes is {text!r}; they must lie in 1..{limit} (max_num_seqs).")
    return sizes


def run_decode_bench(
    engine: EngineConfig,
    batch_sizes: str,
    input_len: int,
    output_len: int,
    repeats: int,
    json_path: str | None,
) -> None:
    """Measure, print a table, and write JSON when asked.

    Raises:
        ConfigError: batch sizes that are not numbers or exceed the engine's.
    """
    core = make_core(msgspec.structs.replace(engine, speculative_config=SpeculativeConfig()))
    sizes = parse_batch_sizes(batch_sizes, core.info.max_num_seqs)
    runner = core.runner
    assert isinstance(runner, Runner)
    device = runner.device
    bandwidth = read_bandwidth(device)
    generator = torch.Generator().manual_seed(0)
    high = core.info.vocab_size
    results = []
    for size in sizes:
        runs, bare = [], []
        for _ in range(repeats):
            prompts = torch.randint(0, high, (size, input_len), generator=generator).tolist()
            runs.append(decode_once(core, prompts, output_len))
            if size == 1:
                bare.append(bare_loop(runner.model, prompts[0], output_len))
        step_s = statistics.median(seconds / steps for seconds, steps, _ in runs)
        host_s = statistics.median(host / steps for _, steps, host in runs)
        results.append(
            DecodeResult(
                batch_size=size,
                tokens_per_s=size / step_s,
                limit_share=core.info.weights_bytes / bandwidth / step_s,
                step_ms=1e3 * step_s,
                host_ms=1e3 * host_s,
                bare_tokens_per_s=statistics.median(bare) if bare else None,
            )
        )
    report: dict[str, Any] = {
        "machine": describe_machine(device),
        "model": core.info.model,
        "dtype": core.info.dtype,
        "weights_bytes": core.info.weights_bytes,
        "read_bytes_per_s": bandwidth,
        "input_len": input_len,
        "output_len": output_len,
        "repeats": repeats,
        "results": [asdict(result) for result in results],
    }
    _print(report, results)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report, indent=1) + "\n")


def _print(report: dict[str, Any], results: list[DecodeResult]) -> None:
    machine = report["machine"]
    rate = report["read_bytes_per_s"] / 1e9
    table = Table(
        title=f"{report['model']} ({report['dtype']}) on {machine.get('gpu', machine['cpu'])}: reads "
        f"{report['weights_bytes'] / 1e6:.0f} MB of weights at up to {rate:.1f} GB/s"
    )
    for name in ("batch", "tok/s", "of the limit", "step ms", "scheduler + cache ms", "bare loop tok/s"):
        table.add_column(name, justify="right")
    for result in results:
        bare = result.bare_tokens_per_s
        table.add_row(
            str(result.batch_size),
            f"{result.tokens_per_s:,.0f}",
            f"{result.limit_share:.0%}",
            f"{result.step_ms:.2f}",
            f"{result.host_ms:.3f}",
            "" if bare is None else f"{bare:,.0f} ({result.tokens_per_s / bare:.2f}x)",
        )
    Console().print(table)
