"""Every knob of speculation, in one typed struct: a dict in Python, JSON after ``--speculative-config``."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from paceline.errors import ConfigError

DEFAULT_CAPTURE_MB = 128
DEFAULT_MARKOV_CANDIDATES = 256


class SpeculativeConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How drafts are made.

    ``SpeculativeConfig()``, with nothing set, switches speculation off; so does the dict ``{}``.
    """

    method: Literal["dspark", "dflash"] | None = None
    """Kind of drafter; None takes what the checkpoint is. With the bundled model and no ``model`` it picks
    the bundled drafter of that kind."""
    model: str | None = None
    """Drafter checkpoint: folder or hub name."""
    revision: str | None = None
    """Hub revision of the drafter."""
    num_speculative_tokens: int | None = None
    """Drafts per round, at most what the drafter was trained for; None takes all."""
    draft_state: Literal["paged", "capture"] = "paged"
    """Where the drafter's knowledge of the past is kept: in the target's blocks, or rebuilt from captured
    rows.
    """
    draft_window: int | None = None
    """The drafter attends to this many last tokens only; None is no limit."""
    draft_capture_mb: float | None = None
    """MiB for captured rows; only with ``draft_state`` capture, default 128. 0 gives up prefix caching."""
    markov_candidates: int | None = DEFAULT_MARKOV_CANDIDATES
    """On a GPU, a DSpark drafter's sequential steps choose among so many tokens of each slot, and half as
    many likely successors of the token before it. None: among the whole vocabulary, as on a CPU, and as in
    vocabularies of less than 64 times as many. What is drafted changes little, what comes out not at all."""
    verify_planner: Literal["auto", "off"] = "auto"
    """Whether to choose round by round how many drafts are verified, and whether any are made, by what is
    fastest; off verifies all there are."""
    hedge: int = 0
    """Sequences of a round that may have hedge chains verified beside their drafts, at most: the most
    important ones. 0 hedges nothing."""
    hedge_positions: tuple[int, ...] | None = None
    """Drafts that hedge chains replace by the second best, counted from 0; None takes 0, 1 and 2."""
    hedge_auto: bool = False
    """Find out while serving how many of the positions pay, from none to all."""
    synthetic_accept_length: float | None = None
    """For measuring only: accept drafts at random so that a round commits this many tokens on average, from 1
    to drafts + 1. The tokens are then meaningless."""

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "draft_window"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise ConfigError(f"{name} is {value}; it must lie in 1..{2**31 - 1}, or be absent.")
        candidates = self.markov_candidates
        if candidates is not None and (candidates < 16 or candidates > 4096 or candidates % 4):
            raise ConfigError(
                f"markov_candidates is {candidates}; it must be a multiple of 4 in 16..4096, or null for the "
                "whole vocabulary."
            )
        self._check_hedging()
        length = self.synthetic_accept_length
        if length is not None and not 1 <= length < math.inf:
            raise ConfigError(f"synthetic_accept_length is {length}; it must lie in 1..drafts + 1.")
        if self.draft_capture_mb is not None:
            if self.draft_state != "capture":
                raise ConfigError(
                    f"draft_capture_mb is {self.draft_capture_mb}, but draft_state is {self.draft_state!r}, "
                    "which captures nothing. Set draft_state to 'capture' or drop draft_capture_mb."
                )
            if not 0 <= self.draft_capture_mb < math.inf:
                raise ConfigError(
                    f"draft_capture_mb is {self.draft_capture_mb}; it must be 0 or more MiB, and a number."
                )

    def _check_hedging(self) -> None:
        positions = self.hedge_positions
        if self.hedge < 0:
            raise ConfigError(f"hedge is {self.hedge}; it must be 0 (nothing is hedged) or more.")
        if not self.hedge and (self.hedge_auto or positions is not None):
            name = "hedge_auto" if self.hedge_auto else "hedge_positions"
            raise ConfigError(f"{name} is set, but hedge is 0: nothing is hedged. Set hedge as well.")
        if positions is not None and (
            not positions or positions[0] < 0 or list(positions) != sorted(set(positions))
        ):
            raise ConfigError(
                f"hedge_positions is {list(positions)}; name at least one position, from 0 on, ascending and "
                "each once."
            )
        if self.hedge and self.synthetic_accept_length is not None:
            raise ConfigError(
                "hedge and synthetic_accept_length exclude each other: which draft a chain replaces depends "
                "on the rule."
            )

    @classmethod
    def of(cls, value: SpeculativeConfig | dict[str, Any] | str | None) -> SpeculativeConfig | None:
        """From a dict or JSON text; None and a config stay what they are.

        Only what says nothing, ``{}`` or a ``method`` of null alone, switches speculation off. Keys that are
        given their defaults say that drafts are wanted: from the bundled drafter, if no other is named.

        Raises:
            ConfigError: unknown key, wrong type, or JSON that does not parse.
        """
        if value is None or isinstance(value, cls):
            return value
        try:
            raw: Any = msgspec.json.decode(value) if isinstance(value, str) else value
            method = raw.get("method") if isinstance(raw, dict) else None
            if method not in (None, "dspark", "dflash"):
                raise ConfigError(
                    f"speculative_config: method is {method!r}; Paceline drafts with 'dspark' and 'dflash'. "
                    "Give one of them, or a drafter of either kind as model."
                )
            config = msgspec.convert(raw, cls)
            wanted = any(key != "method" for key in raw)
            return msgspec.structs.replace(config, method="dspark") if wanted and config == cls() else config
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            if isinstance(error.__cause__, ConfigError):  # a range check: its message says it all
                raise error.__cause__ from None
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"speculative_config: {error}. Its keys are {known}.") from error

    @property
    def capture_mb(self) -> float:
        """MiB for captured rows when ``draft_state`` is capture."""
        return DEFAULT_CAPTURE_MB if self.draft_capture_mb is None else self.draft_capture_mb
