"""Check and time every GPU op at Qwen3-4B's geometry, beside the memory limit.

    python benchmarks/ops_gpu.py --out benchmarks/results/ops_gpu.json [--sweep]

Each op is first compared with a float64 computation (its outputs start as NaN, so that an unwritten element
is seen) and run where waiting for the device is an error. Then it is timed twice with CUDA events: "cold",
the median of single calls with the L2 cache flushed before each, and "graph", a call's share of a replayed
CUDA graph of many calls, where launches cost nothing and small operands stay in L2. "limit" is the share of
the cold time that moving the bytes alone would take. Exits with 1 when a check fails. --sweep also times
attention under other tile sizes and split counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import ops
from paceline.ops import CommonKeys, RowLayout, reference
from paceline.ops.triton import attention as triton_attention
from paceline.ops.triton.attention_config import AttentionConfig, choose_config

HIDDEN, INTERMEDIATE = 2560, 9728
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
VOCAB, MARKOV_RANK = 151936, 256
EPS = 1e-6
DEVICE = "cuda"
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
GRAPH_CALLS = 20


@dataclass
class Case:
    """One op on one set of operands.

    Attributes:
        run: the op, as the engine calls it.
        exact: what ``run`` returns, then what ``effects`` returns, in float64.
        num_bytes: read and written once.
        flops: of the matrix products; 0 where there are none.
        peer: the same work by torch's own kernels, or None.
        effects: reads what ``run`` wrote in place.
        scene: the operands, where the op is attention.
    """

    op: str
    shape: str
    run: Callable[[], tuple[Tensor, ...]]
    exact: Callable[[], tuple[Tensor, ...]]
    num_bytes: int
    flops: int = 0
    peer: Callable[[], object] | None = None
    effects: Callable[[], tuple[Tensor, ...]] = tuple
    scene: AttentionScene | None = None


@dataclass
class Result:
    op: str
    shape: str
    error: float  # largest difference from float64 over the largest value
    passed: bool
    cold_us: float
    graph_us: float
    peer_us: float | None
    mebibytes: float
    limit: float  # share of the memory limit reached, cold
    tflops: float


@dataclass
class AttentionScene:
    """Paged operands of one attention call."""

    spans: list[tuple[int, int]]  # (computed, rows) of each sequence
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    layout: RowLayout

    def run(self, config: AttentionConfig | None = None) -> tuple[Tensor, ...]:
        operands = (self.q, self.k_cache, self.v_cache, self.layout, HEAD_DIM**-0.5)
        if config is None:
            return (ops.paged_attention(*operands),)
        return (triton_attention.paged_attention(*operands, config=config),)

    def dense(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """q [H, rows, D], k and v [KV, keys, D] of each sequence."""
        starts, block_size = self.layout.row_start.tolist(), self.k_cache.shape[1]
        for seq, (computed, rows) in enumerate(self.spans):
            num_blocks = -(-(computed + rows) // block_size)
            blocks = self.layout.block_tables[seq, :num_blocks].long()
            k, v = (
                cache[blocks].flatten(0, 1)[: computed + rows].transpose(0, 1)
                for cache in (self.k_cache, self.v_cache)
            )
            yield self.q[starts[seq] : starts[seq] + rows].transpose(0, 1), k, v

    def exact(self) -> tuple[Tensor, ...]:
        outs = []
        for (computed, rows), (q, k, v) in zip(self.spans, self.dense(), strict=True):
            k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
            scores = (q.double() @ k.transpose(1, 2)) * HEAD_DIM**-0.5
            query = torch.arange(computed, computed + rows, device=DEVICE)[:, None]
            hidden = torch.arange(computed + rows, device=DEVICE) > query
            outs.append((scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        return (torch.cat(outs),)


def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def attention_scene(
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    block_size: int = 16,
    max_context: int | None = None,
    common: int = 0,
) -> AttentionScene:
    """Sequences whose blocks are scattered over the cache at random; all share the first ``common`` keys."""
    lengths = [computed + rows for computed, rows in spans]
    blocks_of = [-(-length // block_size) for length in lengths]
    ids = iter(torch.randperm(sum(blocks_of)).tolist())
    tables = torch.zeros(len(spans), max(blocks_of), dtype=torch.int32)
    for seq, count in enumerate(blocks_of):
        tables[seq, :count] = torch.tensor(list(itertools.islice(ids, count)), dtype=torch.int32)
    tables[:, : common // block_size] = tables[0, : common // block_size]
    rows = torch.tensor([rows for _, rows in spans])
    row_seq = torch.repeat_interleave(torch.arange(len(spans)), rows).int()
    positions = torch.cat([torch.arange(computed, computed + n) for computed, n in spans]).int()
    blocks = tables[row_seq, positions // block_size].long()
    cache_shape = (sum(blocks_of), block_size, KV_HEADS, HEAD_DIM)
    layout = RowLayout(
        slots=torch.arange(len(spans), dtype=torch.int32, device=DEVICE),
        row_start=F.pad(rows.cumsum(0), (1, 0)).int().to(DEVICE),
        row_seq=row_seq.to(DEVICE),
        positions=positions.to(DEVICE),
        kv_slots=(blocks * block_size + positions % block_size).to(DEVICE),
        block_tables=tables.to(DEVICE),
        num_computed=torch.tensor([c for c, _ in spans], dtype=torch.int32, device=DEVICE),
        host_rows=tuple(rows.tolist()),
        host_max_context=max_context or max(lengths),
    )
    if common:
        groups = [[0, int(rows.sum())], [0], [common], [common] * len(spans)]
        layout.common = CommonKeys(*(torch.tensor(g, dtype=torch.int32, device=DEVICE) for g in groups))
    return AttentionScene(
        spans,
        tensor(int(rows.sum()), HEADS, HEAD_DIM, dtype=dtype),
        tensor(*cache_shape, dtype=dtype),
        tensor(*cache_shape, dtype=dtype),
        layout,
    )


def rowwise_cases(num_rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Norms, SwiGLU and the step from qkv to attention, on R rows."""
    size = torch.empty(0, dtype=dtype).element_size()
    x, residual = tensor(num_rows, HIDDEN, dtype=dtype), tensor(num_rows, HIDDEN, dtype=dtype)
    weight = tensor(HIDDEN, dtype=dtype)
    x64, total64, weight64 = x.double(), (x + residual).double(), weight.double()

    def norm64(values: Tensor, weights: Tensor) -> Tensor:
        return values / (values.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weights

    yield Case(
        "rms_norm",
        f"R={num_rows}",
        lambda: (ops.rms_norm(x, weight, EPS),),
        lambda: (norm64(x64, weight64),),
        2 * num_rows * HIDDEN * size,
        peer=lambda: F.rms_norm(x, (HIDDEN,), weight, EPS),
    )
    yield Case(
        "add_rms_norm",
        f"R={num_rows}",
        lambda: ops.add_rms_norm(x, residual, weight, EPS),
        lambda: (norm64(total64, weight64), total64),
        4 * num_rows * HIDDEN * size,
        peer=lambda: F.rms_norm(x + residual, (HIDDEN,), weight, EPS),
    )
    gate_up = tensor(num_rows, 2 * INTERMEDIATE, dtype=dtype)
    gate64, up64 = gate_up.double().chunk(2, dim=-1)
    yield Case(
        "silu_mul",
        f"R={num_rows}",
        lambda: (ops.silu_mul(gate_up),),
        lambda: (F.silu(gate64) * up64,),
        3 * num_rows * INTERMEDIATE * size,
        peer=lambda: reference.silu_mul(gate_up),
    )
    yield qk_case(num_rows, dtype, size)


def qk_case(num_rows: int, dtype: torch.dtype, size: int) -> Case:
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv, q_norm, k_norm = (tensor(*s, dtype=dtype) for s in ((num_rows, width), (HEAD_DIM,), (HEAD_DIM,)))
    frequencies = 1e6 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = torch.arange(40960, dtype=torch.float64)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(DEVICE)
    positions = torch.randint(0, 40960, (num_rows,), dtype=torch.int32, device=DEVICE)
    kv_slots = torch.randperm(max(num_rows, 16) // 16 * 32, device=DEVICE)[:num_rows]
    shape = (max(num_rows, 16) // 16 * 2, 16, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = torch.zeros(2, *shape, dtype=dtype, device=DEVICE).unbind()

    def run() -> tuple[Tensor, ...]:
        q = ops.qk_norm_rope_write(qkv, q_norm, k_norm, EPS, table, positions, kv_slots, k_cache, v_cache)
        return (q,)

    def exact() -> tuple[Tensor, ...]:
        heads = qkv.double().view(num_rows, -1, HEAD_DIM)
        qk = heads[:, :-KV_HEADS]
        norm = torch.cat((q_norm.expand(HEADS, -1), k_norm.expand(KV_HEADS, -1))).double()
        qk = qk / (qk.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm
        cos, sin = table[positions.long()].double().unsqueeze(1).chunk(2, dim=-1)
        low, high = qk.chunk(2, dim=-1)
        qk = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        return qk[:, :HEADS], qk[:, HEADS:], heads[:, -KV_HEADS:]

    return Case(
        "qk_norm_rope_write",
        f"R={num_rows}",
        run,
        exact,
        num_rows * (2 * width * size + HEAD_DIM * 4),
        effects=lambda: (k_cache.flatten(0, 1)[kv_slots], v_cache.flatten(0, 1)[kv_slots]),
    )


def draft_case(num_rows: int, dtype: torch.dtype) -> Case:
    """One slot of DSpark's chain: the op's choice is scored in float64, and must score the most."""
    size = torch.empty(0, dtype=dtype).element_size()
    logits, table = tensor(num_rows, VOCAB, dtype=dtype), tensor(VOCAB, MARKOV_RANK, dtype=dtype)
    weight, rows = tensor(VOCAB, MARKOV_RANK, dtype=dtype), torch.randint(VOCAB, (num_rows,), device=DEVICE)
    low_rank = ops.LowRank(table, rows, weight)

    def scores() -> Tensor:
        return logits.double() + table[rows].double() @ weight.double().T

    def chosen() -> tuple[Tensor, ...]:
        return (scores().gather(1, ops.draft_best(logits[:, None], low_rank)[:, 0]),)

    def run() -> tuple[Tensor, ...]:
        ops.draft_best(logits[:, None], low_rank)
        return ()

    return Case(
        "draft_best",
        f"R={num_rows}",
        run,
        lambda: (scores().amax(1, keepdim=True),),
        (VOCAB * MARKOV_RANK + num_rows * VOCAB) * size,
        flops=2 * num_rows * VOCAB * MARKOV_RANK,
        peer=lambda: (logits.float() + F.linear(table[rows], weight).float()).argmax(-1),
        effects=chosen,
    )


def candidate_cases(num_blocks: int, dtype: torch.dtype) -> Iterator[Case]:
    """DSpark's chains among candidates: what these are, and the seven steps. The first token of a chain must
    score the most among the slot's candidates and successors in float64.
    """
    size, slots, count = torch.empty(0, dtype=dtype).element_size(), 7, 256
    logits = tensor(num_blocks, slots, VOCAB, dtype=dtype)
    yield Case(
        "draft_candidates",
        f"N={num_blocks}",
        lambda: (logits.gather(2, ops.draft_candidates(logits, None, count).long()),),
        lambda: (logits.gather(2, ops.best_of_buckets(logits.float(), count).long()),),
        num_blocks * slots * VOCAB * size,
        peer=lambda: logits.topk(count, dim=-1),
    )
    table, weight = tensor(VOCAB, MARKOV_RANK, dtype=dtype), tensor(VOCAB, MARKOV_RANK, dtype=dtype)
    successors = torch.randint(VOCAB, (VOCAB, count // 2), device=DEVICE, dtype=torch.int32)
    head = ops.ChainHead(table, weight, successors)
    anchors = torch.randint(VOCAB, (num_blocks,), device=DEVICE, dtype=torch.int32)
    candidates = ops.Candidates(logits, ops.draft_candidates(logits, None, count), None)

    def scores() -> Tensor:
        return logits[:, 0].double() + table[anchors].double() @ weight.double().T

    def most() -> tuple[Tensor, ...]:
        among = torch.cat((candidates.ids[:, 0], successors[anchors]), dim=1).long()
        return (scores().gather(1, among).amax(1, keepdim=True),)

    def run() -> tuple[Tensor, ...]:
        ops.draft_chain(candidates, anchors, head)
        return ()

    yield Case(
        "draft_chain",
        f"N={num_blocks}",
        run,
        most,
        num_blocks * slots * (count + count // 2) * MARKOV_RANK * size,
        effects=lambda: (scores().gather(1, ops.draft_chain(candidates, anchors, head)[:, 0, :1]),),
    )


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Decode rows, verify spans, prefill chunks and a mixed step."""
    decode = {
        "decode 1 x 1k": [(1023, 1)],
        "decode 1 x 8k": [(8191, 1)],
        "decode 1 x 32k": [(32767, 1)],
        "decode 8 x 4k": [(4095, 1)] * 8,
        "decode 32 x 2k": [(2047, 1)] * 32,
        "decode 128 x 1k": [(1023, 1)] * 128,
        "span 1 x 8 at 4k": [(4088, 8)],
        "span 1 x 16 at 4k": [(4080, 16)],
        "span 16 x 8 at 2k": [(2040, 8)] * 16,
        "prefill 2048": [(0, 2048)],
        "prefill 512 after 8k": [(8192, 512)],
        "mixed 512 + 32 x 2k": [(0, 512)] + [(2047, 1)] * 32,
    }
    for name, spans in decode.items():
        yield attention_case(name, attention_scene(spans, dtype))
    yield attention_case("decode 1 x 1k, bound 32k", attention_scene([(1023, 1)], dtype, max_context=32768))
    yield attention_case("decode 32 x 2k, blocks of 64", attention_scene([(2047, 1)] * 32, dtype, 64))
    for rows in (1, 8):
        scene = attention_scene([(4020, rows)] * 96, dtype, common=4000)
        yield attention_case(f"96 x {rows} at 4k, 4,000 keys in common", scene, common=4000)


def attention_case(name: str, scene: AttentionScene, common: int = 0) -> Case:
    size = scene.q.element_size()
    rows = scene.q.shape[0]
    keys = common + sum(computed + n - common for computed, n in scene.spans)
    pairs = sum(n * computed + n * (n + 1) // 2 for computed, n in scene.spans)
    peer: Callable[[], object] | None = None
    (computed, n), *others = scene.spans
    if not others and (n == 1 or computed == 0):
        q, k, v = (x.unsqueeze(0).contiguous() for x in next(scene.dense()))

        def peer() -> object:
            return F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=True)

    return Case(
        "paged_attention",
        name,
        scene.run,
        scene.exact,
        (2 * rows * HEADS + 2 * keys * KV_HEADS) * HEAD_DIM * size,
        flops=4 * pairs * HEADS * HEAD_DIM,
        peer=peer,
        scene=scene,
    )


class Timer:
    """CUDA-event times. Holds the buffer that is overwritten to empty the L2 cache."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._flush = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)

    def cold_us(self, run: Callable[[], object]) -> float:
        run()
        pairs = []
        for _ in range(self.repeats):
            # long enough for the host to queue the op behind it: launch time stays out of the measure
            self._flush.zero_()
            pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            pairs[-1][0].record()
            run()
            pairs[-1][1].record()
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) * 1e3

    def graph_us(self, run: Callable[[], object]) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                run()
        times = []
        for _ in range(self.repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / GRAPH_CALLS)
        return float(statistics.median(times))


def error_of(case: Case) -> float:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns with NaN
    outs = (*case.run(), *case.effects())
    torch.use_deterministic_algorithms(False)
    worst = 0.0
    for out, exact in zip(outs, case.exact(), strict=True):
        difference = (out.double() - exact).abs().max() / exact.abs().max()
        worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
    return worst


def measure(case: Case, timer: Timer, dtype: torch.dtype, bandwidth: float) -> Result:
    error = error_of(case)
    torch.cuda.set_sync_debug_mode("error")  # no op may wait for the device
    case.run()
    torch.cuda.set_sync_debug_mode("default")
    cold = timer.cold_us(case.run)
    return Result(
        op=case.op,
        shape=case.shape,
        error=error,
        passed=error <= TOLERANCE[dtype],
        cold_us=cold,
        graph_us=timer.graph_us(case.run),
        peer_us=timer.cold_us(case.peer) if case.peer else None,
        mebibytes=case.num_bytes / 2**20,
        limit=case.num_bytes / (cold * 1e-6) / bandwidth,
        tflops=case.flops / cold / 1e6,
    )


def sweep(case: Case, timer: Timer) -> list[dict[str, object]]:
    """Cold times of other ways to cut the same attention up, fastest first."""
    assert case.scene is not None
    scene, group = case.scene, HEADS // KV_HEADS
    chosen = choose_config(
        scene.layout,
        scene.q.shape[0],
        group,
        KV_HEADS,
        scene.q.dtype,
        torch.cuda.get_device_properties(DEVICE).multi_processor_count,
    )
    timings: list[dict[str, object]] = []
    tiles = {chosen.block_m, 64} if chosen.block_m >= 32 else {chosen.block_m}
    splits = sorted({max(1, int(chosen.num_splits * f)) for f in (0.5, 1, 2)} | {1})
    for block_m, block_n, num_splits, warps, stages, split_keys in itertools.product(
        tiles, (32, 64, 128), splits, (chosen.num_warps // 2, chosen.num_warps), (2, 3, 4), (64, 192, 320)
    ):
        if num_splits == 1 and split_keys != chosen.split_keys:
            continue
        config = AttentionConfig(block_m, block_n, num_splits, warps, stages, split_keys, whole=block_m > 64)
        try:
            took = timer.cold_us(lambda config=config: scene.run(config))  # type: ignore[misc]
        except Exception as error:  # a tile that does not fit in shared memory
            print(f"  {config}: {type(error).__name__}", file=sys.stderr)
            continue
        timings.append({"us": took, "chosen": config == chosen, **asdict(config)})
    return sorted(timings, key=lambda timing: float(str(timing["us"])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--bandwidth-tb-s", type=float, default=4.2, help="memory bandwidth of the device")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--only", default="", help="cases whose 'op shape' contains this")
    parser.add_argument("--sweep", action="store_true", help="also try other attention configurations")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: this benchmark measures GPU kernels")
    torch.manual_seed(0)
    dtype, timer = getattr(torch, args.dtype), Timer(args.repeats)
    cases = itertools.chain(
        *(rowwise_cases(num_rows, dtype) for num_rows in (1, 8, 64, 1024, 8192)),
        (draft_case(num_rows, dtype) for num_rows in (1, 8, 64, 128)),
        *(candidate_cases(num_blocks, dtype) for num_blocks in (1, 8, 32)),
        attention_cases(dtype),
    )
    began = time.perf_counter()
    results, sweeps = [], {}
    columns = f"{'error':>9}{'cold us':>9}{'graph us':>9}{'torch us':>9}{'MiB':>8}{'limit':>7}{'TFLOP/s':>8}"
    print(f"{'op':19}{'shape':29}{columns}")
    with torch.inference_mode():
        for case in cases:
            if args.only not in f"{case.op} {case.shape}":
                continue
            r = measure(case, timer, dtype, args.bandwidth_tb_s * 1e12)
            results.append(r)
            peer = f"{r.peer_us:9.1f}" if r.peer_us else f"{'-':>9}"
            print(
                f"{r.op:19}{r.shape:29}{r.error:9.1e}{r.cold_us:9.1f}{r.graph_us:9.1f}{peer}"
                f"{r.mebibytes:8.1f}{r.limit:7.1%}{r.tflops:8.1f}{'' if r.passed else '  FAILED'}",
                flush=True,
            )
            if args.sweep and case.scene:
                sweeps[case.shape] = sweep(case, timer)[:5]
                for timing in sweeps[case.shape]:
                    print(f"    {timing}", flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "geometry": f"hidden {HIDDEN}, {HEADS}/{KV_HEADS} heads x {HEAD_DIM}, intermediate {INTERMEDIATE}",
        "dtype": args.dtype,
        "bandwidth_tb_s": args.bandwidth_tb_s,
        "seconds": time.perf_counter() - began,
        "results": [asdict(result) for result in results],
        "sweeps": sweeps,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [result for result in results if not result.passed]
    print(f"{len(results) - len(failed)} of {len(results)} checks passed; wrote {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
