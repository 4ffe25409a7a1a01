"""Stage 5: token shards for training and evaluation.

A stream becomes one sequence of uint16 ids: each document followed by ``<|endoftext|>``, documents in a
fixed shuffled order. Shards are xz files of little-endian ids, about ``SHARD_TOKENS`` each.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import random
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pretrain.common import END_OF_TEXT, U16_FILTERS

SHARD_TOKENS = 5_000_000
# A run of some minutes sees every token about ten times; more text than this would change little.
MAX_TEXT_CHARS = {"code": 320_000_000, "prose": 110_000_000, "instruct": 50_000_000}
NUM_PROMPTS = 100


def documents(path: Path, max_bytes: int) -> list[str]:
    """The texts of a corpus file in a fixed shuffled order, about ``max_bytes`` of them."""
    with path.open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    random.Random(1).shuffle(texts)
    kept, total = [], 0
    for text in texts:
        total += len(text)
        if total > max_bytes:
            break
        kept.append(text)
    return kept


def encode_stream(tokenizer: Tokenizer, texts: list[str], special: bool) -> Iterator[np.ndarray]:
    """Ids of each document, ``<|endoftext|>`` appended. ``special``: whether ChatML markers are specials."""
    tokenizer.encode_special_tokens = not special
    pending = iter(texts)
    while batch := list(islice(pending, 256)):
        for encoding in tokenizer.encode_batch_fast(batch):
            yield np.asarray([*encoding.ids, END_OF_TEXT], dtype=np.uint16)


def _compress(path: Path, raw: bytes) -> int:
    path.write_bytes(lzma.compress(raw, format=lzma.FORMAT_XZ, filters=U16_FILTERS))
    return path.stat().st_size


def pack_stream(
    tokenizer: Tokenizer, corpus: Path, shards: Path, stream: str, pool: ProcessPoolExecutor
) -> dict[str, int]:
    """Write the shards of one stream; returns its size in documents, bytes of text and tokens."""
    texts = documents(corpus / f"{stream}.jsonl", MAX_TEXT_CHARS[stream])
    jobs: list[Future[int]] = []
    pieces: list[np.ndarray] = []
    held = num_tokens = 0

    def flush() -> None:
        nonlocal pieces, held
        jobs.append(
            pool.submit(
                _compress, shards / f"{stream}-{len(jobs):02d}.u16.xz", np.concatenate(pieces).tobytes()
            )
        )
        pieces, held = [], 0

    for ids in encode_stream(tokenizer, texts, special=stream == "instruct"):
        pieces.append(ids)
        held += len(ids)
        num_tokens += len(ids)
        if held >= SHARD_TOKENS:
            flush()
    if pieces:
        flush()
    sizes = {
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "tokens": num_tokens,
    }
    print(f"pack: {stream} {sizes}, {sum(job.result() for job in jobs):,} bytes packed", flush=True)
    return sizes


def header_prompts(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Function headers (signature and docstring) spread over the held-out packages, at most three a file.

    Documented top-level functions and methods of at least three statements; methods are dedented.
    """
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        lines = row["text"].split("\n")
        candidates = []
        for node in ast.walk(ast.parse(row["text"])):
            if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 3:
                continue
            end = node.body[0].end_lineno
            columns = node.col_offset
            header = lines[node.lineno - 1 : end]
            if end is None or any(line[:columns].strip() for line in header):
                continue
            # Whole lines: the end of the docstring and its newline are one token.
            text = "\n".join(line[columns:] for line in header) + "\n"
            if 60 <= len(text) <= 900 and not node.name.startswith("__"):
                candidates.append(
                    {"package": row["package"], "path": row["path"], "name": node.name, "prompt": text}
                )
        candidates.sort(key=lambda c: zlib.crc32((c["path"] + c["name"]).encode()))
        found.setdefault(row["package"], []).extend(candidates[:3])
    for group in found.values():
        group.sort(key=lambda c: zlib.crc32((c["name"] + c["path"]).encode()))
    prompts: list[dict[str, str]] = []
    depth = 0
    while len(prompts) < NUM_PROMPTS and any(len(group) > depth for group in found.values()):
        prompts += [group[depth] for _, group in sorted(found.items()) if len(group) > depth]
        depth += 1
    return prompts[:NUM_PROMPTS]


def pack_heldout(tokenizer: Tokenizer, corpus: Path, shards: Path) -> None:
    """Write ``heldout.json.xz``: the held-out files' ids and byte counts, and the header prompts."""
    with (corpus / "heldout.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    tokenizer.encode_special_tokens = True
    heldout = [
        {
            "package": row["package"],
            "path": row["path"],
            "num_bytes": len(row["text"].encode()),
            "ids": tokenizer.encode(row["text"]).ids,
        }
        for row in rows
    ]
    with lzma.open(shards / "heldout.json.xz", "wt") as out:
        json.dump({"files": heldout, "prompts": header_prompts(rows)}, out)
    print(
        f"pack: {len(heldout)} held-out files, {sum(row['num_bytes'] for row in heldout):,} bytes", flush=True
    )


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    corpus, shards = args.data / "corpus", args.data / "shards"
    shards.mkdir(exist_ok=True)
    for old in shards.glob("*.xz"):
        old.unlink()
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer" / "tokenizer.json"))
    pack_heldout(tokenizer, corpus, shards)
    with ProcessPoolExecutor(1) as pool:
        totals = {
            stream: pack_stream(tokenizer, corpus, shards, stream, pool)
            for stream in ("instruct", "prose", "code")
        }
    (shards / "totals.json").write_text(json.dumps(totals, indent=2) + "\n")


if __name__ == "__main__":
    main()
