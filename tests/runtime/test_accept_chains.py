"""Who wins: the acceptance rule over a span and its chains, against a walk down the tree, token by token."""

from __future__ import annotations

import random

import torch

from paceline.runtime.acceptance import Chains, accept_chains, count_accepted


def walk(
    sampled: list[int], drafts: list[int], num_drafts: int, chains: dict[int, tuple[list[int], list[int]]]
) -> tuple[int, int | None]:
    """Drafts that stand, and the branch of the chain they are of. ``chains``: tokens and draws by branch."""
    for j in range(num_drafts):
        if sampled[j] == drafts[j]:
            continue
        if j not in chains or chains[j][0][0] != sampled[j]:
            return j, None
        tokens, draws = chains[j]
        more = 1
        while j + more < num_drafts and draws[more - 1] == tokens[more]:
            more += 1
        return j + more, j
    return num_drafts, None


def test_the_rule_walks_down_the_tree() -> None:
    rng = random.Random(5)
    outcomes = set()
    for _ in range(400):
        num_seqs, num_drafts = rng.randint(1, 4), rng.randint(1, 4)
        positions = sorted(rng.sample(range(num_drafts), rng.randint(1, num_drafts)))
        places = rng.sample([*range(num_seqs), -1, -1], rng.randint(1, num_seqs + 1))
        width = num_drafts - positions[0]

        def tokens(*shape: int) -> torch.Tensor:
            return torch.randint(2, shape, dtype=torch.int32)  # two tokens: everything happens often

        drafts, sampled = tokens(num_seqs, num_drafts), tokens(num_seqs, num_drafts + 1)
        counts = torch.tensor([rng.randint(0, num_drafts) for _ in range(num_seqs)], dtype=torch.int32)
        parents = torch.tensor(places).clamp(min=0).repeat_interleave(len(positions))
        branches = torch.tensor(positions).repeat(len(places))
        given = (torch.tensor(places) >= 0).repeat_interleave(len(positions))
        chains = Chains(
            parents,
            branches,
            given & (branches < counts[parents]),
            tokens(len(parents), width),
            tokens(len(parents), width),
        )
        alone = count_accepted(sampled, drafts, counts)
        accepted, won = accept_chains(alone, sampled, counts, chains)
        for seq in range(num_seqs):
            own = [i for i in range(len(parents)) if chains.active[i] and int(parents[i]) == seq]
            tree = {int(branches[i]): (chains.tokens[i].tolist(), chains.sampled[i].tolist()) for i in own}
            expected = walk(sampled[seq].tolist(), drafts[seq].tolist(), int(counts[seq]), tree)
            winners = [int(branches[i]) for i in own if won[i]]
            assert (int(accepted[seq]), winners) == (
                expected[0],
                [] if expected[1] is None else [expected[1]],
            )
            outcomes.add((expected[1] is None, bool(tree)))
        assert not won[~chains.active].any()
    assert outcomes == {(True, True), (True, False), (False, True)}
