"""What the rows of one step are: which sequence each belongs to, where it stands, where its K/V goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from paceline.ops.reference_attention import AttentionPlan


class Branches(NamedTuple):
    """Sequences of a step that branch off others: *chains* of alternative tokens beside a span.

    A chain has the slot of the sequence it branches off, and shares every key below its first position with
    it, those of rows of this very step included. From there on it has keys of its own, in consecutive cache
    slots outside the block table. So a row tree needs no ancestor mask: each chain is causal, over a history
    that parts from its parent's at one position.

    Attributes:
        starts: [B] int32, position of each sequence's first row; replaces ``num_computed[slots]``.
        own_slots: [B] int64, ``block * P + offset`` of a chain's first key; negative for a sequence whose
            keys all are in its block table.
    """

    starts: Tensor
    own_slots: Tensor


class CommonKeys(NamedTuple):
    """Keys that sequences of a step have in common: the same blocks at the head of their block tables.

    A hint that costs nothing to ignore: attention over these keys may be computed for the rows of all these
    sequences at once, instead of for each of them. They must be neighbours: the first sequences are cut into
    G *groups* of consecutive ones, of which some have nothing in common, like those behind the last. All
    common keys stand before every row of their group.

    Attributes:
        row_start: [G + 1] int32, non-decreasing, first row of each group.
        slots: [G] int32, a slot whose block table lists the group's keys.
        lens: [G] int32, keys they have in common; 0 for none.
        of_seqs: [B] int32, the same for the group of each sequence.
    """

    row_start: Tensor
    slots: Tensor
    lens: Tensor
    of_seqs: Tensor


@dataclass(eq=False)
class RowLayout:
    """The rows of one step, ordered by sequence: R rows of B sequences, S slots, M blocks per slot.

    Row ``i`` of sequence ``b`` is row ``row_start[b] + i`` and stands at ``num_computed[slots[b]] + i``. It
    attends to every position up to its own, itself included, through the block table of its slot.

    Kernels read lengths and block ids from the device tensors alone; the host fields only size grids. Work is
    handed out in tiles of a fixed number of rows: tile ``t`` belongs to the last sequence ``b`` with
    ``row_start[b] // tile_rows + b <= t``, which a kernel finds by bisection (or at once, ``b = t``, when
    each of ``host_rows`` fits into one tile). So a layout carries no tile tables, and a grid depends on R, B
    and the largest of ``host_rows`` alone: a captured step may have its tensors rewritten as long as these
    bounds hold. A sequence with zero rows is legal; rows from ``row_start[B]`` on are padding: their
    outputs are unspecified.

    A layout describes one step. On CPU the reference attention keeps what it computed from the layout's
    values in ``derived``, for all layers to share: build a new layout for each step.

    Attributes:
        slots: [B] int32, slot of each sequence; one more where rows of padding have a slot of their own.
        row_start: [B + 1] int32, non-decreasing, first row of each sequence; ``row_start[0]`` is 0.
        row_seq: [R] int32, sequence (0..B-1) of each row; B for rows of padding that have their own slot.
        positions: [R] int32, absolute position of each row.
        kv_slots: [R] int64, ``block * P + offset`` the row's K/V is written to; negative: not written.
        block_tables: [S, M] int32, the whole slot-indexed table, read at ``slots[b]``.
        num_computed: [S] int32, slot-indexed, as it was before this step.
        host_rows: rows of each sequence, known to the host (an upper bound per sequence in a captured step).
        host_max_context: an upper bound of the largest position + 1.
        host_span: rows that few sequences have more of, where ``host_rows`` is for those few: tiles are cut
            for the many. None: ``host_rows`` tells.
        branches: set when some of the sequences are chains.
        common: set when some of the sequences have keys in common that are worth an attention of their own.
        num_fresh: how many of the last sequences have no key before their rows, as far as the host tells.
        derived: the reference's plans, by attention geometry; not an input.
    """

    slots: Tensor
    row_start: Tensor
    row_seq: Tensor
    positions: Tensor
    kv_slots: Tensor
    block_tables: Tensor
    num_computed: Tensor
    host_rows: tuple[int, ...]
    host_max_context: int
    host_span: int | None = None
    branches: Branches | None = None
    common: CommonKeys | None = None
    num_fresh: int = 0
    derived: dict[object, AttentionPlan] = field(default_factory=dict, init=False, repr=False)
