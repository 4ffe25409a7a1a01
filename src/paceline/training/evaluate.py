"""What the engine will make of a drafter, computed offline from the target's own held-out text.

Every answer token is tried as an anchor. On greedy answers a draft stands when it is the token; on answers
sampled at temperature 1 the chance that it stands is exact (:mod:`paceline.training.acceptance`). Rounds are
then played through the text, so the accept length is that of a served request, not a mean over anchors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.attention import DenseCausalContext
from paceline.models.drafter import Drafter
from paceline.training.acceptance import (
    RoundTally,
    noise_given,
    rejection_acceptance,
    rejection_given,
    shared_noise_acceptance,
    shared_noise_given,
)
from paceline.training.blocks import BlockContext, block_labels
from paceline.training.documents import Documents

ANCHORS_AT_ONCE: Final = 256  # per row, through the drafter
LOGIT_BYTES: Final = {"cuda": 2**30, "cpu": 32 * 2**20}


@dataclass
class Evaluation:
    """Tallies of an evaluation.

    Attributes:
        greedy: greedy answers, greedy drafts.
        shared_noise, rejection, greedy_drafts: sampled answers under the three rules.
        simulated: sampled answers, drafts drawn with the noise the target must have had.
        marginal: per rule and draft, sum over ``num_marginal`` blocks of the unconditional chance.
        confidence: [N, g] raw confidences along drafts sampled with the engine's rule.
        stands: [N, g], whether the drafts up to each position were all accepted.
        group: [N], the answer each block belongs to.
        num_prompts: by kind of answer.
    """

    num_drafts: int
    greedy: RoundTally = field(init=False)
    shared_noise: RoundTally = field(init=False)
    rejection: RoundTally = field(init=False)
    greedy_drafts: RoundTally = field(init=False)
    simulated: RoundTally = field(init=False)
    marginal: dict[str, NDArray[np.float64]] = field(init=False)
    num_marginal: int = 0
    confidence: list[NDArray[np.float64]] = field(default_factory=list)
    stands: list[NDArray[np.bool_]] = field(default_factory=list)
    group: list[NDArray[np.int64]] = field(default_factory=list)
    num_prompts: dict[str, int] = field(default_factory=lambda: {"greedy": 0, "sampled": 0})

    def __post_init__(self) -> None:
        for name in ("greedy", "shared_noise", "rejection", "greedy_drafts", "simulated"):
            setattr(self, name, RoundTally(self.num_drafts))
        zeros = np.zeros(self.num_drafts)
        self.marginal = {"shared_noise": zeros, "rejection": zeros}

    def report(self) -> dict[str, Any]:
        """Plain numbers; absent where there was no such text."""
        report: dict[str, Any] = {}
        if self.greedy.num_anchors:
            report["greedy"] = {"num_answers": self.num_prompts["greedy"], **_summary(self.greedy)}
        if self.shared_noise.num_anchors:
            sampled: dict[str, Any] = {"num_answers": self.num_prompts["sampled"], "temperature": 1.0}
            for name in ("shared_noise", "rejection", "greedy_drafts"):
                sampled[name] = _summary(getattr(self, name))
                if name in self.marginal:
                    sampled[name]["acceptance"] = _rounded(self.marginal[name] / self.num_marginal)
            sampled["shared_noise"]["simulated_accept_length"] = round(self.simulated.accept_length, 4)
            report["sampled"] = sampled
        return report


def _rounded(values: Any) -> list[float]:
    return [round(float(v), 4) for v in values]


def _summary(tally: RoundTally) -> dict[str, Any]:
    return {
        "accept_length": round(tally.accept_length, 4),
        "uniform_accept_length": round(tally.uniform_accept_length, 4),
        "conditional_acceptance": _rounded(tally.conditional),
        "survival": _rounded(tally.survival),
        "num_anchors": tally.num_anchors,
    }


@torch.no_grad()
def evaluate(drafter: Drafter, documents: Documents, *, rows: int = 8, seed: int = 0) -> Evaluation:
    """Tally a drafter on answers of its target.

    Args:
        drafter: as loaded for serving, in the target's dtype.
        documents: answers at temperature 0 and 1; others are left out, and those too short for a block.
        rows: answers per pass.
    """
    result = Evaluation(drafter.config.max_drafts)
    generator = torch.Generator(drafter.fc.weight.device).manual_seed(seed)
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        reach = documents.lengths - documents.num_context
        chosen = np.flatnonzero((documents.temperature == temperature) & (reach > drafter.config.max_drafts))
        chosen = chosen[np.argsort(documents.lengths[chosen], kind="stable")]
        for at in range(0, len(chosen), rows):
            group = documents.subset(chosen[at : at + rows])
            for source, parts in _play(drafter, group, sampled=temperature > 0, generator=generator):
                _tally(result, kind, int(source), parts)
    return result


def _tally(result: Evaluation, kind: str, source: int, parts: dict[str, NDArray[Any]]) -> None:
    """Add one answer."""
    result.num_prompts[kind] += 1
    if kind == "greedy":
        result.greedy.add(parts["matches"].astype(np.float64))
        return
    result.greedy_drafts.add(parts["matches"].astype(np.float64))
    result.shared_noise.add(parts["shared_given"])
    result.rejection.add(parts["rejection_given"])
    result.simulated.add(parts["sampled_matches"].astype(np.float64))
    result.num_marginal += len(parts["matches"])
    for name in result.marginal:
        result.marginal[name] = result.marginal[name] + parts[name].sum(axis=0)
    if "confidence" in parts:
        result.confidence.append(parts["confidence"])
        result.stands.append(np.cumprod(parts["sampled_matches"], axis=1).astype(bool))
        result.group.append(np.full(len(parts["matches"]), source))


def _play(
    drafter: Drafter, documents: Documents, *, sampled: bool, generator: torch.Generator
) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
    """(prompt, per-block numbers [A, g] over all anchors) of each answer of a group."""
    device, config = drafter.fc.weight.device, drafter.config
    g = config.max_drafts
    num_rows, width = len(documents), int(documents.lengths.max())
    tokens = torch.zeros(num_rows, width, dtype=torch.int64)
    for row in range(num_rows):
        ids = documents[row].astype(np.int64)
        tokens[row, : len(ids)] = torch.from_numpy(ids)
    tokens = tokens.to(device)
    lengths = torch.from_numpy(documents.lengths).to(device)
    first = torch.from_numpy(documents.num_context.astype(np.int64)).to(device)
    positions = torch.arange(width, device=device).expand_as(tokens)
    out = drafter.target(tokens, positions, DenseCausalContext(), config.tap_layer_ids)
    k, v = drafter.context_kv(drafter.context_features(out.taps), positions)
    counts = (lengths - first - g).tolist()  # anchors whose whole block lies in the answer
    found: list[dict[str, Tensor]] = []
    for at in range(0, max(counts), ANCHORS_AT_ONCE):
        starts = first[:, None] + torch.arange(at, min(at + ANCHORS_AT_ONCE, max(counts)), device=device)
        valid = starts < lengths[:, None] - g
        starts = torch.where(valid, starts, first[:, None])
        labels = block_labels(tokens, lengths, starts, valid, g)
        hidden = drafter(labels.anchors, starts, BlockContext(k, v, starts)).flatten(0, 1)  # [N, W, d]
        rows = labels.rows.flatten(1)
        aim = out.hidden.gather(1, rows[..., None].expand(-1, -1, out.hidden.shape[-1]))
        aim = aim.view(len(hidden), g, -1)
        flat = (labels.anchors.flatten(), labels.previous.flatten(0, 1), labels.labels.flatten(0, 1))
        part = max(1, LOGIT_BYTES[device.type] // (g * config.draft_vocab_size * 8))
        pieces = [
            _judge(drafter, *piece, sampled=sampled, generator=generator)
            for piece in zip(*(t.split(part) for t in (hidden, aim, *flat)), strict=True)
        ]
        found.append(
            {name: torch.cat([p[name] for p in pieces]).unflatten(0, starts.shape) for name in pieces[0]}
        )
    whole = {name: torch.cat([f[name] for f in found], dim=1).cpu().numpy() for name in found[0]}
    for row in range(num_rows):
        yield int(documents.source[row]), {name: values[row, : counts[row]] for name, values in whole.items()}


def _judge(
    drafter: Drafter,
    hidden: Tensor,
    target_hidden: Tensor,
    anchors: Tensor,
    previous: Tensor,
    labels: Tensor,
    *,
    sampled: bool,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Numbers [N, g] of N blocks; the arguments are those of the loss."""
    slots = drafter.slots(hidden)
    greedy = drafter.chain(slots, anchors)
    found = {"matches": greedy.tokens == labels}
    if not sampled:
        return found
    log_p = torch.log_softmax(drafter.target.logits(target_hidden).double(), dim=-1)
    p, q = log_p.exp(), torch.softmax(drafter.teacher_forced(slots, previous).double(), dim=-1)
    noise = noise_given(log_p, labels, generator)
    chain = drafter.chain(slots, anchors, noise=lambda slot, logits: logits.double() + noise[:, slot])
    found |= {
        "shared_given": shared_noise_given(p, q, labels),
        "rejection_given": rejection_given(p, q, labels),
        "shared_noise": shared_noise_acceptance(p, q),
        "rejection": rejection_acceptance(p, q),
        "sampled_matches": chain.tokens == labels,
    }
    if chain.confidence is not None:
        found["confidence"] = chain.confidence.double()
    return found
