"""Where rounds break, and what a second chain of drafts would have saved: the study behind hedge positions.

Prompts are continued greedily. Every round's block is drafted again from the whole text and held against the
tokens that really followed. A round *breaks* at the first draft that falls. A hedge at position p is the
chain that takes the drafter's second best there and goes on from it; it helps exactly in rounds that break at
p with the second best right, so what several positions gain adds up. The gain counts the whole tail of the
chain. It is what the same rounds would have committed more; that later rounds then begin elsewhere is left
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from paceline.bench.driver import Driver, with_every_draft
from paceline.bench.machine import describe_engine, describe_machine
from paceline.bench.report import Column, Plot, Report, Row
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.drafter import Drafter
from paceline.proving.drive import Round, RoundRecorder, complete, runner_of
from paceline.proving.prompts import read_prompts
from paceline.proving.redraft import by_life, dense_blocks
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer

MAX_SEQS = 8
NUM_HEDGED = 4
"""Positions from 0 on that hedge sets are made of; later ones break too seldom."""
COLUMNS = (
    Column("at", "breaks at,\nor hedges"),
    Column("share", "share of\nrounds", ".1%"),
    Column("second", "2nd best\nright", ".1%"),
    Column("third", "3rd\nright", ".1%"),
    Column("fourth", "4th\nright", ".1%"),
    Column("gain", "tokens gained\nper round", ".3f"),
    Column("accept_length", "accept\nlength", ".3f"),
)


@dataclass(frozen=True, slots=True)
class Break:
    """What became of one round.

    Attributes:
        accepted: drafts that stood; as many as there are when it did not break.
        rank: of the right token among the drafter's scores where it broke: 2 is the second best. None
            without a break, or when the drafter cannot say that token.
        gain: drafts more that the chain with the second best at the break would have had accepted.
    """

    accepted: int
    rank: int | None
    gain: int


def run_breaks(engine: EngineConfig, prompts_path: str | None, output_len: int) -> Report:
    """Run the prompts and study their rounds.

    Raises:
        ConfigError: no drafter, prompts that cannot be read, or outputs too short for a whole round.
    """
    if engine.speculation is None:
        raise ConfigError("There is no drafter to study. Name one with --speculative-config.")
    texts = read_prompts(prompts_path)
    driver = Driver(with_every_draft(engine))
    tokenizer = Tokenizer.from_folder(Path(driver.info.folder))
    recorder = RoundRecorder.on(driver.core)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for i in range(0, len(texts), MAX_SEQS):
        complete(driver.core, [tokenizer.encode(text) for text in texts[i : i + MAX_SEQS]], params)
    stage = runner_of(driver.core).drafting
    assert stage is not None
    breaks = study(stage.drafter, recorder.rounds, stage.num_drafts)
    if not breaks:
        raise ConfigError(
            f"output_len is {output_len}: no round of {stage.num_drafts} drafts ends before the text does. "
            f"Give at least {2 * stage.num_drafts + 2}."
        )
    return Report(
        "breaks",
        describe_machine(torch.device(driver.info.device)),
        {
            **describe_engine(driver),
            "prompts": len(texts),
            "output_len": output_len,
            "rounds": len(breaks),
        },
        COLUMNS,
        Plot("at", "gain", bars=True),
        [*summarise(breaks, stage.num_drafts)],
    )


def summarise(breaks: Sequence[Break], num_drafts: int) -> Iterator[Row]:
    """A row per position, and one per set of hedge positions, the most useful first."""
    total = len(breaks)
    accepted = sum(item.accepted for item in breaks)
    gains = [0] * num_drafts
    for position in range(num_drafts):
        here = [item for item in breaks if item.accepted == position]
        ranks = Counter(item.rank for item in here)
        gains[position] = sum(item.gain for item in here)
        yield {
            "at": str(position),
            "share": len(here) / total,
            **{name: ranks[rank] / max(len(here), 1) for name, rank in RANKS.items()},
            "gain": gains[position] / total,
            "accept_length": None,
        }
    sets = [set_ for size in range(NUM_HEDGED) for set_ in combinations(range(NUM_HEDGED), size + 1)]
    sets = [set_ for set_ in ((), *sets) if max(set_, default=0) < num_drafts]
    for set_ in sorted(sets, key=lambda positions: (len(positions), -sum(gains[p] for p in positions))):
        gain = sum(gains[p] for p in set_) / total
        yield {
            "at": "{" + ",".join(map(str, set_)) + "}",
            "gain": gain,
            "accept_length": 1 + accepted / total + gain,
        }


RANKS = {"second": 2, "third": 3, "fourth": 4}


@torch.inference_mode()
def study(drafter: Drafter, rounds: Iterable[Round], num_drafts: int) -> list[Break]:
    """Draft the blocks of greedy rounds again, and see where each breaks.

    Args:
        drafter: bound to the target whose rounds these are.
        rounds: any, in order. Those whose block overhangs the end of their text are left out.
        num_drafts: drafts per round.
    """
    return [item for life in by_life(rounds) for item in _study_life(drafter, life, num_drafts)]


def _study_life(drafter: Drafter, rounds: Sequence[Round], num_drafts: int) -> Iterator[Break]:
    text = rounds[-1].text
    whole = [item.start for item in rounds if item.start + num_drafts < len(text)]
    if not whole:
        return
    tokens, _, starts, anchors, slots = dense_blocks(drafter, text, whole, num_drafts)
    offsets = torch.arange(num_drafts, device=tokens.device)
    truth = tokens[starts[..., None] + offsets + 1]  # [1, A, g]
    chain = drafter.chain(slots, anchors)
    accepted = _stands(chain.tokens, truth)  # [1, A]
    at = accepted.clamp(max=num_drafts - 1)[..., None]
    # The chain that takes the second best where the first broke.
    hedge = torch.where(offsets < at, chain.tokens, -1).scatter(-1, at, chain.runner_up.gather(-1, at))
    gain = (_stands(drafter.chain(slots, anchors, hedge).tokens, truth) - accepted).clamp(min=0)
    scores = chain.logits.gather(-2, at[..., None].expand(-1, -1, -1, chain.logits.shape[-1]))[..., 0, :]
    ranks = _ranks(drafter, scores[0], truth.gather(-1, at)[0, :, 0])
    for stood, rank, more in zip(accepted[0].tolist(), ranks, gain[0].tolist(), strict=True):
        broke = stood < num_drafts
        yield Break(stood, rank if broke else None, more if broke else 0)


def _stands(drafts: Tensor, truth: Tensor) -> Tensor:
    """How many leading drafts equal the truth: [*, g] -> [*]."""
    return (drafts == truth).long().cumprod(-1).sum(-1)


def _ranks(drafter: Drafter, scores: Tensor, token_ids: Tensor) -> list[int | None]:
    """Rank of each target id [A] in scores [A, draft vocabulary]; 1 is the best."""
    if drafter.target_ids is None:
        draft_ids, known = token_ids, torch.ones_like(token_ids, dtype=torch.bool)
    else:
        same = drafter.target_ids == token_ids[:, None]
        draft_ids, known = same.long().argmax(-1), same.any(-1)
    ranks = (scores > scores.gather(-1, draft_ids[:, None])).sum(-1) + 1
    return [rank if ok else None for rank, ok in zip(ranks.tolist(), known.tolist(), strict=True)]
