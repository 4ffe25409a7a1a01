"""The ops as Triton kernels, for CUDA devices. Imported only when a tensor lives on one."""

from paceline.ops.triton.acceptance import advance, leading_matches, synthetic_matches
from paceline.ops.triton.activation import silu_mul
from paceline.ops.triton.attention import paged_attention
from paceline.ops.triton.drafts import draft_best, draft_candidates, draft_chain
from paceline.ops.triton.matmul import matmul
from paceline.ops.triton.norm import add_rms_norm, rms_norm
from paceline.ops.triton.qk_norm_rope import kv_norm_rope_write, qk_norm_rope_write
from paceline.ops.triton.rounds import allot_drafts, block_rows, packed_rows, place_drafts, span_rows
from paceline.ops.triton.slots import cache_slots

__all__ = [
    "add_rms_norm",
    "advance",
    "allot_drafts",
    "block_rows",
    "cache_slots",
    "draft_best",
    "draft_candidates",
    "draft_chain",
    "kv_norm_rope_write",
    "leading_matches",
    "matmul",
    "packed_rows",
    "paged_attention",
    "place_drafts",
    "qk_norm_rope_write",
    "rms_norm",
    "silu_mul",
    "span_rows",
    "synthetic_matches",
]
