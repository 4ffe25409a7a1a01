"""Stage 1: prompts for the bundled model to answer, as token ids.

Training prompts come from the texts the model was trained on: conversations cut where an answer begins,
function headers, beginnings of code and documentation, some of them long. Held-out prompts come from the
packages it never saw. The order is shuffled, so that a run which stops early has seen every kind.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import math
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from paceline.training.documents import Documents

RECIPES = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(RECIPES / "mini"))
from pretrain.common import END_OF_TEXT, VOCAB_SIZE  # noqa: E402
from pretrain.instruct import pairs_from_source  # noqa: E402
from pretrain.pack import header_prompts  # noqa: E402

ASSISTANT = "<|im_start|>assistant\n"
COUNTS = {"chat": 10_000, "header": 5_000, "code": 9_000, "prose": 3_000, "long": 400}
HELDOUT = {"code": 80, "chat": 60}  # besides the 100 function headers of the model's own evaluation
LONGEST = 3_000
_CODE_STRIDE = 3  # documents taken of the largest corpus: every so many


def texts(path: Path, stride: int = 1) -> list[str]:
    """Every ``stride``-th text of a corpus file."""
    with path.open() as lines:
        return [json.loads(line)["text"] for number, line in enumerate(lines) if number % stride == 0]


def chats(path: Path, draw: random.Random) -> Iterator[str]:
    """Conversations up to where one of their answers begins."""
    rows = texts(path)
    draw.shuffle(rows)
    for text in rows:
        ends = [i + len(ASSISTANT) for i in range(len(text)) if text.startswith(ASSISTANT, i)]
        if ends:
            yield text[: draw.choice(ends)]


def headers(documents: list[str], draw: random.Random) -> Iterator[str]:
    """Signatures with docstrings, dedented, one per document."""
    for text in documents:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        rows = [{"package": "", "path": "", "text": text}]
        if any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree)):
            found = header_prompts(rows)
            if found:
                yield draw.choice(found)["prompt"]


class Cutter:
    """Beginnings of documents, as ids."""

    def __init__(self, tokenizer: Tokenizer, draw: random.Random) -> None:
        self._tokenizer, self._draw = tokenizer, draw

    def cut(self, text: str, shortest: int, longest: int, from_start: bool) -> list[int] | None:
        """A log-uniform number of tokens from the start of the text or of one of its lines."""
        draw = self._draw
        if not from_start:
            lines = text.split("\n")
            text = "\n".join(lines[draw.randrange(max(1, len(lines) // 2)) :])
        ids: list[int] = self._tokenizer.encode(text[: 6 * longest]).ids
        length = round(math.exp(draw.uniform(math.log(shortest), math.log(longest))))
        if len(ids) < length + 8:
            return None
        opening = [END_OF_TEXT] if from_start and draw.random() < 0.5 else []
        return opening + ids[:length]


def training_prompts(corpus: Path, tokenizer: Tokenizer, seed: int) -> list[list[int]]:
    """All training prompts, shuffled."""
    draw = random.Random(seed)
    cutter = Cutter(tokenizer, draw)
    tokenizer.encode_special_tokens = False
    found = [
        tokenizer.encode(text).ids for text in islice(chats(corpus / "instruct.jsonl", draw), COUNTS["chat"])
    ]
    tokenizer.encode_special_tokens = True
    code = texts(corpus / "code.jsonl", _CODE_STRIDE)
    draw.shuffle(code)
    found += [
        [END_OF_TEXT] * (draw.random() < 0.3) + tokenizer.encode(text).ids
        for text in islice(headers(code, draw), COUNTS["header"])
    ]
    prose = texts(corpus / "prose.jsonl")
    draw.shuffle(prose)
    plans = (
        ("code", code, 8, 512, 0.5),
        ("prose", prose, 8, 512, 0.6),
        ("long", code, 700, LONGEST, 0.7),
    )
    for name, documents, shortest, longest, from_start in plans:
        cuts = (cutter.cut(t, shortest, longest, draw.random() < from_start) for t in documents)
        kept = list(islice((ids for ids in cuts if ids is not None), COUNTS[name]))
        print(f"prompts: {name} {len(kept)}", flush=True)
        found += kept
    found = [ids[:LONGEST] for ids in found if ids]
    draw.shuffle(found)
    return found


def heldout_prompts(corpus: Path, shards: Path, tokenizer: Tokenizer, seed: int) -> list[list[int]]:
    """Prompts from the held-out packages: function headers, beginnings of files, conversations."""
    draw = random.Random(seed)
    cutter = Cutter(tokenizer, draw)
    with lzma.open(shards / "heldout.json.xz", "rt") as file:
        found = [tokenizer.encode(row["prompt"]).ids for row in json.load(file)["prompts"]]
    rows = texts(corpus / "heldout.jsonl")
    draw.shuffle(rows)
    tokenizer.encode_special_tokens = True
    cuts = (cutter.cut(t, 16, 512, draw.random() < 0.5) for t in rows)
    found += islice((ids for ids in cuts if ids is not None), HELDOUT["code"])
    tokenizer.encode_special_tokens = False
    questions = [user for text in rows for user, _ in list(pairs_from_source(text, ast.parse(text)))[:1]]
    for question in questions[: HELDOUT["chat"]]:
        found.append(tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n{ASSISTANT}").ids)
    return found


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data folder of the model's recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer" / "tokenizer.json"))
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = args.data / "corpus"
    made = {
        "heldout": heldout_prompts(corpus, args.data / "shards", tokenizer, args.seed),
        "train": training_prompts(corpus, tokenizer, args.seed),
    }
    for name, prompts in made.items():
        Documents.of(prompts, VOCAB_SIZE).save(args.out / f"{name}.safetensors")
        print(f"prompts: {name} {len(prompts)} prompts, {sum(map(len, prompts)):,} tokens", flush=True)


if __name__ == "__main__":
    main()
