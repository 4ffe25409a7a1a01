"""The documentation against the code: links, commands, options, metrics, and the Python snippets run."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import paceline
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.engine.messages import EngineStats, HedgeStats, PlannerStats
from paceline.observability.metrics import Metrics
from paceline.sampling.params import SamplingParams
from paceline.server import schema
from paceline.speculation.config import SpeculativeConfig

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "golden" / "README.md"])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SERVE, PYTHON, SPECULATE = (ROOT / "docs" / f"{name}.md" for name in ("serve", "python", "speculate"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    """A page, without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{name} links to {target}: no such heading"


@pytest.mark.parametrize(
    "name", ["README.md", *(n for n in NAMES if n.startswith("docs/") and n.count("/") == 1)]
)
def test_files_named_exist(name: str) -> None:
    """`folder/file.py` and `folder/` in a page: from the root, or from the package."""
    for path in re.findall(r"`([\w./-]+/[\w.-]*)`", text_of(ROOT / name)):
        top = path.split("/")[0]
        if top not in ("src", "tests", "docs", "benchmarks", "recipes") and not path.endswith(".py"):
            continue
        assert (ROOT / path).exists() or (ROOT / "src" / "paceline" / path).exists(), f"{name} names {path}"


def test_classes_of_the_python_page_are_public() -> None:
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)[`(]", text_of(PYTHON))) - set(dir(builtins))
    assert {"Logprob", "RequestMetrics", "SpeculativeConfig"} <= named
    assert named <= set(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None


# ---- the command line


def commands() -> dict[str, Any]:
    """Every command by its words, such as ``bench decode``."""

    def walk(command: Any, words: str) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                yield from walk(child, f"{words} {name}".strip())
        else:
            yield words, command

    return dict(walk(typer.main.get_command(main.app), ""))


def flags(command: Any) -> set[str]:
    """All spellings of a command's flags."""
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


def shown(page: Path) -> list[list[str]]:
    """The command lines of a page, in code blocks and in code spans, without ``paceline``."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = [line for _, body in _FENCE.findall(text) for line in body.splitlines()]
    lines = [*blocks, *re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))]
    found = [re.match(r"(?:\.venv/bin/)?paceline (.*)", line) for line in lines]
    return [match[1].split(" #")[0].split() for match in found if match]


@pytest.mark.parametrize("name", NAMES)
def test_commands_shown_exist_with_their_flags(name: str) -> None:
    known = commands()
    groups = {words.split()[0] for words in known if " " in words}
    for words in shown(ROOT / name):
        command = known.get(" ".join(words[:2])) or known.get(words[0])
        if command is None:
            assert words[0] in groups and len(words) == 1, f"{name}: no command 'paceline {' '.join(words)}'"
            continue
        missing = {word for word in words if word.startswith("--")} - flags(command) - {"--help"}
        assert not missing, f"{name}: no flag {missing} of 'paceline {' '.join(words)}'"


@pytest.mark.parametrize("words", sorted(commands()))
def test_help_names_flags_whole_in_a_narrow_terminal(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(main.app, [*words.split(), "--help"]).output
    named = set(re.findall(r"--[\w-]+", text))
    assert {flag for flag in flags(commands()[words]) if flag.startswith("--")} <= named


def test_every_flag_of_serve_is_documented_and_exists() -> None:
    own = {flag for flag in flags(commands()["serve"]) if flag.startswith("--")} - {"--help"}
    table = re.findall(r"^\| (`--.*?) \|", text_of(SERVE), re.MULTILINE)
    documented = {flag for cell in table for flag in re.findall(r"`(--[\w-]+)`", cell)}
    assert documented <= own, documented - own
    assert {flag for flag in own if not flag.startswith("--no-")} <= documented, own - documented
    mentioned = set(re.findall(r"`(--[\w-]+)", text_of(SERVE)))
    assert mentioned <= own, mentioned - own


# ---- options, fields, metrics


def test_every_engine_option_is_documented() -> None:
    pages = text_of(SERVE) + text_of(PYTHON)
    for field in EngineConfig.__struct_fields__:
        assert f"`{field}`" in pages or f"`--{field.replace('_', '-')}`" in pages, field


def test_every_sampling_parameter_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", text_of(PYTHON), re.MULTILINE))
    defaults = SamplingParams()
    for field in SamplingParams.__struct_fields__:
        assert rows.get(field, "").strip("`") == str(getattr(defaults, field)), field


def test_every_key_of_speculative_config_is_documented() -> None:
    page = text_of(SPECULATE)
    for key in SpeculativeConfig.__struct_fields__:
        assert f"`{key}`" in page, key


@pytest.mark.parametrize(
    "kind", [schema.ChatCompletionRequest, schema.CompletionRequest, schema.StreamOptions]
)
def test_every_request_field_is_documented(kind: type[schema.SamplingFields]) -> None:
    for field in kind.__struct_fields__:
        assert f"`{field}`" in text_of(SERVE), field


STATS = EngineStats(
    accepted_per_position=[1],
    accept_lengths=[1, 1],
    draft_state={"hits": 1},
    planner=PlannerStats(rounds=[(7, "drafts pay", 1)], survival=[0.5]),
    hedging=HedgeStats(),
)
"""Everything that makes a family of metrics appear."""


def test_metrics_documented_are_those_exposed() -> None:
    metrics = Metrics("m")
    metrics.update(STATS)
    metrics.finished("stop")
    exposed = {family.name.partition(":")[2] for family in metrics.collect()}
    documented = set()
    for page in PAGES:
        for name in re.findall(r"(?:paceline|vllm):([a-z]\w+)", page.read_text(encoding="utf-8")):
            bare = re.sub(r"_(total|bucket|count|sum)$", "", name)
            assert {name, bare} & exposed, f"{page.name} names the metric {name}"
            documented |= {name, bare}
    assert exposed <= documented, exposed - documented


# ---- snippets


@pytest.mark.parametrize("page", [PYTHON, ROOT / "README.md"], ids=["python.md", "README.md"])
def test_python_snippets_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All snippets of a page that need no server, in order and in one namespace."""
    blocks = [body for kind, body in _FENCE.findall(page.read_text(encoding="utf-8")) if kind == "python"]
    runnable = [body for body in blocks if "base_url" not in body]
    assert runnable
    namespace: dict[str, object] = {"__name__": "__snippets__"}
    for body in runnable:
        exec(compile(body, page.name, "exec"), namespace)
    assert capsys.readouterr().out
