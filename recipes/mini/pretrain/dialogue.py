"""Hand-written conversations: who the model is, small talk, short Python how-tos and definitions.

A model of this size learns them by heart; they exist so that ``chat`` opens sensibly. The text is in
``dialogue.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from pretrain.common import PACKAGE

NAME = "Paceline mini"


def handwritten() -> Iterator[tuple[str, str]]:
    """All (user, assistant) pairs, small talk first."""
    data = json.loads((PACKAGE / "dialogue.json").read_text())
    for topic in data["small_talk"]:
        for number, question in enumerate(topic["questions"]):
            yield question, topic["answers"][number % len(topic["answers"])]
    for how_to in data["how_to"]:
        answer = "```python\n" + "\n".join(how_to["code"]) + f"\n```\n\n{how_to['remark']}"
        for template in data["how_to_questions"]:
            question = template.format(how_to["task"])
            yield question[0].upper() + question[1:], answer
    for thing, answer in data["facts"].items():
        for template in data["fact_questions"]:
            yield template.format(thing), answer
