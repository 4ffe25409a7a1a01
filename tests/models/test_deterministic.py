"""Deterministic mode: logits bit for bit, however a sequence is cut into steps and whoever runs beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.engine.core import EngineCore
from paceline.models.attention import KVCache, PagedContext
from paceline.models.config import Qwen3Config
from paceline.models.qwen3 import Qwen3ForCausalLM, freeze, make_deterministic
from paceline.ops import RowLayout
from paceline.sampling.params import SamplingParams
from support.engines import complete, golden_core, golden_prompts

BLOCK = 16


class Steps:
    """A model and a paged cache, stepped by hand."""

    def __init__(self, model: Qwen3ForCausalLM, tokens: Sequence[Tensor], max_context: int) -> None:
        config = model.config
        self.model, self.tokens = model, tokens
        self.device = model.embed_tokens.weight.device
        self.max_context = max_context
        columns = -(-max(map(len, tokens)) // BLOCK)
        self.cache = KVCache.allocate(
            config.num_hidden_layers,
            len(tokens) * columns,
            BLOCK,
            config.num_key_value_heads,
            config.head_dim,
            dtype=model.embed_tokens.weight.dtype,
            device=self.device,
        )
        order = torch.randperm(len(tokens) * columns, generator=torch.Generator().manual_seed(1))
        self.tables = order.view(len(tokens), columns).to(torch.int32)
        self.computed = torch.zeros(len(tokens), dtype=torch.int32)
        self.logits: list[list[Tensor]] = [[] for _ in tokens]

    @torch.inference_mode()
    def step(self, spans: Iterable[tuple[int, int]]) -> None:
        """Forward (sequence, rows) pairs; rows beyond a sequence's end are left out."""
        spans = [(seq, min(n, len(self.tokens[seq]) - int(self.computed[seq]))) for seq, n in spans]
        slots = torch.tensor([seq for seq, _ in spans], dtype=torch.int32)
        rows = torch.tensor([n for _, n in spans])
        row_seq = torch.repeat_interleave(torch.arange(len(spans)), rows)
        positions = torch.cat([torch.arange(n) + int(self.computed[seq]) for seq, n in spans])
        block = self.tables[slots.long()[row_seq], positions // BLOCK].long()
        layout = RowLayout(
            slots=slots,
            row_start=torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int(),
            row_seq=row_seq.int(),
            positions=positions.int(),
            kv_slots=block * BLOCK + positions % BLOCK,
            block_tables=self.tables,
            num_computed=self.computed.clone(),
            host_rows=tuple(rows.tolist()),
            host_max_context=self.max_context,
        )
        for name, value in vars(layout).items():
            if isinstance(value, Tensor):
                setattr(layout, name, value.to(self.device))
        fed = torch.cat([self.tokens[seq][int(self.computed[seq]) :][:n] for seq, n in spans])
        context = PagedContext(self.cache, layout)
        hidden = self.model(fed.to(self.device), layout.positions, context).hidden
        parts = self.model.logits(hidden).cpu().split(rows.tolist())
        for (seq, n), part in zip(spans, parts, strict=True):
            self.logits[seq].append(part)
            self.computed[seq] += n

    def of(self, seq: int) -> Tensor:
        """[length, V] logits of a sequence that has been forwarded to its end."""
        assert int(self.computed[seq]) == len(self.tokens[seq])
        return torch.cat(self.logits[seq])


def small_model(dtype: torch.dtype, device: str, **changes: object) -> Qwen3ForCausalLM:
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 300,
        "hidden_size": 160,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    model = Qwen3ForCausalLM(Qwen3Config.from_dict({**values, **changes}), dtype=dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        parameter.data *= 1 if parameter.dim() == 1 else 5  # far from a uniform softmax
    model = model.to(device)
    freeze(model)
    return model


def check(model: Qwen3ForCausalLM, lengths: Sequence[int], cuts: Sequence[int]) -> None:
    """The first sequence in pieces of every size in ``cuts``, alone and beside the others."""
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(300, (length,), generator=generator) for length in lengths]
    whole = Steps(model, tokens, max(lengths))
    whole.step([(0, lengths[0])])
    for cut in cuts:
        for company in (False, True):
            steps = Steps(model, tokens, 4096 if company else max(lengths))
            turn = 0
            while steps.computed[0] < lengths[0]:
                spans = [(0, cut)]
                if company:
                    others = [seq for seq in range(1, len(lengths)) if steps.computed[seq] < lengths[seq]]
                    spans = [*((seq, 1 + (seq * 5 + turn) % 11) for seq in others), (0, cut)]
                steps.step(spans)
                turn += 1
            assert torch.equal(steps.of(0), whole.of(0)), f"pieces of {cut}, company: {company}"


def sliding(window: int) -> dict[str, object]:
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


@pytest.mark.parametrize("window", [None, 20])
def test_on_a_cpu(window: int | None) -> None:
    model = small_model(torch.float32, "cpu", **({} if window is None else sliding(window)))
    make_deterministic(model)
    check(model, [83, 40, 9, 61, 1, 30, 77, 50, 64], [1, 7, 8, 33])


def test_without_the_mode_bits_differ() -> None:
    """Else the test above shows nothing."""
    with pytest.raises(AssertionError, match="pieces of"):
        check(small_model(torch.float32, "cpu"), [83, 40, 9, 61], [1, 7, 8, 33])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 700])
def test_on_a_gpu(window: int | None, dtype: torch.dtype) -> None:
    """Long enough for several chunks of keys; products of a size that is split, in few rows and in many."""
    changes = {} if window is None else sliding(window)
    model = small_model(
        dtype,
        "cuda",
        hidden_size=2560,
        intermediate_size=4864,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        **changes,
    )
    make_deterministic(model)
    check(model, [1311, 40, 900, 61, 1, 300, 77, 550, 64], [8, 64, 100, 1000])


def test_an_engine_reports_the_same_logprobs_with_drafts_chunks_and_neighbours() -> None:
    prompts = golden_prompts(6)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)

    def logprobs(core: EngineCore, batch: list[list[int]]) -> list[list[dict[int, float]]]:
        """Per prompt and position, those of every token reported."""
        return [
            [
                {token: entry.logprob for token, entry in at.items()}
                for output in outputs
                for at in output.logprobs or ()
            ]
            for outputs in complete(core, batch, params)
        ]

    alone_core = golden_core("qwen3_tiny", deterministic=True, enable_prefix_caching=False)
    alone = [logprobs(alone_core, [prompt])[0] for prompt in prompts]
    assert all(len(found) == 12 for found in alone)
    drafter: dict[str, Any] = {"drafter": "dspark_tiny_b7"}
    for options in (
        {"max_num_batched_tokens": 7, "max_num_seqs": 6},
        {"num_blocks": 14},
        drafter,
        {**drafter, "num_blocks": 14, "max_num_seqs": 6, "max_num_batched_tokens": 11},
        {**drafter, "speculative_config": {"draft_state": "capture"}},
        {**drafter, "speculative_config": {"verify_planner": "auto"}, "lookahead": 1},
    ):
        core = golden_core("qwen3_tiny", deterministic=True, **options)
        for _ in ("cold", "prefixes cached"):
            assert logprobs(core, prompts) == alone, options
