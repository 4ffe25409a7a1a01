"""Which shapes of decode rounds there are, and which of them a step takes. Pure logic.

On a GPU a round is captured for a few sizes (*tiers*) of each kind; a step takes the smallest that holds its
sequences and leaves the rest of it empty. On a CPU there is nothing to capture, and empty places would cost:
rounds have exactly the size that is needed.

Three kinds of sampling are captured. *Greedy* is the common one and needs no noise. *Filtered* draws at
random under any filter; a row without filters costs it nothing, so plain draws need no kind of their own.
*Full* does all that a request may ask for (masks, bias, penalties, log-probabilities), some sixty small
kernels more, for at most ``MAX_FULL_SEQS`` sequences: rows beyond that take longer to compute than to launch,
and few kinds and sizes keep captures few.

A prompt that begins, or a turn that continues behind a cached prefix, often has few rows, and a pass of its
own for them reads all weights again. *Roomy* rounds have rows for those too, and draw and draft for everyone
at once; where there is none, rows of prompts run beside the round.

Rounds whose sequences share long prefixes exist in a second version, which attends to these once
(``sharing.py``); those are captured last.

Rounds that verify all drafts are captured with hedge chains too, where there are any, for as many sequences
as may have them: hedging is for rounds whose rows cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.cache.sharing import saves_enough
from paceline.ops.persistent.launch import MAX_ROWS
from paceline.runtime.division import MAX_FULL_SEQS
from paceline.runtime.plan import Span
from paceline.sampling.state import FIXED_KINDS, FixedKind
from paceline.speculation.costs import fewer_drafts
from paceline.speculation.hedging import HedgeLimits

CAPTURED_KINDS: tuple[FixedKind, ...] = ("greedy", "filtered", "full")

FIRST_SIZES = (1, 2)
"""Rounds of these sizes are captured before anyone is served."""

MEMORY_BOUND_ROWS = 64
"""Rows up to which a round takes as long as reading the weights does: fewer drafts would save nothing."""

PROMPT_ROWS = 64
"""Rows for prompts in a roomy round, beside those of its sequences and their drafts."""

CHEAP_ROWS = 128
"""More rows cost time for each, and prompts take rows of the likeliest drafts to fall instead."""

GIVEN_UP = 4
"""Of so many drafts that were to be verified, at most one is given up for rows of prompts."""


@dataclass(frozen=True)
class RoundShape:
    """What is fixed in a round.

    Attributes:
        num_seqs: N.
        num_drafts: K, most drafts verified of a sequence.
        num_rows: R, at least one for each sequence.
        propose: whether the next block is drafted.
        kind: sampling the round can do.
        places: sequences that may be hedged.
        hedges: drafts that their chains replace.
        packed: whether rows lie side by side, as many of a sequence as it has; never with hedges. Otherwise
            each has K + 1.
        together: whether attention is told of keys that sequences have in common; never with hedges.
    """

    num_seqs: int
    num_drafts: int
    num_rows: int
    propose: bool
    kind: FixedKind
    places: int = 0
    hedges: tuple[int, ...] = ()
    packed: bool = False
    together: bool = False

    @property
    def defers(self) -> bool:
        """Whether the drafter's context of its rows may be written later: it verifies and drafts nothing, and
        has no rows of prompts.
        """
        return not (self.num_drafts or self.propose or self.packed)

    @staticmethod
    def even(num_seqs: int, num_drafts: int, propose: bool, kind: FixedKind) -> RoundShape:
        """With rows for all drafts of everyone."""
        return RoundShape(num_seqs, num_drafts, num_seqs * (num_drafts + 1), propose, kind)


def tiers(max_num_seqs: int) -> list[int]:
    """Sizes to capture: powers of two up to 16, then steps that waste at most a third, up to
    ``max_num_seqs``.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def draft_counts(size: int, num_drafts: int) -> list[int]:
    """Drafts per sequence that rounds of ``size`` sequences are captured for, ascending: all of them, and
    where rows cost time also fewer, so that the planner has a choice.
    """
    counts = [num_drafts] if num_drafts else []
    return fewer_drafts(num_drafts) + counts if size * (num_drafts + 1) > MEMORY_BOUND_ROWS else counts


def comes_first(shape: RoundShape) -> bool:
    """Whether a round is captured before anyone is served."""
    return shape.num_seqs in FIRST_SIZES and not shape.packed


def roomy(size: int, num_drafts: int) -> RoundShape:
    """A round with rows for all drafts of everyone, or none, that takes prompts too. There is one for
    greedy and filtered sampling, so that there are fewer.
    """
    rows = size * (num_drafts + 1)
    if rows <= CHEAP_ROWS or not num_drafts:
        rows += PROMPT_ROWS
    return RoundShape(size, num_drafts, rows, num_drafts > 0, "filtered", packed=True)


class Shapes:
    """All shapes of an engine's rounds.

    Args:
        max_num_seqs: slots.
        max_model_len: longest sequence in tokens.
        num_drafts: drafts of a sequence and round; 0 without a drafter.
        captured: whether rounds are captured, for a few sizes; else they have whatever size is needed.
        together: whether rounds of many sequences read keys that these have in common only once.
        hedging: what there may be of hedge chains; None for none.

    Attributes:
        captured, together, hedging: the same.
        draft_counts: by size, the drafts per sequence that rounds are captured for beside none.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_drafts: int,
        captured: bool,
        together: bool,
        hedging: HedgeLimits | None = None,
    ) -> None:
        self.captured, self.together, self.hedging = captured, together, hedging
        self._max_model_len, self._num_drafts = max_model_len, num_drafts
        self._sizes = tiers(max_num_seqs)
        self._full_sizes = tiers(min(MAX_FULL_SEQS, max_num_seqs))
        self.draft_counts = {size: draft_counts(size, num_drafts) for size in self._sizes}

    @property
    def choosy_from(self) -> int:
        """Sequences from which on there are rounds with rows for some drafts only."""
        return MEMORY_BOUND_ROWS // (self._num_drafts + 1) + 1 if self.captured else 2

    def to_capture(self) -> list[RoundShape]:
        """Every shape to capture: small ones first, and those that attend to common keys last."""
        alone = [
            self._with_chains(self._packed(size, count, propose, kind), size, chains)
            for size in self._sizes
            for count, propose in self._variants(size)
            for kind in CAPTURED_KINDS
            if kind != "full" or size in self._full_sizes
            for chains in (0, *(() if self.hedging is None else self.hedging.counts))
            if chains == 0 or count == self._num_drafts
        ]
        alone += [roomy(size, count) for size in self._sizes for count in {0, self._num_drafts}]
        alone.sort(key=lambda shape: (not comes_first(shape), shape.num_seqs))
        together = [self.with_common_keys(shape) for shape in alone if self.may_be_together(shape)]
        return alone + list(dict.fromkeys(together))

    def largest(self) -> list[RoundShape]:
        """Those that need most memory."""
        drafts, propose = self._num_drafts, self._num_drafts > 0
        kinds: list[tuple[int, FixedKind]] = [(self._sizes[-1], "filtered"), (self._full_sizes[-1], "full")]
        most = 0 if self.hedging is None else self.hedging.counts[-1]
        found = []
        for size, kind in kinds:
            shape = RoundShape.even(size, drafts, propose, kind)
            found += [self._with_chains(shape, size, chains) for chains in {0, most}]
            if self.may_be_together(shape):
                found.append(self.with_common_keys(shape))
        return [*found, roomy(self._sizes[-1], drafts)]

    def choose(self, spans: Sequence[Span], kind: FixedKind, depth: int | None) -> RoundShape | None:
        """The smallest round that can run these spans.

        Args:
            spans: anchors and drafts, and last rows of prompts.
            kind: sampling the round must be able to do.
            depth: drafts of each span on average that rows are wanted for; None for all they have.

        Returns:
            None where there are prompts and no round takes them; none does beside chains or the rarer
            parameters.
        """
        if not any(span.lead for span in spans):
            return self._for_decoding(spans, kind, depth)
        if kind == "full" or any(span.chains for span in spans):
            return None
        return self._for_prompts(spans, kind, depth)

    def may_be_together(self, shape: RoundShape) -> bool:
        """Whether a round may attend to common keys once. Few rows have their own pass, few sequences never
        save enough, and chains and the rarer parameters do without: each such round is one more to capture.
        """
        able = self.together and not shape.places and shape.kind != "full"
        enough = saves_enough(shape.num_seqs, self._max_model_len)
        return able and enough and shape.num_rows > MAX_ROWS

    def with_common_keys(self, shape: RoundShape) -> RoundShape:
        """The round that attends to common keys in place of this one. There is one for greedy and filtered
        sampling, so that there are fewer.
        """
        kind: FixedKind = "filtered" if self.captured else shape.kind
        return replace(shape, together=True, kind=kind)

    def _for_decoding(self, spans: Sequence[Span], kind: FixedKind, depth: int | None) -> RoundShape:
        """The round these spans need, or the smallest captured one that can run them."""
        drafts = max(span.drafts for span in spans)
        chains = max(span.chains for span in spans)
        mean = drafts if depth is None else min(drafts, depth)
        if not self.captured:
            propose = any(span.propose for span in spans)
            shape = RoundShape.even(len(spans), drafts, propose, kind)
            if not chains and kind != "full":
                total = sum(span.drafts for span in spans)
                rows = len(spans) + min(total, mean * len(spans))
                shape = replace(shape, num_rows=rows, packed=rows < shape.num_rows)
            return self._with_chains(shape, sum(span.chains > 0 for span in spans), chains)
        able = next(k for k in CAPTURED_KINDS if FIXED_KINDS.index(k) >= FIXED_KINDS.index(kind))
        sizes = self._full_sizes if able == "full" else self._sizes
        size = next(size for size in sizes if size >= len(spans))
        if mean == 0:
            return RoundShape.even(size, 0, any(span.propose for span in spans), able)
        counts = self.draft_counts[size]
        count = next(count for count in counts if count >= mean)
        if depth is None and not chains and able != "full":  # nobody has looked how many rows there are to be
            rows = len(spans) + sum(span.drafts for span in spans)
            count = next(count for count in counts if size * (count + 1) >= rows)
        shape = self._packed(size, count, True, able)
        return self._with_chains(shape, size, chains if count == self._num_drafts else 0)

    def _for_prompts(self, spans: Sequence[Span], kind: FixedKind, depth: int | None) -> RoundShape | None:
        """The smallest captured round with rows for all known tokens, and for nearly all drafts that rows are
        wanted for; None if none has them, or where most of its rows would be nobody's and cost time.
        """
        drafts = [span.drafts for span in spans]
        mean = max(drafts) if depth is None else min(max(drafts), depth)
        known = [span.rows - span.drafts for span in spans]
        wanted = min(sum(drafts), mean * known.count(1))
        rows = sum(known) + wanted - wanted // GIVEN_UP
        size = next(size for size in self._sizes if size >= len(spans))
        if mean == 0 and not any(span.propose for span in spans):
            able = [roomy(size, 0)]
        else:
            packed: FixedKind = "greedy" if kind == "greedy" else "filtered"
            least = 0 if depth is None else mean  # rows of fewer drafts are not what was planned
            counts = [count for count in self.draft_counts[size][:-1] if count >= least]
            able = [self._packed(size, count, True, packed) for count in counts]
            able.append(roomy(size, self._num_drafts))
        found = next((shape for shape in able if shape.num_rows >= rows), None)
        return None if found is None or found.num_rows - rows > max(CHEAP_ROWS, rows) else found

    def _variants(self, size: int) -> list[tuple[int, bool]]:
        """Drafts verified, and whether the next block is drafted, of the rounds of a size.

        Rounds that verify draft as well, whether or not anyone wants to: verifying without drafting happens
        once where drafting stops, and is not worth graphs of its own.
        """
        drafting = [(count, True) for count in reversed(self.draft_counts[size])]
        return [*drafting, (0, True), (0, False)] if drafting else [(0, False)]

    def _packed(self, size: int, count: int, propose: bool, kind: FixedKind) -> RoundShape:
        """A round with rows for ``count`` drafts of each sequence on average: for which ones, the device
        chooses. Not where parameters look at whole spans.
        """
        shape = RoundShape.even(size, count, propose, kind)
        if count in (0, self._num_drafts) or kind == "full":
            return shape
        return replace(shape, num_drafts=self._num_drafts, packed=True)

    def _with_chains(self, shape: RoundShape, wanted: int, chains: int) -> RoundShape:
        """The same with so many chains for each of ``wanted`` sequences at most, as far as their branches are
        drafts.
        """
        if self.hedging is None:
            return shape
        hedges = tuple(p for p in self.hedging.positions[:chains] if p < shape.num_drafts)
        return replace(shape, places=min(wanted, self.hedging.max_seqs), hedges=hedges) if hedges else shape
