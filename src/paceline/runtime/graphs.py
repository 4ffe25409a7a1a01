"""Decode rounds as CUDA graphs: one replay instead of a few hundred launches.

On a GPU a round is captured for a few sizes (*tiers*) of each kind; a step takes the smallest that holds its
sequences and leaves the rest of it empty. All share one memory pool, so the rounds that need most of it are
captured first. The smallest follow before anyone is served, the rest while the engine has nothing else to do,
or when a step first needs one. On a CPU there is nothing to capture, and empty places would cost: rounds are
made as they are needed, of exactly the size they are needed in.

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

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from paceline.cache.sharing import saves_enough
from paceline.models.attention import KVCache
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.ops.persistent.launch import MAX_ROWS
from paceline.runtime.acceptance import Verified
from paceline.runtime.cuda_graph import Captured, CaptureStream
from paceline.runtime.deferred import DeferredContext
from paceline.runtime.division import MAX_FULL_SEQS, most
from paceline.runtime.drafting import DraftStage
from paceline.runtime.few_rows import FewRows
from paceline.runtime.plan import Span
from paceline.runtime.round import DecodeRound, RoundShape
from paceline.runtime.sharing import NUM_VALUES, attends_together, group_values
from paceline.runtime.staging import Staging
from paceline.runtime.state import SlotState
from paceline.sampling.state import FIXED_KINDS, FixedKind
from paceline.speculation.costs import fewer_drafts
from paceline.speculation.hedging import HedgeLimits

CAPTURED_KINDS: tuple[FixedKind, ...] = ("greedy", "filtered", "full")


def tiers(max_num_seqs: int) -> list[int]:
    """Sizes to capture: powers of two up to 16, then steps that waste at most a third, up to
    ``max_num_seqs``.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


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


def draft_counts(size: int, num_drafts: int) -> list[int]:
    """Drafts per sequence that rounds of ``size`` sequences are captured for, ascending: all of them, and
    where rows cost time also fewer, so that the planner has a choice.
    """
    counts = [num_drafts] if num_drafts else []
    return fewer_drafts(num_drafts) + counts if size * (num_drafts + 1) > MEMORY_BOUND_ROWS else counts


class RoundSet:
    """All rounds of an engine, and which of a step's spans they can run.

    Args:
        model, cache, state, drafting, max_model_len, few_rows: as for :class:`DecodeRound`.
        max_num_seqs: slots.
        capture: make CUDA graphs of a few sizes; else make rounds of any size when they are needed.
        hedging: what there may be of hedge chains; None for none.

    Attributes:
        captured: the same.
        together: whether rounds of many sequences read keys that these have in common only once.
        where: where captures are made, if they are.
        deferred: the drafter's context that rounds have left for later; None where they leave none.
        draft_counts: by size, the drafts per sequence that rounds are captured for beside none.
        missing: shapes that are still to be captured, the next one last.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        cache: KVCache,
        state: SlotState,
        drafting: DraftStage | None,
        *,
        max_num_seqs: int,
        max_model_len: int,
        capture: bool,
        few_rows: FewRows | None = None,
        hedging: HedgeLimits | None = None,
    ) -> None:
        self.captured = capture
        self._hedging = hedging
        self._chains: dict[int, int] = {}  # slots whose drafts have chains beside them, and how many
        self._state = state
        self._num_drafts = 0 if drafting is None else drafting.num_drafts
        self._make = partial(
            DecodeRound,
            model=model,
            cache=cache,
            state=state,
            drafting=drafting,
            max_model_len=max_model_len,
            few_rows=few_rows,
        )
        self._sizes = tiers(max_num_seqs)
        self.draft_counts = {size: draft_counts(size, self._num_drafts) for size in self._sizes}
        self._full_sizes = tiers(min(MAX_FULL_SEQS, max_num_seqs))
        self.together = attends_together(model)
        self._max_model_len = max_model_len
        self._staging = Staging(4 * (max_num_seqs + 1) + 2 * max_num_seqs + NUM_VALUES, state.device)
        self._rounds: dict[RoundShape, tuple[DecodeRound, Callable[[], Verified]]] = {}
        self.where = CaptureStream() if capture else None
        self.deferred: DeferredContext | None = None
        if drafting is not None and drafting.defers:
            self.deferred = DeferredContext(drafting, state, self.where)
        self.missing = self._shapes()[::-1] if capture else []

    def _shapes(self) -> list[RoundShape]:
        """Every shape to capture: small ones first, and those that attend to common keys last."""
        alone = [
            self._with_chains(self._packed(size, count, propose, kind), size, chains)
            for size in self._sizes
            for count, propose in self._variants(size)
            for kind in CAPTURED_KINDS
            if kind != "full" or size in self._full_sizes
            for chains in (0, *(() if self._hedging is None else self._hedging.counts))
            if chains == 0 or count == self._num_drafts
        ]
        alone += [self._roomy(size, count) for size in self._sizes for count in {0, self._num_drafts}]
        alone.sort(key=lambda shape: (shape.num_seqs not in FIRST_SIZES or shape.packed, shape.num_seqs))
        together = [self._with_common_keys(shape) for shape in alone if self._may_be_together(shape)]
        return alone + list(dict.fromkeys(together))

    def _with_chains(self, shape: RoundShape, wanted: int, chains: int) -> RoundShape:
        """The same with so many chains for each of ``wanted`` sequences at most, as far as their branches are
        drafts.
        """
        if self._hedging is None:
            return shape
        hedges = tuple(p for p in self._hedging.positions[:chains] if p < shape.num_drafts)
        return replace(shape, places=min(wanted, self._hedging.max_seqs), hedges=hedges) if hedges else shape

    def _variants(self, size: int) -> list[tuple[int, bool]]:
        """Drafts verified, and whether the next block is drafted, of the rounds of a size.

        Rounds that verify draft as well, whether or not anyone wants to: verifying without drafting happens
        once where drafting stops, and is not worth graphs of its own.
        """
        drafting = [(count, True) for count in reversed(self.draft_counts[size])]
        return [*drafting, (0, True), (0, False)] if drafting else [(0, False)]

    def capture_largest(self) -> None:
        """Capture the rounds that need most memory: all others then find room in what they leave."""
        drafts, propose = self._num_drafts, self._num_drafts > 0
        kinds: list[tuple[int, FixedKind]] = [(self._sizes[-1], "filtered"), (self._full_sizes[-1], "full")]
        for size, kind in kinds:
            most = 0 if self._hedging is None else self._hedging.counts[-1]
            shape = RoundShape.even(size, drafts, propose, kind)
            for chains in {0, most}:
                self._round(self._with_chains(shape, size, chains))
            if self._may_be_together(shape):
                self._round(self._with_common_keys(shape))
        self._round(self._roomy(self._sizes[-1], drafts))

    def capture_first(self) -> None:
        """Capture the rounds that are to be there from the start."""
        while self.missing and self.missing[-1].num_seqs in FIRST_SIZES and not self.missing[-1].packed:
            self.prepare()

    def prepare(self) -> bool:
        """Capture the next round; False when all are there. One that fails is not tried again before a step
        needs it.
        """
        if not self.missing:
            return False
        self._round(self.missing.pop())
        return True

    def _round(self, shape: RoundShape) -> tuple[DecodeRound, Callable[[], Verified]]:
        """The round of a shape, made or captured when it is not there yet."""
        found = self._rounds.get(shape)
        if found is None:
            choosy_from = MEMORY_BOUND_ROWS // (self._num_drafts + 1) + 1 if self.captured else 2
            made = self._make(shape, choosy_from=choosy_from)
            found = made, made if self.where is None else Captured(made, self.where)
            if self.captured or not shape.packed:  # else there are as many as numbers of rows
                self._rounds[shape] = found
            if shape in self.missing:
                self.missing.remove(shape)
        return found

    def kind(self, span: Span) -> FixedKind | None:
        """Sampling a round must be able to do to run this span; None when no round can."""
        if not span.sample or span.rows != span.drafts + 1 or span.prompt_rows:
            return None
        return self._state.sampling.fixed_kind(span.slot)

    def with_prompts(
        self, spans: Sequence[Span], kinds: list[FixedKind | None], depth: int | None
    ) -> list[FixedKind | None]:
        """The kinds of a step's spans, once more, with those of prompts where all that is no round's are last
        rows of prompts and one round has room for everything. Where a pass of its own is needed anyway, it
        takes all prompts.
        """
        if not self.captured or None not in kinds:
            return kinds
        found = [kind or self._prompt_kind(span) for span, kind in zip(spans, kinds, strict=True)]
        kind = most(found)
        if kind is None or kind == "full" or any(span.chains for span in spans):
            return kinds
        return kinds if self._shape_with_prompts(spans, kind, depth) is None else found

    def _prompt_kind(self, span: Span) -> FixedKind | None:
        """Sampling a round must be able to do to run the last rows of a prompt; None for other spans."""
        if not span.sample or span.drafts or span.prompt_rows:
            return None
        return self._state.sampling.fixed_kind(span.slot)

    def run(
        self, spans: Sequence[Span], kind: FixedKind, depth: int | None = None
    ) -> tuple[Verified, list[int]]:
        """Run spans whose ``kind`` is this one or comes before it. Rows beyond the spans' are nobody's.

        Args:
            spans: anchors and drafts, and of prompts what ``with_prompts`` let in.
            kind: sampling the round must be able to do.
            depth: drafts of each span on average that rows are wanted for; None for all they have.

        Returns:
            What came out, overwritten by the next run, and how many chains each span had beside it.
        """
        prompts = any(span.lead for span in spans)
        shape = self._shape_with_prompts(spans, kind, depth) if prompts else self._shape(spans, kind, depth)
        assert shape is not None
        groups = group_values(spans, shape.num_seqs) if self._may_be_together(shape) else None
        if groups is not None:
            shape = self._with_common_keys(shape)
        decode_round, run = self._round(shape)
        values = np.zeros((4, shape.num_seqs + 1), dtype=np.int32)
        values[0] = self._state.spare
        values[1] = -1
        values[:, : len(spans)] = [
            [span.slot for span in spans],
            [min(span.drafts, shape.num_drafts) for span in spans],
            [int(span.propose) for span in spans],
            [span.lead for span in spans],
        ]
        places = np.full((2, shape.places), -1, dtype=np.int32)
        chains = self._place(spans, shape, places)
        sent = self._staging.send(
            [values.reshape(-1), places.reshape(-1), *(() if groups is None else (groups,))]
        )
        decode_round.inputs.view(-1).copy_(sent[0])
        if shape.places:
            decode_round.hedge_inputs.view(-1).copy_(sent[1])
        if groups is not None:
            decode_round.group_inputs.copy_(sent[2])
        deferred = self.deferred
        if deferred is not None and not shape.defers:
            deferred.write()
        output = run()
        if deferred is not None and shape.defers:
            deferred.note(span.slot for span in spans)
        return output, chains

    def _may_be_together(self, shape: RoundShape) -> bool:
        """Whether a round may attend to common keys once. Few rows have their own pass, few sequences never
        save enough, and chains and the rarer parameters do without: each such round is one more to capture.
        """
        able = self.together and not shape.places and shape.kind != "full"
        enough = saves_enough(shape.num_seqs, self._max_model_len)
        return able and enough and shape.num_rows > MAX_ROWS

    def _with_common_keys(self, shape: RoundShape) -> RoundShape:
        """The round that attends to common keys in place of this one. There is one for greedy and filtered
        sampling, so that there are fewer.
        """
        kind: FixedKind = "filtered" if self.captured else shape.kind
        return replace(shape, together=True, kind=kind)

    def _place(self, spans: Sequence[Span], shape: RoundShape, places: np.ndarray) -> list[int]:
        """Give the spans that are to be hedged their places: those whose drafts have chains beside them are
        verified with these, and those that propose get chains for the next round. Returns the chains verified
        with each span.
        """
        chains = [0] * len(spans)
        if self._hedging is None:
            return chains
        hedged = [i for i, span in enumerate(spans) if span.chains][: shape.places]
        for place, i in enumerate(hedged):
            span = spans[i]
            if self._chains.get(span.slot, 0) >= len(shape.hedges):
                places[0, place] = i
                chains[i] = sum(position < span.drafts for position in shape.hedges)
            if span.propose:
                places[1, place] = i
        self.forget_chains(spans)
        self._chains.update((spans[i].slot, len(shape.hedges)) for i in hedged if spans[i].propose)
        return chains

    def forget_chains(self, spans: Sequence[Span]) -> None:
        """The drafts of these spans are gone, and so are the chains beside them."""
        for span in spans if self._chains else ():
            self._chains.pop(span.slot, None)

    def _shape(self, spans: Sequence[Span], kind: FixedKind, depth: int | None) -> RoundShape:
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

    def _shape_with_prompts(
        self, spans: Sequence[Span], kind: FixedKind, depth: int | None
    ) -> RoundShape | None:
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
            able = [self._roomy(size, 0)]
        else:
            packed: FixedKind = "greedy" if kind == "greedy" else "filtered"
            least = 0 if depth is None else mean  # rows of fewer drafts are not what was planned
            counts = [count for count in self.draft_counts[size][:-1] if count >= least]
            able = [self._packed(size, count, True, packed) for count in counts]
            able.append(self._roomy(size, self._num_drafts))
        found = next((shape for shape in able if shape.num_rows >= rows), None)
        return None if found is None or found.num_rows - rows > max(CHEAP_ROWS, rows) else found

    def _roomy(self, size: int, num_drafts: int) -> RoundShape:
        """A round with rows for all drafts of everyone, or none, that takes prompts too. There is one for
        greedy and filtered sampling, so that there are fewer.
        """
        rows = size * (num_drafts + 1)
        if rows <= CHEAP_ROWS or not num_drafts:
            rows += PROMPT_ROWS
        return RoundShape(size, num_drafts, rows, num_drafts > 0, "filtered", packed=True)

    def _packed(self, size: int, count: int, propose: bool, kind: FixedKind) -> RoundShape:
        """A round with rows for ``count`` drafts of each sequence on average: for which ones, the device
        chooses. Not where parameters look at whole spans.
        """
        shape = RoundShape.even(size, count, propose, kind)
        if count in (0, self._num_drafts) or kind == "full":
            return shape
        return replace(shape, num_drafts=self._num_drafts, packed=True)
