"""The arithmetic of captured draft state, and the ledger of what running requests hold. Pure logic."""

from __future__ import annotations

from paceline.errors import InvariantError


def capture_slot_bytes(block_size: int, num_taps: int, hidden_size: int, itemsize: int) -> int:
    """Bytes of one capture: the tap rows of one block."""
    return block_size * num_taps * hidden_size * itemsize


def capture_slots(budget_bytes: int, slot_bytes: int) -> int:
    """Captures a budget holds."""
    return budget_bytes // slot_bytes


def open_blocks(block_size: int, num_drafts: int, lookahead: int) -> int:
    """Blocks a decoding sequence may have rows in before it is known that they stand.

    At most ``block_size - 1`` rows of its last block stand; behind them lie the spans of one step, and of
    each step in flight.
    """
    return -(-(block_size - 1 + (1 + lookahead) * (1 + num_drafts)) // block_size)


def max_cache_len(prompt_len: int, max_tokens: int, draft_block: int, max_positions: int) -> int:
    """Most positions whose draft K/V a request can ever hold: its tokens and a drafter's block behind
    them.
    """
    return min(prompt_len + max_tokens + draft_block, max_positions)


class DraftReserve:
    """Blocks for the drafter's K/V of running requests, each owned by one of them.

    A request is charged for the longest it can get, once, when it starts: a request that began to draft never
    runs out in the middle. Block 0 belongs to nobody: rows without draft state are written there.

    Args:
        num_blocks: blocks that can be owned.
        block_size: positions per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(1, num_blocks + 1))[::-1]
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def cost(self, num_positions: int) -> int:
        """Blocks that ``num_positions`` positions are charged."""
        return -(-num_positions // self.block_size)

    def ceiling(self, num_positions: int) -> int:
        """How many requests of ``num_positions`` positions can draft at once."""
        return self.num_blocks // self.cost(num_positions)

    def fits(self, num_positions: int) -> bool:
        """Whether a charge would be granted now."""
        return self.cost(num_positions) <= len(self._free)

    def charge(self, num_positions: int) -> list[int]:
        """Blocks for ``num_positions`` positions, in order.

        Raises:
            InvariantError: they do not fit; ask first.
        """
        count = self.cost(num_positions)
        if count > len(self._free):
            raise InvariantError(f"{count} draft blocks were charged with {len(self._free)} free")
        ids = [self._free.pop() for _ in range(count)]
        self._owned.update(ids)
        return ids

    def refund(self, ids: list[int]) -> None:
        """Take a charge back, once.

        Raises:
            InvariantError: a block is not owned.
        """
        for block in ids:
            if block not in self._owned:
                raise InvariantError(f"draft block {block} was refunded but nobody owns it")
            self._owned.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Raise InvariantError unless every block is either free or owned."""
        if sorted([*self._free, *self._owned]) != list(range(1, self.num_blocks + 1)):
            raise InvariantError("draft blocks were lost or invented")
