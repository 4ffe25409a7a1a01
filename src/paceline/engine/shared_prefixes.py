"""Which running sequences share their first blocks, so that a step reads those once. Pure logic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.cache.sharing import MAX_GROUPS, saves_enough, shared_groups
from paceline.engine.planned import PlannedStep
from paceline.engine.sequence import Sequence


class SharedPrefixes:
    """The groups of sequences that share most.

    Args:
        block_size: tokens of a block.

    Attributes:
        stale: whether a sequence came or went since they were looked for: only then blocks are shared anew.
    """

    def __init__(self, block_size: int) -> None:
        self.stale = True
        self._block_size = block_size
        self._groups: dict[int, tuple[int, int]] = {}  # of slots, in the last step: group and common tokens

    def arrange(self, step: PlannedStep, running: list[Sequence]) -> None:
        """Put spans side by side whose sequences share their first blocks, those that share most first, and
        prompts that begin last.
        """
        if self.stale:
            self.stale = False
            groups = shared_groups([s.blocks.ids for s in running])
            self._groups = {
                running[member].slot: (i + 1, group.num_blocks * self._block_size)
                for i, group in enumerate(groups)
                for member in group.members
            }
        if not self._groups and not step.plan.inits:
            return
        alone = len(self._groups) + 1
        for entry in step.entries:
            entry.span.group, entry.span.common = self._groups.get(entry.span.slot, (0, 0))
        step.entries.sort(key=lambda entry: (entry.span.fresh, entry.span.group or alone))
        step.plan.spans = [entry.span for entry in step.entries]

    def saved_tokens(self, slots: Iterable[int]) -> int:
        """Tokens whose keys a round of these sequences need not read again, by the groups of the last step:
        whoever decodes was there, and then held what he shares.
        """
        shared = Counter(self._groups[slot] for slot in slots if slot in self._groups)
        saved = [(n - 1) * common for (_, common), n in shared.items() if saves_enough(n, common)]
        return sum(sorted(saved)[-MAX_GROUPS:])
