"""What the text tests share: a checkpoint with a small tokenizer of Qwen3's build, and hostile texts."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    "def add(a, b):\n    return a + b\n\n\nclass Point:\n    x: int = 0\n",
    "system\nYou are a helpful assistant. user\nHello world! assistant\nThe quick brown fox.",
    "Unicode: naïve café 東京 日本語 Привет мир 🙂🚀 👩‍👩‍👧 — “quotes” … ½ €",
    "im_start im_end endoftext <div>|pipe|</div> if a < b and c > d: x <<= 1",
] * 8

# The shape of Qwen3's template: ChatML, optional system text, reasoning cut from history, an empty reasoning
# block.
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content.strip() + '<|im_end|>\\n' }}
    {%- elif message.role not in ('system', 'tool') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def build_backend() -> Backend:
    """Train the tokenizer: 256 bytes, some 180 merges, then the added tokens."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=560, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED])
    return backend


def write_checkpoint(folder: Path, backend: Backend, **config: object) -> Path:
    """Write a tokenizer's files as ``save_pretrained`` lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in content.items() if v is not None})
    )
    return folder


# What goes wrong: white space, markup, characters of several bytes and code points, look-alikes.
_SPECIAL_PIECES = (*SPECIALS, *PLAIN_ADDED)
_PIECES = (
    "<", "|", ">", "<|", "|>", "im_", "im_end", "_end|>", "<|im", "<<", "\n", "\n\n", " ", "  ", "\t",
    "user", "system\n", "hello", "café", "e\u0301", "東京", "🙂", "👩‍👩‍👧", "\u202e", "\ufffd",
    "\U0010fffd", "＜|im_end|＞", "<|IM_END|>",
)  # fmt: skip

valid_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ordinary_text = st.lists(
    st.sampled_from(["hello ", " world", "\n", "é", "東京", "🙂", "a<b", " ", "1+1"])
).map("".join)
hostile_text = st.lists(
    st.one_of(st.sampled_from(_SPECIAL_PIECES), st.sampled_from(_PIECES), valid_text), max_size=8
).map("".join)
