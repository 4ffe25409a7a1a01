"""What a verifier accepts, in closed form: per token, per round, along a whole text.

Three rules are priced from the target's distribution p and the drafter's q at a position:

- *shared noise*, the engine's: target and draft token are both ``argmax(log-probability + g)`` with the same
  Gumbel noise g (Daliri, Musco and Suresh 2024, arXiv:2408.07978). With exponential races E_y / p_y and
  E_y / q_y, token x wins both exactly when E_y > E_x max(p_y / p_x, q_y / q_x) for every y, so
  ``m(x) = 1 / sum_y max(p_y / p_x, q_y / q_x)``;
- *rejection* sampling (Leviathan et al. 2023, arXiv:2211.17192): ``m(x) = min(p_x, q_x)``;
- *greedy drafts*: the draft is argmax q, accepted when the target draws it.

``m(x)`` is the chance that x is drafted and committed. Given that the target commits x, the draft was x with
chance ``m(x) / p(x)``; along a text drawn from the target the product of these is the exact chance that a
round gets so far. (The mean of the unconditional chances, as in the DSpark paper's offline tau, is not: a
draft that stands makes some texts likelier than others.)
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def shared_noise_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Chance that target and draft token agree under shared noise: sum_x m(x), in O(V log V).

    Sorted by p / q, the larger of the two quotients is p's for all y from x on and q's for those before it.

    Args:
        p, q: [*, V] probabilities.

    Returns:
        [*] in [(1 - TV) / (1 + TV), 1 - TV].
    """
    p, q = p.double(), q.double()
    order = (p.log() - q.log()).nan_to_num(nan=0.0).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    q_before = q.cumsum(-1) - q
    p_from = p.flip(-1).cumsum(-1).flip(-1)
    # 1 / (p_from / p + q_before / q), written so that p = 0 or q = 0 gives 0
    bottom = p_from * q + q_before * p
    return torch.where(bottom > 0, p * q / bottom.clamp_min(1e-300), 0.0).sum(-1)


def shared_noise_given(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Chance under shared noise that the draft is the token the target drew: m(x) / p(x).

    Args:
        p, q: [*, V] probabilities.
        tokens: int [*], what the target drew.
    """
    p_x = p.gather(-1, tokens[..., None])
    q_x = q.gather(-1, tokens[..., None])
    # sum_y max(p_y, q_y p_x / q_x), the denominator times p_x
    ratio = p_x / q_x.clamp_min(1e-30)
    return (1 / torch.maximum(p, q * ratio).sum(-1)).where(q_x.squeeze(-1) > 0, 0.0)


def rejection_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Chance that rejection sampling accepts: sum_x min(p_x, q_x) = 1 - TV; [*, V] -> [*]."""
    return torch.minimum(p, q).sum(-1)


def rejection_given(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Chance that a committed token was an accepted draft: min(1, q(x) / p(x)); as ``shared_noise_given``."""
    p_x = p.gather(-1, tokens[..., None]).squeeze(-1)
    q_x = q.gather(-1, tokens[..., None]).squeeze(-1)
    return (q_x / p_x.clamp_min(1e-30)).clamp_max(1.0)


def noise_given(log_p: Tensor, tokens: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Gumbel noise as it must have been for the target to draw these tokens.

    The largest of ``log p + g`` is Gumbel(logsumexp) and independent of which it is; the others are Gumbel
    truncated below it (top-down sampling, Maddison, Tarlow and Minka 2014, arXiv:1411.0030).

    Args:
        log_p: [*, V] log-probabilities.
        tokens: int [*].

    Returns:
        g [*, V] with ``argmax(log_p + g) == tokens``.
    """
    uniform = torch.rand(log_p.shape, generator=generator, device=log_p.device, dtype=torch.float64)
    gumbel = -(-uniform.clamp_min(1e-300).log()).clamp_min(1e-300).log()
    index = tokens[..., None]
    top = gumbel.gather(-1, index)  # the largest value: Gumbel(0), since probabilities sum to 1
    free = gumbel + log_p.double()
    truncated = -torch.logaddexp(-top, -free)
    values = truncated.scatter(-1, index, top)
    return values - log_p.double()


class RoundTally:
    """Rounds a text takes, exactly: which anchors the engine visits decides what they count.

    Args:
        num_drafts: g.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._rounds = 0.0
        self._tokens = 0.0
        self._reached = np.zeros(num_drafts)
        self._anchors = 0
        self._tried = np.zeros(num_drafts)
        self._stood = np.zeros(num_drafts)
        self._uniform = 0.0

    def add(self, accept: NDArray[np.float64]) -> None:
        """One text.

        Args:
            accept: [A, g], chance that draft j of the block at anchor a stands if those before it do; anchors
                are the text's consecutive tokens, every block lies within the text.
        """
        count, g = accept.shape
        assert g == self._num_drafts
        survival = np.cumprod(accept, axis=1)  # [A, g]
        # chance of exactly m accepted, m = 0..g
        exactly = np.concatenate((np.ones((count, 1)), survival), axis=1)
        exactly[:, :-1] -= survival
        visits = np.zeros(count + g + 1)
        visits[0] = 1.0
        for anchor in range(count):
            visits[anchor + 1 : anchor + g + 2] += visits[anchor] * exactly[anchor]
        visits = visits[:count]
        self._rounds += float(visits.sum())
        self._tokens += float(visits @ (1 + survival.sum(axis=1)))
        self._reached += visits @ survival
        self._anchors += count
        self._uniform += float(survival.sum())
        before = np.concatenate((np.ones((count, 1)), survival[:, :-1]), axis=1)
        self._tried += before.sum(axis=0)
        self._stood += survival.sum(axis=0)

    @property
    def num_anchors(self) -> int:
        """Anchors seen."""
        return self._anchors

    @property
    def accept_length(self) -> float:
        """Tokens committed per round, the bonus included: what the engine will report."""
        return self._tokens / self._rounds if self._rounds else 1.0

    @property
    def uniform_accept_length(self) -> float:
        """The same when every token of the text is taken as an anchor, visited or not."""
        return 1 + self._uniform / self._anchors if self._anchors else 1.0

    @property
    def survival(self) -> list[float]:
        """[g], share of rounds in which so many drafts stand."""
        return (self._reached / max(self._rounds, 1e-12)).tolist()  # type: ignore[no-any-return]

    @property
    def conditional(self) -> list[float]:
        """[g], chance that a draft stands when those before it do, over all anchors."""
        return (self._stood / np.maximum(self._tried, 1e-12)).tolist()  # type: ignore[no-any-return]
