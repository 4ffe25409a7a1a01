"""Decode rounds as CUDA graphs: one replay instead of a few hundred launches.

Which shapes of rounds there are, and which of them a step takes, is ``shapes.py``. Here they are made, given
their inputs and run. All captured ones share one memory pool, so the rounds that need most of it are captured
first. The smallest follow before anyone is served, the rest while the engine has nothing else to do, or when
a step first needs one. On a CPU rounds are made as they are needed, and run as they stand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.models.attention import KVCache
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.runtime.acceptance import Verified
from paceline.runtime.cuda_graph import CapturedSet, CaptureStream
from paceline.runtime.deferred import DeferredContext
from paceline.runtime.division import most
from paceline.runtime.drafting import DraftStage
from paceline.runtime.few_rows import FewRows
from paceline.runtime.plan import Span
from paceline.runtime.round import DecodeRound
from paceline.runtime.shapes import RoundShape, Shapes, comes_first
from paceline.runtime.sharing import NUM_VALUES, attends_together, group_values
from paceline.runtime.staging import Staging
from paceline.runtime.state import SlotState
from paceline.sampling.state import FixedKind
from paceline.speculation.hedging import HedgeLimits


class RoundSet:
    """All rounds of an engine, and which of a step's spans they can run.

    Args:
        model, cache, state, drafting, max_model_len, few_rows: as for :class:`DecodeRound`.
        max_num_seqs: slots.
        capture: make CUDA graphs of a few sizes; else make rounds of any size when they are needed.
        hedging: what there may be of hedge chains; None for none.

    Attributes:
        shapes: which rounds there are, and which of them a step takes.
        graphs: the rounds that are made.
        deferred: the drafter's context that rounds have left for later; None where they leave none.
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
        self.shapes = shapes = Shapes(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_drafts=0 if drafting is None else drafting.num_drafts,
            captured=capture,
            together=attends_together(model),
            hedging=hedging,
        )

        def make(shape: RoundShape) -> DecodeRound:
            return DecodeRound(
                shape, model, cache, state, drafting, max_model_len, few_rows, shapes.choosy_from
            )

        where = CaptureStream() if capture else None
        self.graphs = CapturedSet[RoundShape, DecodeRound, Verified](
            make, where, shapes.to_capture() if capture else ()
        )
        self.deferred: DeferredContext | None = None
        if drafting is not None and drafting.defers:
            self.deferred = DeferredContext(drafting, state, where)
        self._chains: dict[int, int] = {}  # slots whose drafts have chains beside them, and how many
        self._state = state
        self._staging = Staging(4 * (max_num_seqs + 1) + 2 * max_num_seqs + NUM_VALUES, state.device)

    def capture_largest(self) -> None:
        """Capture the rounds that need most memory: all others then find room in what they leave."""
        for shape in self.shapes.largest():
            self.graphs.get(shape)

    def capture_first(self) -> None:
        """Capture the rounds that are to be there from the start."""
        while self.graphs.missing and comes_first(self.graphs.missing[-1]):
            self.graphs.prepare()

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
        if not self.shapes.captured or None not in kinds:
            return kinds
        found = [kind or self._prompt_kind(span) for span, kind in zip(spans, kinds, strict=True)]
        kind = most(found)
        return kinds if kind is None or self.shapes.choose(spans, kind, depth) is None else found

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
        shape = self.shapes.choose(spans, kind, depth)
        assert shape is not None
        groups = group_values(spans, shape.num_seqs) if self.shapes.may_be_together(shape) else None
        if groups is not None:
            shape = self.shapes.with_common_keys(shape)
        keep = self.shapes.captured or not shape.packed  # else there are as many as numbers of rows
        decode_round, run = self.graphs.get(shape, keep=keep)
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

    def _place(self, spans: Sequence[Span], shape: RoundShape, places: np.ndarray) -> list[int]:
        """Give the spans that are to be hedged their places: those whose drafts have chains beside them are
        verified with these, and those that propose get chains for the next round. Returns the chains verified
        with each span.
        """
        chains = [0] * len(spans)
        if self.shapes.hedging is None:
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
