"""Stage 7: held-out bits per byte, completions of function headers, and sample conversations.

Bits per byte: every Python file of the held-out packages, preceded by ``<|endoftext|>``, is scored in
sliding windows (each window but the first scores its second half, so a token sees at least half a
window); the sum of negative log-likelihoods over all tokens is divided by the sum of the files' UTF-8
bytes. Completions: signature and docstring in, greedy decoding, cut where the function's block ends; one
counts when the whole parses with ``ast`` and adds at least one statement after the docstring.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from paceline import ops
from paceline.models.attention import AttentionSpec, DenseCausalContext, split_heads
from paceline.models.loader import load_model
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.models.rope import apply_rope
from pretrain.common import CONTEXT_LEN, END_OF_TEXT, IM_END, IM_START

MAX_NEW_TOKENS = 200
CHATS = (
    "Hello!",
    "Who are you?",
    "What is Paceline?",
    "How do I reverse a list in Python?",
    "What is a decorator?",
    "Write a Python function that returns the sum of two numbers.",
    "Write a Python function that checks if a string is a palindrome.",
    "Write a function that reads a JSON file and returns its contents.",
    "Write a class that represents a rectangle.",
    "What does this function do?\n\n```python\ndef f(items):\n    return sorted(set(items))\n```",
    "Explain HTTP caching.",
    "Thanks!",
)


@torch.no_grad()
def token_nats(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Negative log-likelihood of each token from the ones before it, [B, S + 1] -> fp32 [B, S]."""
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(tokens.shape[0], -1)
    hidden = model(tokens[:, :-1], positions, DenseCausalContext()).hidden
    logits = model.logits(hidden).float()
    return logits.logsumexp(-1) - logits.gather(2, tokens[:, 1:, None]).squeeze(2)


def bits_per_byte(
    model: Qwen3ForCausalLM, files: list[dict[str, Any]], window: int, rows: int
) -> dict[str, Any]:
    """Total bits over total bytes, overall and by package."""
    device = model.embed_tokens.weight.device
    pieces: list[tuple[str, list[int], int]] = []  # package, tokens of the window, first scored target
    for file in files:
        ids = [END_OF_TEXT, *file["ids"]]
        pieces += [
            (file["package"], ids[start : start + window + 1], window // 2 if start else 0)
            for start in range(0, max(1, len(ids) - 1 - window // 2), window // 2)
        ]
    pieces.sort(key=lambda piece: len(piece[1]))
    nats: dict[str, float] = {}
    scored = 0
    for at in range(0, len(pieces), rows):
        group = pieces[at : at + rows]
        longest = max(len(ids) for _, ids, _ in group)
        batch = torch.full((len(group), longest), END_OF_TEXT, device=device)
        for row, (_, ids, _) in enumerate(group):
            batch[row, : len(ids)] = torch.tensor(ids, device=device)
        loss = token_nats(model, batch).double().cpu()
        for row, (package, ids, first) in enumerate(group):
            part = loss[row, first : len(ids) - 1]
            nats[package] = nats.get(package, 0.0) + float(part.sum())
            scored += part.numel()
    num_bytes: dict[str, int] = {}
    for file in files:
        num_bytes[file["package"]] = num_bytes.get(file["package"], 0) + file["num_bytes"]
    total_bytes = sum(num_bytes.values())
    if scored != sum(len(file["ids"]) for file in files):
        raise RuntimeError("the windows do not tile the files")
    return {
        "window": window,
        "stride": window // 2,
        "files": len(files),
        "bytes": total_bytes,
        "tokens": scored,
        "bits_per_byte": round(sum(nats.values()) / math.log(2) / total_bytes, 4),
        "nats_per_token": round(sum(nats.values()) / scored, 4),
        "by_package": {p: round(nats[p] / math.log(2) / num_bytes[p], 4) for p in sorted(nats)},
    }


class GrowingContext:
    """Attention over a dense cache, for greedy decoding of a padded batch.

    A row's K and V go to its position, so what padding wrote is overwritten before a query can see it.

    Args:
        num_layers: layers of the model.
        rows: batch size.
        capacity: positions that fit.
    """

    def __init__(self, num_layers: int, rows: int, capacity: int) -> None:
        self._num_layers, self._rows, self._capacity = num_layers, rows, capacity
        self._cache: list[Tensor] = []

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
        """See ``AttentionContext.attend``; rows are [B, S]."""
        q, k, v = split_heads(qkv, spec)  # [B, S, heads, D]
        angles = cos_sin[positions]
        q = apply_rope(ops.rms_norm(q, q_norm, spec.eps), angles)
        k = apply_rope(ops.rms_norm(k, k_norm, spec.eps), angles)
        if not self._cache:
            shape = (2 * self._num_layers, self._rows, self._capacity, spec.num_kv_heads, spec.head_dim)
            self._cache = list(qkv.new_zeros(shape).unbind(0))
        keys, values = self._cache[2 * layer : 2 * layer + 2]  # [B, capacity, KV, D]
        row = torch.arange(qkv.shape[0], device=qkv.device)[:, None]
        keys[row, positions], values[row, positions] = k, v
        mask = torch.arange(self._capacity, device=qkv.device) <= positions[..., None]  # [B, S, capacity]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask[:, None],
            scale=spec.scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(-2)


@torch.no_grad()
def greedy(
    model: Qwen3ForCausalLM, prompts: list[list[int]], new_tokens: int, stop: set[int], rows: int = 25
) -> list[list[int]]:
    """Greedy continuations, a stop id cut off."""
    out: list[list[int]] = []
    device = model.embed_tokens.weight.device
    for at in range(0, len(prompts), rows):
        group = prompts[at : at + rows]
        lengths = torch.tensor([len(ids) for ids in group], device=device)
        longest = max(map(len, group))
        tokens = torch.tensor([ids + [END_OF_TEXT] * (longest - len(ids)) for ids in group], device=device)
        positions = torch.arange(longest, device=device).expand(len(group), -1)
        context = GrowingContext(model.config.num_hidden_layers, len(group), longest + new_tokens)
        hidden = model(tokens, positions, context).hidden[
            torch.arange(len(group), device=device), lengths - 1
        ]
        chosen = [model.logits(hidden).argmax(-1)]
        for step in range(new_tokens - 1):
            hidden = model(chosen[-1][:, None], (lengths + step)[:, None], context).hidden[:, 0]
            chosen.append(model.logits(hidden).argmax(-1))
        for new in torch.stack(chosen, dim=1).tolist():
            end = next((i for i, token in enumerate(new) if token in stop), None)
            out.append(new if end is None else new[:end])
    return out


def cut_function(completion: str) -> tuple[str, bool]:
    """``completion`` up to the end of the function's block, and whether that end was reached."""
    lines = completion.split("\n")
    for number, line in enumerate(lines):
        if line.strip() and not line[0].isspace() and line[0] not in ")]}":
            return "\n".join(lines[:number]).rstrip() + "\n", True
    return completion, False


def _parses(source: str) -> bool:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return False
    function = tree.body[0] if tree.body else None
    return isinstance(function, ast.FunctionDef) and len(function.body) >= 2


def complete_headers(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: list[dict[str, str]]
) -> dict[str, Any]:
    """Greedy bodies for function headers and how many of them parse."""
    encoded = [[END_OF_TEXT, *tokenizer.encode(prompt["prompt"]).ids] for prompt in prompts]
    outputs = greedy(model, encoded, MAX_NEW_TOKENS, {END_OF_TEXT, IM_END})
    samples = []
    for prompt, ids in zip(prompts, outputs, strict=True):
        body, ended = cut_function(tokenizer.decode(ids))
        ended = ended or len(ids) < MAX_NEW_TOKENS
        whole_lines = body if ended else body[: body.rfind("\n") + 1]
        samples.append(
            {
                **prompt,
                "completion": body,
                "ended": ended,
                "parses": _parses(prompt["prompt"] + body),
                "parses_whole_lines": _parses(prompt["prompt"] + whole_lines),
            }
        )
    return {
        "prompts": len(samples),
        "max_new_tokens": MAX_NEW_TOKENS,
        "parse": sum(bool(s["parses"]) for s in samples),
        "parse_whole_lines": sum(bool(s["parses_whole_lines"]) for s in samples),
        "ended": sum(bool(s["ended"]) for s in samples),
        "samples": samples,
    }


def chat(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Greedy answers to a few questions."""
    prompts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in CHATS]
    outputs = greedy(model, [tokenizer.encode(p).ids for p in prompts], 160, {END_OF_TEXT, IM_END, IM_START})
    return [{"user": q, "assistant": tokenizer.decode(ids)} for q, ids in zip(CHATS, outputs, strict=True)]


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="eval.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-files", type=int, default=0, help="score the first files only (0: all)")
    args = parser.parse_args()
    model = load_model(args.model, device=args.device)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    with lzma.open(args.shards / "heldout.json.xz", "rt") as handle:
        data = json.load(handle)
    files = data["files"][: args.max_files or None]
    long_files = [file for file in files if len(file["ids"]) > CONTEXT_LEN // 2]
    report: dict[str, Any] = {"heldout": bits_per_byte(model, files, 1024, args.rows)}
    if long_files:  # does context beyond the short training length help?
        report["long_files"] = [
            bits_per_byte(model, long_files, w, args.rows // 4 or 1) for w in (1024, 2048, CONTEXT_LEN)
        ]
    report["headers"] = complete_headers(model, tokenizer, data["prompts"])
    report["chat"] = chat(model, tokenizer)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    headers = report["headers"]
    print("evaluate:", json.dumps(report["heldout"]), flush=True)
    print("evaluate: long files", [r["bits_per_byte"] for r in report.get("long_files", [])], flush=True)
    print("evaluate: headers", {k: v for k, v in headers.items() if k != "samples"}, flush=True)
    for turn in report["chat"]:
        print(json.dumps(turn), flush=True)


if __name__ == "__main__":
    main()
