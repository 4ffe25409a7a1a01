"""At load: does the drafter fit the target at all?

A drafter read with the wrong anchor layout, taps or rope drafts without an error, and verification keeps the
output right; only the time it costs would show. So it drafts once on a fixed prompt before anyone is served.
"""

from __future__ import annotations

import logging
from pathlib import Path

from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MIN_ACCEPT_RATE = 0.02
"""A drafter below this is not weak, it is wired wrongly."""
NUM_ROUNDS = 24
TEXT = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"
)
"""Easy to continue: any drafter that works at all gets some of it right."""


def check_prompt(folder: Path) -> list[int] | None:
    """Token ids to draft on; None when the checkpoint has no tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return None
    return Tokenizer.from_folder(folder).encode(TEXT)


def self_check(core: EngineCore, prompt: list[int], drafter: str) -> float | None:
    """Draft greedily on ``prompt`` and log one warning if almost nothing is accepted.

    Ends as soon as the outcome is certain, which with a working drafter is after a round or two.

    Args:
        core: an engine made for this and thrown away afterwards: its counters and cache are used.
        prompt: token ids.
        drafter: its name, for the warning.

    Returns:
        Share of drafts accepted so far; None when context or cache are too short to tell.
    """
    num_drafts = core.scheduler.drafting.num_drafts
    info = core.info
    room = min(info.max_model_len, info.num_blocks * info.block_size) - len(prompt)
    if room < 2 * (num_drafts + 1):
        return None
    params = SamplingParams(
        temperature=0.0, max_tokens=min(room, NUM_ROUNDS * (num_drafts + 1)), ignore_eos=True
    )
    core.add(EngineRequest(request_id="self-check", prompt_token_ids=prompt, params=params))
    counters = core.scheduler.speculation
    enough = MIN_ACCEPT_RATE * NUM_ROUNDS * num_drafts
    while core.has_work and counters.num_drafts < NUM_ROUNDS and counters.num_accepted_tokens < enough:
        core.step()
    core.abort(["self-check"])
    while core.has_work:
        core.step()
    if counters.num_draft_tokens == 0:
        return None
    rate = counters.num_accepted_tokens / counters.num_draft_tokens
    if rate < MIN_ACCEPT_RATE:
        logger.warning(
            "THE DRAFTER DOES NOT FIT: of %d tokens that %s drafted on a fixed prompt the target took %d. "
            "Output stays right, but drafting only costs time. Likely causes: the anchor layout (the block "
            "starts at the anchor, or behind it), tap layer ids off by one, another rope base than in "
            "training, or a drafter trained for another target. Compare the drafter's config.json with its "
            "training, or serve without it.",
            counters.num_draft_tokens,
            drafter,
            counters.num_accepted_tokens,
        )
    return rate
