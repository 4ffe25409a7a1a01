"""``paceline generate --explain``: each token in the colour of how it came."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from paceline.engine.outputs import BONUS, PLAIN, CompletionOutput, RequestMetrics
from paceline.text.detokenizer import IncrementalDetokenizer
from paceline.text.tokenizer import Tokenizer

DRAFT_COLOURS = (
    "#2ecc71",
    "#1abc9c",
    "#22a7d8",
    "#3b82f6",
    "#6366f1",
    "#8b5cf6",
    "#a855f7",
    "#c026d3",
)
"""By position in the draft, from 1; later positions take the last."""
BONUS_STYLE = "bold #f39c12"
PLAIN_STYLE = "default"


def style_of(origin: int) -> str:
    """The style of a token with this origin."""
    if origin == PLAIN:
        return PLAIN_STYLE
    if origin == BONUS:
        return BONUS_STYLE
    return DRAFT_COLOURS[min(origin, len(DRAFT_COLOURS)) - 1]


def coloured(completion: CompletionOutput, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Text:
    """The completion's text, token by token in its colour.

    A character made by several tokens takes the last one's. Text that a stop string cut off stays off.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    result = Text(overflow="fold")
    room = len(completion.text)
    last = PLAIN
    for token, last in zip(completion.token_ids, completion.origins, strict=True):
        piece = detokenizer.push([token])[:room]
        room -= len(piece)
        result.append(piece, style_of(last))
    result.append(detokenizer.flush()[:room], style_of(last))
    return result


def legend(completions: Sequence[CompletionOutput], metrics: RequestMetrics) -> Text:
    """What the colours mean, and what came of the drafts."""
    origins = [origin for completion in completions for origin in completion.origins]
    result = Text()
    result.append("plain", PLAIN_STYLE)
    if metrics.num_drafts:
        result.append("  draft")
        for position in range(1, max(origins, default=0) + 1):
            result.append(f" {position}", style_of(position))
        result.append("  ")
        result.append("bonus", BONUS_STYLE)
        result.append(
            f"   {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts stand in "
            f"{metrics.num_drafts} rounds, accept length {metrics.accept_length:.2f}"
        )
    else:
        result.append("   nothing was drafted")
    return result
