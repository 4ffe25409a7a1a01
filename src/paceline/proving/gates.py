"""Gates: each looks at what an engine did and returns what is wrong with it, nothing when all is well.

``paceline prove`` and the tests use the same ones. That a gate can fail is kept as a test for each kind of
mistake it stands against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.engine.core import EngineCore
from paceline.engine.messages import SequenceOutput
from paceline.engine.self_check import MIN_ACCEPT_RATE
from paceline.proving.drive import Round, complete, tokens_of
from paceline.proving.redraft import Redrafted
from paceline.sampling.logprobs import Logprob
from paceline.sampling.params import SamplingParams

NEAR_TIE = 1e-3
"""Choices whose two best scores are closer than this may differ between two ways to compute them."""
LOGPROB_TOLERANCE = 1e-4
MAX_Z = 4.5
"""Standard deviations that a sum may be off by accident."""
ENOUGH_HEDGED = 256
"""Hedged spans among which some are won and some are lost, whatever the drafter."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be.

    Attributes:
        gate: which one found it.
        where: prompt, position, round.
        message: what was expected and what was found.
    """

    gate: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.gate}: {self.where}: {self.message}"


def same_tokens(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> list[Violation]:
    """Output must be equal token for token; one violation per sequence, at its first difference."""
    violations = []
    if len(expected) != len(got):
        return [Violation("same tokens", "all", f"{len(got)} outputs for {len(expected)} expected")]
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        at = first_difference(want, have)
        if at is not None:
            violations.append(
                Violation("same tokens", f"sequence {i}, token {at}", f"{_at(have, at)}, not {_at(want, at)}")
            )
    return violations


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference, or None. A missing token differs from any."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _at(tokens: Sequence[int], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "the end"


def same_outputs(
    expected: Sequence[Sequence[SequenceOutput]], got: Sequence[Sequence[SequenceOutput]]
) -> list[Violation]:
    """Tokens, logprobs, prompt logprobs and endings must agree; each output must agree with itself."""
    violations = same_tokens(tokens_of(expected), tokens_of(got))
    wants = [output for group in expected for output in group]
    haves = [output for group in got for output in group]
    for i, (want, have) in enumerate(zip(wants, haves, strict=True)):
        where = f"sequence {i}"
        endings = [(item.finish_reason, item.stop_reason, item.error) for item in (want, have)]
        if endings[0] != endings[1]:
            violations.append(Violation("same ending", where, f"{endings[1]}, not {endings[0]}"))
        if have.logprobs is not None and len(have.logprobs) != len(have.token_ids):
            message = f"{len(have.logprobs)} logprobs for {len(have.token_ids)} tokens"
            violations.append(Violation("logprobs", where, message))
        for kind in ("logprobs", "prompt_logprobs"):
            message_ = _logprobs_differ(getattr(want, kind), getattr(have, kind))
            if message_:
                violations.append(Violation(kind, where, message_))
    return violations


def _logprobs_differ(
    want: Sequence[dict[int, Logprob] | None] | None, have: Sequence[dict[int, Logprob] | None] | None
) -> str:
    if want is None or have is None:
        return "" if want is have else "reported by one side only"
    if len(want) != len(have):
        return f"{len(have)} entries, not {len(want)}"
    for position, (a, b) in enumerate(zip(want, have, strict=True)):
        if a is None or b is None:
            if a is not b:
                return f"entry {position} is missing on one side"
            continue
        for token in a.keys() & b.keys():
            if abs(a[token].logprob - b[token].logprob) > LOGPROB_TOLERANCE:
                return f"entry {position}, token {token}: {b[token].logprob:.5f}, not {a[token].logprob:.5f}"
        # At the end of the list of alternatives two near-equal tokens may change places.
        if len(a) != len(b) or len(a.keys() - b.keys()) > 1:
            return f"entry {position}: tokens {sorted(b)}, not {sorted(a)}"
    return ""


def nothing_held(core: EngineCore) -> list[Violation]:
    """An idle engine holds no block, slot or reservation, and its books agree."""
    core.check()
    pool = core.pool
    violations = []
    if core.has_work:
        violations.append(Violation("nothing held", "engine", "still has work"))
    if pool.num_free != pool.num_blocks:
        message = f"{pool.num_blocks - pool.num_free} of {pool.num_blocks} blocks are still held"
        violations.append(Violation("nothing held", "block pool", message))
    return violations


def same_rounds(expected: Sequence[Round], got: Sequence[Round]) -> list[Violation]:
    """One sequence's rounds must start, draft and accept as expected. ``expected`` may end earlier."""
    if len(got) < len(expected):
        return [Violation("rounds", "all", f"{len(got)} rounds, not {len(expected)}")]
    for i, (want, have) in enumerate(zip(expected, got, strict=False)):
        for name in ("start", "drafts", "num_accepted"):
            a, b = getattr(want, name), getattr(have, name)
            if a != b:
                return [Violation("rounds", f"round {i}", f"{name} {b}, not {a}")]
    return []


def drafts_as_recomputed(redrafted: Sequence[Redrafted]) -> list[Violation]:
    """Greedy drafts made step by step from kept draft state must equal those made from the whole text.

    Stands against draft state written to wrong rows, lost on a prefix hit, or stale.
    """
    violations = []
    for item in redrafted:
        for k, (have, want, gap) in enumerate(zip(item.round.drafts, item.tokens, item.gaps, strict=False)):
            if gap < NEAR_TIE:
                break  # either is right, and what follows depends on it
            if have != want:
                where = f"anchor at {item.round.start}, draft {k + 1}"
                violations.append(Violation("drafts", where, f"{have}, not {want} (gap {gap:.3f})"))
                break
    return violations


def accepted_as_coupled(redrafted: Sequence[Redrafted]) -> list[Violation]:
    """At temperature 1 as many drafts must stand as two distributions under one noise make agree.

    Each verified draft stands with a known chance given the tokens before it, so the sum of (stood - chance)
    is a martingale, and its z-score is normal. Stands against noise of the wrong position or seed: output
    stays right then, but drafts and draws are independent.
    """
    excess = variance = 0.0
    for item in redrafted:
        stood = item.round.num_standing
        for k, chance in enumerate(item.chances[: stood + 1]):
            excess += (k < stood) - chance
            variance += chance * (1 - chance)
    if variance == 0:
        return []
    z = excess / math.sqrt(variance)
    if abs(z) <= MAX_Z:
        return []
    return [Violation("coupling", "all rounds", f"{excess:+.1f} accepted drafts against theory, z = {z:.1f}")]


def acceptance_floor(num_draft_tokens: int, num_accepted_tokens: int) -> list[Violation]:
    """A drafter of which almost nothing stands has the wrong layout, taps or rope."""
    rate = num_accepted_tokens / num_draft_tokens if num_draft_tokens else 0.0
    if rate >= MIN_ACCEPT_RATE:
        return []
    message = f"{num_accepted_tokens} of {num_draft_tokens} drafts stood, under {MIN_ACCEPT_RATE:.0%}"
    return [Violation("acceptance", "all rounds", message)]


def flat_acceptance(by_share: Mapping[str, Sequence[tuple[int, int]]]) -> list[Violation]:
    """The rounds of the same texts must not depend on how much of the prompt came from the cache.

    Args:
        by_share: by cached share, each text's (rounds, accepted drafts); the first is the reference.
    """
    (reference, expected), *others = by_share.items()
    return [
        Violation(
            "flat acceptance", f"{share}, text {i}", f"{have} rounds and accepts, {want} at {reference}"
        )
        for share, got in others
        for i, (want, have) in enumerate(zip(expected, got, strict=True))
        if want != have
    ]


def second_turns(
    core: EngineCore,
    fresh: EngineCore,
    conversations: Sequence[tuple[list[int], SamplingParams]],
    follow_up: list[int],
    probe: SamplingParams,
) -> list[Violation]:
    """Turn two of conversations whose first turn this engine answered must equal a fresh engine's.

    Stands against a block that is found in the cache with a row nobody forwarded: the answer's last token.

    Args:
        core: the engine that serves both turns.
        fresh: one that never saw the first turns; its cache is emptied in between.
        conversations: first prompts, and how to answer each.
        follow_up: tokens of the second message.
        probe: how to answer turn two; ask for logprobs.
    """
    violations: list[Violation] = []
    for i, (prompt, params) in enumerate(conversations):
        answer = complete(core, [prompt], params)[0][0].token_ids
        turn = [*prompt, *answer, *follow_up]
        warm = complete(core, [turn], probe)
        fresh.reset_prefix_cache()
        violations += [
            Violation("second turn", f"conversation {i}, {item.where}", f"{item.gate}: {item.message}")
            for item in same_outputs(complete(fresh, [turn], probe), warm)
        ]
        if core.scheduler.drafting.num_drafts and warm[0][0].num_draft_tokens == 0:
            violations.append(Violation("second turn", f"conversation {i}", "nothing was drafted"))
    return violations


def hedges_win_and_lose(wins: int, losses: int) -> list[Violation]:
    """Of many hedged spans some are won by a chain and some are not; else chains were never tried.

    Args:
        wins, losses: hedged spans in which a chain won, or none did.
    """
    if wins + losses < ENOUGH_HEDGED or (wins and losses):
        return []
    message = f"{wins} hedged spans were won by a chain and {losses} by none; both must occur"
    return [Violation("hedges", "all hedged modes", message)]
