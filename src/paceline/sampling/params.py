"""What a client may ask of the sampler, and the one validator every entry point goes through.

Field names and defaults are vLLM's. The struct is only a container, so that it can cross the process border;
``validate`` decides what is acceptable, because that depends on the served model (vocabulary, limits).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.errors import RequestError, shown

GREEDY_EPS = 1e-5
"""Temperatures below this are greedy (vLLM's ``_SAMPLING_EPS``)."""

# Bounds on everything a client can size. They protect the engine's memory and step time, not taste.
MAX_N = 128
MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_STOP_STRINGS = 64
MAX_STOP_LEN = 1024  # characters
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024  # entries
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LEN = 256  # characters
MAX_BAD_WORDS_IDS = (
    4 * MAX_BAD_WORDS
)  # a word may have several spellings in tokens, such as with and without a space before it
MAX_BAD_WORD_TOKENS = 64


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick and report the tokens of one request.

    Attributes:
        n: sequences to generate for the prompt.
        temperature: divides the logits; 0 (below 1e-5) takes the most likely token, the lowest id on a tie.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p, the crossing token included.
        min_p: drop tokens less likely than min_p times the most likely one.
        presence_penalty: subtracted once from the logit of every token already in the output.
        frequency_penalty: subtracted from a token's logit for each time it is in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        seed: makes the output reproducible: same seed and prompt, same tokens. None (or -1) draws one.
        max_tokens: tokens to generate at most; None means up to the context length.
        min_tokens: no stop token or EOS before so many tokens.
        stop: strings that end the output. A single string is accepted.
        stop_token_ids: token ids that end the output.
        ignore_eos: go on after EOS.
        include_stop_str_in_output: keep the stop string in the text.
        logprobs: also report the log-probabilities, before any processing, of the k most likely tokens at
            each output position and of the chosen one; 0 reports the chosen token only, -1 all tokens.
        prompt_logprobs: the same for each prompt position.
        logit_bias: added to the logits of these token ids, -100 to 100.
        allowed_token_ids: only these tokens may be produced.
        bad_words: texts that must not be produced: the token that would complete one is masked.
        bad_words_ids: derived: ``bad_words`` as token id sequences, filled in by whoever holds the tokenizer.
        detokenize: produce text.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = []  # a list once constructed
    stop_token_ids: list[int] | None = []  # a list once constructed
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = []  # a list once constructed
    bad_words_ids: list[list[int]] = []
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_ = msgspec.structs.force_setattr
        if isinstance(self.stop, str):
            set_(self, "stop", [self.stop])
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is None or isinstance(value, tuple):
                set_(self, name, list(value or ()))
        if self.seed == -1:
            set_(self, "seed", None)

    @property
    def greedy(self) -> bool:
        """No random draw: the most likely token after processing is taken."""
        return self.temperature < GREEDY_EPS

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as the list it is after construction."""
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def stop_ids(self) -> list[int]:
        """``stop_token_ids`` as the list it is after construction."""
        assert self.stop_token_ids is not None
        return self.stop_token_ids


def validate(
    params: SamplingParams,
    *,
    vocab_size: int,
    max_logprobs: int = 20,
    max_n: int = MAX_N,
) -> None:
    """Refuse parameters the engine cannot or will not honour. Shared by all entry points.

    Whether prompt and output fit the context is the engine's admission check, not this one's.

    Args:
        params: as given by the client.
        vocab_size: number of logits of the model; every token id must be below it.
        max_logprobs: the most log-probabilities reported per position; -1 for no limit.
        max_n: the most sequences per request.

    Raises:
        RequestError: with ``param`` the field's name; says what was given, what is allowed and what to do.
    """
    p = params
    if not isinstance(p, SamplingParams):
        raise _refusal("sampling_params", p, "SamplingParams", f"a {type(p).__name__} cannot be used")
    _check_int("n", p.n, 1, max_n)
    _check_number("temperature", p.temperature, 0.0, MAX_TEMPERATURE, "use 0 for greedy decoding")
    _check_int("top_k", p.top_k, -1, MAX_TOKENS, "use 0 or -1 to keep all tokens")
    _check_number("top_p", p.top_p, 0.0, 1.0, "use 1 to keep all tokens", low_open=True)
    _check_number("min_p", p.min_p, 0.0, 1.0, "use 0 to keep all tokens")
    _check_number("presence_penalty", p.presence_penalty, -2.0, 2.0, "use 0 for none")
    _check_number("frequency_penalty", p.frequency_penalty, -2.0, 2.0, "use 0 for none")
    _check_number(
        "repetition_penalty",
        p.repetition_penalty,
        0.0,
        MAX_REPETITION_PENALTY,
        "use 1 for none",
        low_open=True,
    )
    if p.seed is not None:
        _check_int("seed", p.seed, -(2**63), 2**63 - 1, "leave it out for a random seed")
    _check_lengths(p)
    for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
        if not isinstance(getattr(p, name), bool):
            raise _refusal(name, getattr(p, name), "true or false")
    _check_logprobs("logprobs", p.logprobs, vocab_size, max_logprobs)
    _check_logprobs("prompt_logprobs", p.prompt_logprobs, vocab_size, max_logprobs)
    _check_stop(p, vocab_size)
    _check_token_lists(p, vocab_size)


def check_candidates(params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Refuse ``allowed_token_ids`` of which none may be the first token.

    What the output masks later, with bad words of several tokens, cannot be seen here.

    Args:
        params: valid, with ``bad_words_ids`` filled in.
        eos_token_ids: the model's own, masked before ``min_tokens`` beside ``stop_token_ids``.

    Raises:
        RequestError: all of them are masked.
    """
    masks = {
        f"min_tokens ({params.min_tokens}), which keeps out the tokens that end the output": (
            {*eos_token_ids, *params.stop_ids} if params.min_tokens else set()
        ),
        "bad_words, which keeps out those of one token": {
            word[0] for word in params.bad_words_ids if len(word) == 1
        },
    }
    allowed = set(params.allowed_token_ids or ())
    if allowed and allowed <= set().union(*masks.values()):
        reasons = " and ".join(reason for reason, masked in masks.items() if masked & allowed)
        raise RequestError(
            f"allowed_token_ids is {shown(params.allowed_token_ids)}, of which nothing is left by {reasons}: "
            "allow at least one other token, or drop what keeps them out.",
            param="allowed_token_ids",
        )


def _check_lengths(p: SamplingParams) -> None:
    if p.max_tokens is not None:
        _check_int("max_tokens", p.max_tokens, 1, MAX_TOKENS, "leave it null to fill the context")
    _check_int("min_tokens", p.min_tokens, 0, MAX_TOKENS)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise RequestError(
            f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens}): "
            "lower min_tokens or raise max_tokens.",
            param="min_tokens",
        )


def _check_logprobs(name: str, value: int | None, vocab_size: int, max_logprobs: int) -> None:
    if value is None:
        return
    _check_int(name, value, -1, vocab_size, "use null for none, -1 for the whole vocabulary")
    count = vocab_size if value == -1 else value
    if max_logprobs != -1 and count > max_logprobs:
        raise RequestError(
            f"{name} must be at most {max_logprobs} on this server, got {value}: ask for fewer, "
            f"or start the engine with a higher max_logprobs.",
            param=name,
        )


def _check_stop(p: SamplingParams, vocab_size: int) -> None:
    _check_texts("stop", p.stop, MAX_STOP_STRINGS, MAX_STOP_LEN)
    if p.stop and not p.detokenize:
        raise RequestError(
            "stop strings need text, but detokenize is false: set detokenize to true or use stop_token_ids.",
            param="stop",
        )
    _check_ids("stop_token_ids", p.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)


def _check_token_lists(p: SamplingParams, vocab_size: int) -> None:
    if p.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", p.allowed_token_ids, vocab_size, vocab_size)
        if not p.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must not be empty: name at least one token id, or leave it out.",
                param="allowed_token_ids",
            )
    if p.logit_bias is not None:
        if not isinstance(p.logit_bias, dict):
            raise _refusal("logit_bias", p.logit_bias, "a map from token id to a number from -100 to 100")
        _check_count("logit_bias", len(p.logit_bias), MAX_LOGIT_BIAS)
        _check_ids("logit_bias", list(p.logit_bias), vocab_size, MAX_LOGIT_BIAS)
        for token, bias in p.logit_bias.items():
            _check_number("logit_bias", bias, -100.0, 100.0, f"the value of token {token} is out of range")
    _check_texts("bad_words", p.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
    if not isinstance(p.bad_words_ids, list):
        raise _refusal("bad_words", p.bad_words_ids, "a list of token id sequences")
    _check_count("bad_words", len(p.bad_words_ids), MAX_BAD_WORDS_IDS)
    for word in p.bad_words_ids:
        _check_ids("bad_words", word, vocab_size, MAX_BAD_WORD_TOKENS)
        if not word:
            raise _refusal("bad_words", word, "words of at least one token")


def _check_int(name: str, value: object, low: int, high: int, advice: str = "", what: str = "") -> None:
    # bool is an int to Python, but never what a client meant by a count
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refusal(name, value, f"an integer from {low} to {high}", advice, what)


def _check_number(
    name: str, value: object, low: float, high: float, advice: str = "", *, low_open: bool = False
) -> None:
    # NaN and infinity fail the comparison, since every range is finite
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or (low_open and value == low):
        lower = f"above {low:g} and at most" if low_open else f"from {low:g} to"
        raise _refusal(name, value, f"a finite number {lower} {high:g}", advice)


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{name} must have at most {limit} entries, got {count}: give fewer.", param=name)


def _check_ids(name: str, ids: object, vocab_size: int, limit: int) -> None:
    if not isinstance(ids, list | tuple):
        raise _refusal(name, ids, "a list of token ids")
    _check_count(name, len(ids), limit)
    for token in ids:
        _check_int(
            name, token, 0, vocab_size - 1, "use ids of the model's vocabulary", f"token ids in {name}"
        )


def _check_texts(name: str, texts: object, limit: int, max_len: int) -> None:
    if not isinstance(texts, list | tuple):
        raise _refusal(name, texts, "a list of strings")
    _check_count(name, len(texts), limit)
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= max_len:
            raise _refusal(name, text, f"non-empty strings of at most {max_len} characters")


def _refusal(name: str, value: object, allowed: str, advice: str = "", what: str = "") -> RequestError:
    end = f": {advice}." if advice else "."
    return RequestError(f"{what or name} must be {allowed}, got {shown(value)}{end}", param=name)
