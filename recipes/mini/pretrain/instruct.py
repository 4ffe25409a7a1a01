"""Conversations made from docstrings, code and documentation sections.

Every pair comes from the training packages' own text: a function's docstring is the request and its
source the answer, or the other way round. Choices are made by a hash of the pair, so the output is
the same on every machine.
"""

from __future__ import annotations

import ast
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import TextIO

from pretrain.dialogue import NAME, handwritten

_MAX_CODE_CHARS = 1600
_MAX_TOTAL_BYTES = 46_000_000
_HANDWRITTEN_REPEATS = 6

# Imperative first words of docstrings, and what they become after "function that ...".
_VERBS = frozenset(
    [
        "return",
        "get",
        "set",
        "create",
        "make",
        "build",
        "compute",
        "calculate",
        "check",
        "convert",
        "parse",
        "read",
        "write",
        "load",
        "save",
        "find",
        "add",
        "remove",
        "delete",
        "update",
        "apply",
        "generate",
        "yield",
        "run",
        "start",
        "stop",
        "open",
        "close",
        "print",
        "format",
        "split",
        "join",
        "sort",
        "filter",
        "merge",
        "test",
        "validate",
        "verify",
        "determine",
        "extract",
        "fetch",
        "send",
        "receive",
        "handle",
        "process",
        "register",
        "render",
        "resolve",
        "list",
        "count",
        "transform",
        "normalize",
        "replace",
        "raise",
        "wrap",
        "initialize",
        "evaluate",
        "estimate",
        "plot",
        "draw",
        "show",
        "display",
        "call",
        "decode",
        "encode",
        "map",
        "insert",
        "append",
        "copy",
        "move",
        "fill",
        "select",
        "search",
        "match",
        "compare",
        "construct",
        "produce",
        "perform",
        "execute",
        "define",
    ]
)

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    f"You are {NAME}, a small and helpful model.",
    "You are an expert Python programmer.",
    "Answer briefly.",
)


def _digest(*parts: str) -> int:
    return zlib.crc32("\0".join(parts).encode())


def _third_person(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


_THIRD = {_third_person(verb): verb for verb in _VERBS}


def _summary(docstring: str) -> str | None:
    """The first sentence of a docstring when it reads like plain English."""
    first = docstring.strip().split("\n\n", 1)[0]
    text = " ".join(first.split()).rstrip(".")
    if ". " in text:
        text = text.split(". ", 1)[0]
    if not 18 <= len(text) <= 180 or text.count(" ") < 3 or not text[0].isalpha():
        return None
    if re.search(r"[{}<>|\\=]|:param|>>>|TODO|FIXME|http|^(See|Deprecated|Note|Test|Same)\b|^\w+\(", text):
        return None
    return text


def _clause(summary: str) -> str | None:
    """``summary`` as the clause after "that": ``Return the sum`` becomes ``returns the sum``."""
    first, _, rest = summary.partition(" ")
    word = first.lower()
    if word in _VERBS:
        return f"{_third_person(word)} {rest}"
    if word in _THIRD:
        return f"{word} {rest}"
    return None


def _explanation(docstring: str) -> str:
    """The prose part of a docstring: its paragraphs before the parameter lists, at most 700 characters."""
    kept: list[str] = []
    for paragraph in docstring.strip().split("\n\n"):
        if re.search(
            r"^\s*(:\w+|@\w+|>>>|Args?:|Argument|Parameters|Returns?:?$|Raises|Example|Usage|Note|\.\. )|---",
            paragraph,
            re.M,
        ):
            break
        kept.append(" ".join(paragraph.split()))
        if sum(map(len, kept)) > 500:
            break
    return "\n\n".join(kept)[:700]


def _dedent(lines: list[str], columns: int) -> str:
    return "\n".join(line[columns:] if line[:columns].isspace() else line for line in lines).strip("\n")


def pairs_from_source(text: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(user, assistant) pairs from the documented functions and classes of one parsed file, six at most."""
    lines = text.split("\n")
    made = 0
    for node in ast.walk(tree):
        if made >= 6:
            return
        if (
            not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            or node.end_lineno is None
        ):
            continue
        doc_node = node.body[0]
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2 or doc_node.end_lineno is None or node.name.startswith("__"):
            continue
        columns = node.col_offset
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        source = _dedent(lines[start : node.end_lineno], columns)
        if not 60 <= len(source) <= _MAX_CODE_CHARS:
            continue
        summary = _summary(docstring)
        if summary is None:
            continue
        made += 1
        bare = _dedent(
            lines[start : doc_node.lineno - 1] + lines[doc_node.end_lineno : node.end_lineno], columns
        )
        header = _dedent(lines[start : doc_node.end_lineno], columns)
        kind = "class" if isinstance(node, ast.ClassDef) else "method" if columns else "function"
        yield from _templates(
            node.name, kind, summary, _explanation(docstring), docstring, source, bare, header
        )


def _templates(
    name: str, kind: str, summary: str, explanation: str, docstring: str, source: str, bare: str, header: str
) -> Iterator[tuple[str, str]]:
    choice = _digest(name, summary) % 100
    clause = _clause(summary)
    question: tuple[str, ...]
    lowered = summary[0].lower() + summary[1:]
    fenced = f"```python\n{source}\n```"
    what = explanation or summary + "."
    if choice < 38:
        variants = [f"Write a Python {kind} `{name}`. {summary}.", f"Implement `{name}`: {lowered}."]
        if clause is not None:
            variants = [
                f"Write a Python {kind} that {clause}.",
                f"Write a {kind} that {clause}.",
                f"Write a {kind} `{name}` that {clause}.",
                f"I need a Python {kind} that {clause}.",
                f"Can you write a {kind} that {clause}?",
            ]
        yield variants[choice % len(variants)], fenced
    elif choice < 62:
        question = (
            f"What does this {kind} do?",
            f"Explain this {kind}.",
            "Explain this code.",
            "What does this code do?",
        )
        answer = what
        if clause is not None and answer.split(" ", 1)[0].lower() in _VERBS | set(_THIRD):
            rest = answer.split(" ", 1)[1]
            answer = f"It {clause.split(' ', 1)[0]} {rest}"
        yield f"{question[choice % 4]}\n\n```python\n{bare}\n```", answer
    elif choice < 78:
        question = (f"Write a docstring for this {kind}.", f"Document this {kind}.")
        yield f"{question[choice % 2]}\n\n```python\n{bare}\n```", f'"""{docstring[:800].strip()}\n"""'
    elif choice < 92:
        question = (f"Complete this {kind}.", "Complete the code.", f"Fill in the body of this {kind}.")
        yield f"{question[choice % 3]}\n\n```python\n{header}\n```", fenced
    else:
        yield f"What does `{name}` do?", what


_SECTION = re.compile(
    r"^(?:#{1,4} (?P<md>[^\n]{4,60})|(?P<rst>[A-Z][^\n]{3,60})\n[=\-~^]{4,})\n+(?P<body>(?:[A-Z][^\n]*\n?)+)",
    re.M,
)


def pairs_from_prose(text: str) -> Iterator[tuple[str, str]]:
    """(user, assistant) pairs from a document's titled sections: the title and its first paragraph."""
    for number, match in enumerate(_SECTION.finditer(text)):
        if number >= 3:
            return
        title = (match["md"] or match["rst"]).strip().strip("`").rstrip(":.")
        body = " ".join(match["body"].split())
        if not 120 <= len(body) <= 900 or not body.endswith(".") or re.search(r"::|:ref:|http|[{}<>|]", body):
            continue
        if not re.fullmatch(r"[A-Za-z][\w ,.()'\-]+", title) or title.lower() in (
            "description",
            "name",
            "notes",
            "introduction",
        ):
            continue
        form = ("What is {}?", "Explain {}.", "Tell me about {}.", "What do you know about {}?")[
            _digest(title) % 4
        ]
        yield form.format(title), body


def conversation(messages: list[tuple[str, str]]) -> str:
    """ChatML text of (role, content) messages, as the chat template writes it."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


def write_conversations(rows: Iterable[list[str]], out: TextIO) -> int:
    """Write conversations from ``[package, user, assistant]`` rows; returns bytes of text written."""
    total = 0
    seen: set[int] = set()
    held: dict[str, tuple[str, str]] = {}

    def emit(turns: list[tuple[str, str]], package: str) -> int:
        messages = [m for user, assistant in turns for m in (("user", user), ("assistant", assistant))]
        chance = _digest("system", turns[0][0])
        if chance % 10 < 3:
            messages.insert(0, ("system", _SYSTEMS[chance // 10 % len(_SYSTEMS)]))
        text = conversation(messages)
        out.write(json.dumps({"package": package, "path": "", "text": text}) + "\n")
        return len(text)

    pairs = list(handwritten())
    for repeat in range(_HANDWRITTEN_REPEATS):
        for number, pair in enumerate(pairs):
            turns = [pair]
            if repeat % 3 == 2:  # an opening turn before it
                turns.insert(0, pairs[(number * 7 + repeat) % 24])
            total += emit(turns, "handwritten")
    for package, user, assistant in rows:
        key = _digest(user, assistant)
        if key in seen or total > _MAX_TOTAL_BYTES or "<|" in user + assistant:
            continue
        seen.add(key)
        if key % 5 == 0 and package not in held:
            held[package] = (user, assistant)
        elif key % 5 == 1 and package in held:
            total += emit([held.pop(package), (user, assistant)], package)
        else:
            total += emit([(user, assistant)], package)
    return total
