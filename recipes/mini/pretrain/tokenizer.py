"""Stage 4: train the byte-level BPE tokenizer and write its files.

7680 ids: 256 bytes, 7408 merges, then 16 specials (ChatML, the mask token that drafters use, spares that
training never shows). Splitting follows Qwen's pattern: digits one by one, runs of white space kept
together so that an indentation is one token. No normalisation: any text round-trips byte for byte.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pretrain.common import CONTEXT_LEN, SPECIALS, VOCAB_SIZE

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Characters of each stream the merges are learnt from: the training mix.
_SAMPLE_CHARS = {"code": 26_000_000, "prose": 8_000_000, "instruct": 3_000_000}


def _sample(corpus: Path) -> Iterator[str]:
    """About ``_SAMPLE_CHARS`` of each stream, spread over all packages by a hash of the document."""
    for stream, budget in _SAMPLE_CHARS.items():
        path = corpus / f"{stream}.jsonl"
        keep = max(1, round(1000 * budget / path.stat().st_size))
        with path.open() as lines:
            for line in lines:
                if zlib.crc32(line[-2000:].encode()) % 1000 < keep:
                    yield json.loads(line)["text"]


def train(corpus: Path) -> Tokenizer:
    """Learn the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(corpus), trainer)
    # After the merges, as Qwen numbers them; the spares come last.
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} ids, expected {VOCAB_SIZE}")
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "unk_token": None,
        "model_max_length": CONTEXT_LEN,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = train(args.data / "corpus")
    write(tokenizer, args.data / "tokenizer")
    for probe in (
        "def f(x):\n        return x\n",
        "\t\x00\x7f é 日本 🙂 12345  \r\n   end",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        ids = tokenizer.encode(probe).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != probe:
            raise RuntimeError(f"{probe!r} does not round-trip")
    print(f"tokenizer: {tokenizer.get_vocab_size()} ids")


if __name__ == "__main__":
    main()
