"""The acceptance rule: a draft stands while it equals the row's own sample."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline import ops
from paceline.sampling.sampler import LogprobTensors


class Verified(NamedTuple):
    """What verifying N spans of up to K + 1 rows gave.

    Attributes:
        sampled: [N, K + 1] int32, each row's draw.
        accepted: [N] int32, how many drafts stand.
        logprobs: of the rows, where the kind of sampling brings them.
        drafts: [N] int32, how many drafts were verified, where that was chosen on the device; None where all
            there are.
        won: [N] int32, how many of those that stand are a hedge chain's; None where there are no chains.
        predicted: [N, g] fp32, how likely the drafter held its drafts and all before each to stand; None
            where it does not say.
    """

    sampled: Tensor
    accepted: Tensor
    logprobs: LogprobTensors | None
    drafts: Tensor | None = None
    won: Tensor | None = None
    predicted: Tensor | None = None


def count_accepted(sampled: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
    """How many leading drafts of each span stand.

    Row j of a span draws its own token ``sampled[:, j]`` from the target's distribution; draft j is the token
    row j + 1 was fed. Draft j stands when it and all drafts before it were drawn by the rows before them.
    Since the draws are keyed by position, the tokens that stand are exactly those plain decoding draws
    (sample-match acceptance; equal in law to rejection sampling with a one-hot proposal, Leviathan et al.,
    arXiv:2211.17192, section 2.3).

    Args:
        sampled: [N, K + 1] int32, each row's own draw; columns beyond a span's rows are ignored.
        drafts: [N, K] int32.
        num_drafts: [N] int32, drafts of each span, 0..K.

    Returns:
        [N] int32 in 0..num_drafts.
    """
    return ops.leading_matches(sampled, drafts, num_drafts)


class Chains(NamedTuple):
    """C hedge chains of W rows, of N spans with K drafts. A chain replaces one draft of a span, its *branch*,
    and all drafts after it; its rows follow the span's first ``branch + 1``.

    Attributes:
        parents: [C] int64, the span.
        branches: [C] int64, the first draft that is replaced.
        active: [C] bool, whether there is such a chain. At most one of a span is active for each branch.
        tokens: [C, W] int32, what each row is fed.
        sampled: [C, W] int32, each row's draw; columns beyond a span's drafts are ignored.
    """

    parents: Tensor
    branches: Tensor
    active: Tensor
    tokens: Tensor
    sampled: Tensor


def accept_chains(
    accepted: Tensor, sampled: Tensor, num_drafts: Tensor, chains: Chains
) -> tuple[Tensor, Tensor]:
    """How many leading drafts of each span stand, and whose they are: the span's own or a chain's.

    A chain wins when the span's drafts stand up to its branch, the next one does not, and the row before it
    drew the chain's token instead; the rule then goes on in the chain. It commits more than the span would,
    and no other chain of the span can win, so there is nothing to choose between. What stands are still the
    tokens plain decoding draws.

    Args:
        accepted: [N] int32, from :func:`count_accepted`.
        sampled: [N, K + 1] int32.
        num_drafts: [N] int32.
        chains: of these spans.

    Returns:
        Drafts that stand, [N] int32, and which chains won, [C] bool.
    """
    parents, branches, active, tokens, draws = chains
    won = active & (accepted[parents] == branches) & (sampled[parents, branches] == tokens[:, 0])
    left = num_drafts[parents] - branches.to(num_drafts.dtype) - 1
    more = 1 + count_accepted(draws, tokens[:, 1:], left)
    return accepted.index_add(0, parents, torch.where(won, more, 0)), won
