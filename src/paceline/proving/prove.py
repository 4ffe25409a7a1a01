"""``paceline prove``: that a drafter changes nothing, shown for a user's own model and drafter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.errors import ConfigError
from paceline.models.checkpoint import resolve_folder
from paceline.proving.closeness import ClosenessProof, closeness_modes
from paceline.proving.drive import RoundRecorder, complete, runner_of, tokens_of
from paceline.proving.gates import (
    Violation,
    acceptance_floor,
    accepted_as_coupled,
    drafts_as_recomputed,
    flat_acceptance,
    hedges_win_and_lose,
    nothing_held,
    second_turns,
)
from paceline.proving.lossless import ALL_DRAFTS, GREEDY, PLAIN, LosslessProof, ModeResult, all_modes
from paceline.proving.out_file import check_writable
from paceline.proving.prompts import PROMPTS, read_prompts
from paceline.proving.redraft import redraft
from paceline.proving.report import as_json, show_checks, show_modes
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer

MAX_SEQS = 32
MAX_CONTINUATION = 48
BLOCK = 16


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """What to prove, and on how much.

    Attributes:
        target: model, None for the bundled one.
        drafter: its drafter; None for the bundled one.
        device, dtype: as in ``EngineConfig``.
        prompts: file with one prompt per line, text or a JSON list of token ids; None for built-in ones.
        num_prompts: prompts to run.
        max_tokens: tokens to generate for each.
    """

    target: str | None = None
    drafter: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    prompts: str | None = None
    num_prompts: int = 32
    max_tokens: int = 48


@dataclass(slots=True)
class Check:
    """A gate that looks at more than output tokens.

    Attributes:
        name: what was asked.
        detail: on how much it was asked.
    """

    name: str
    detail: str
    violations: list[Violation] = field(default_factory=list)


@dataclass(slots=True)
class Proof:
    """Everything that was found."""

    level: str
    modes: list[ModeResult]
    checks: list[Check]

    @property
    def violations(self) -> list[Violation]:
        """All of them."""
        modes = [item for result in self.modes for item in result.violations]
        return [*modes, *(item for check in self.checks for item in check.violations)]


def run_prove(options: ProveOptions, json_path: str | None) -> bool:
    """Prove, print, write ``json_path`` if given.

    Returns:
        Whether no gate was violated.

    Raises:
        ConfigError: a drafter is missing, the prompts cannot be used, or ``json_path`` cannot be written.
    """
    if json_path is not None:
        check_writable("--json", json_path)
    console = Console(highlight=False)
    proof = _Prover(options, Console(stderr=True, highlight=False)).prove()
    show_modes(console, proof.level, proof.modes)
    show_checks(console, proof.checks)
    for item in proof.violations[:20]:
        console.print(f"[red]violation[/] {item}", soft_wrap=True)
    if len(proof.violations) > 20:
        console.print(f"... and {len(proof.violations) - 20} more")
    if json_path is not None:
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(as_json(proof))))
    if proof.violations:
        console.print(f"[bold red]Not proved:[/] {len(proof.violations)} violations.")
    else:
        console.print("[bold green]Proved:[/] no gate was violated.")
    return not proof.violations


class _Prover:
    """Loads, runs and checks, one engine at a time.

    Args:
        options: what to prove.
        console: for progress.
    """

    def __init__(self, options: ProveOptions, console: Console) -> None:
        if options.target is not None and options.drafter is None:
            raise ConfigError(
                f"prove needs a drafter for {options.target}. Name one with --drafter, or give neither "
                "--target nor --drafter for the bundled pair."
            )
        self._options = options
        self._console = console
        self._drafter: dict[str, Any] = {"method": "dspark"}
        if options.drafter is not None:
            self._drafter = {"model": options.drafter}
        self._base = {"model": options.target, "device": options.device, "dtype": options.dtype}
        plain = self._core({"num_blocks": 1024, "max_num_seqs": MAX_SEQS}, speculative={})
        self._exact = plain.info.device == "cpu" and plain.info.dtype == "float32"
        self._prompts = self._make_prompts(plain)

    def _core(self, options: Mapping[str, Any], speculative: Mapping[str, Any]) -> EngineCore:
        fields = {**self._base, **options, "speculative_config": speculative}
        return make_core(EngineConfig.of(**fields), lookahead=0)

    # ------------------------------------------------------------------ prompts

    def _make_prompts(self, plain: EngineCore) -> list[list[int]]:
        room = plain.info.max_model_len - self._options.max_tokens - 2 * BLOCK
        if room < 1:
            raise ConfigError(
                f"max_tokens is {self._options.max_tokens}, but the model's context is only "
                f"{plain.info.max_model_len} tokens. Lower max_tokens."
            )
        if self._options.prompts is not None:
            return [ids[:room] for ids in self._read(self._options.prompts, plain)]
        return [ids[:room] for ids in self._grow(self._openings(plain), plain)]

    def _tokenizer(self) -> Tokenizer | None:
        folder = resolve_folder(EngineConfig.of(**self._base).model_path)
        return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None

    def _read(self, path: str, plain: EngineCore) -> list[list[int]]:
        tokenizer = self._tokenizer()
        prompts = []
        for number, line in enumerate(read_prompts(path)[: self._options.num_prompts], start=1):
            ids = _token_ids(line)
            if ids is None and tokenizer is None:
                raise ConfigError(
                    f"--prompts {path}, line {number} is text, but the model has no tokenizer. Give JSON "
                    "lists of token ids."
                )
            if ids is None:
                assert tokenizer is not None
                ids = tokenizer.encode(line)
            if not ids or not all(0 <= token < plain.info.vocab_size for token in ids):
                raise ConfigError(
                    f"--prompts {path}, line {number}: token ids must be a non-empty list of values in "
                    f"0..{plain.info.vocab_size - 1}."
                )
            prompts.append(ids)
        return prompts

    def _openings(self, plain: EngineCore) -> list[list[int]]:
        """Beginnings of texts; single tokens when there is no tokenizer."""
        tokenizer = self._tokenizer()
        if tokenizer is not None:
            return [tokenizer.encode(text) for text in PROMPTS]
        rng = random.Random(0)
        return [[rng.randrange(plain.info.vocab_size)] for _ in range(16)]

    def _grow(self, openings: Sequence[list[int]], plain: EngineCore) -> list[list[int]]:
        """The model's own continuations, cut anywhere: texts it would meet, many with a common beginning."""
        count = self._options.num_prompts
        params = [
            SamplingParams(
                temperature=1.0 if i % 2 else 0.0, seed=i, max_tokens=MAX_CONTINUATION, ignore_eos=True
            )
            for i in range(count)
        ]
        begun = [openings[i % len(openings)] for i in range(count)]
        rng = random.Random(1)
        return [
            [*opening, *tokens[: rng.randrange(MAX_CONTINUATION + 1)]]
            for opening, tokens in zip(begun, tokens_of(complete(plain, begun, params)), strict=True)
        ]

    # ------------------------------------------------------------------ proofs

    def prove(self) -> Proof:
        """Everything that can be asked on this device."""
        if self._exact:
            modes = list(self._lossless())
            return Proof("L1: the same tokens (CPU, float32)", modes, [_hedges(modes), *self._checks()])
        modes = list(self._closeness())
        return Proof("L2: scored against plain decoding", modes, [_hedges(modes), *self._loose_checks()])

    def _sized(self) -> EngineConfig:
        """Room for everything that runs at once, and no more: scoring needs memory beside it."""
        longest = max(len(prompt) for prompt in self._prompts) + self._options.max_tokens + 2 * BLOCK
        blocks = -(-longest // BLOCK) * (MAX_SEQS + 8)
        return EngineConfig.of(**self._base, num_blocks=blocks, max_num_seqs=MAX_SEQS)

    def _lossless(self) -> Iterator[ModeResult]:
        max_tokens = self._options.max_tokens
        with self._console.status("plain decoding"):
            proof = LosslessProof(self._sized(), self._drafter, self._prompts, max_tokens)
        for mode in all_modes(self._prompts, max_tokens):
            with self._console.status(mode.name):
                yield from proof.run(mode)

    def _closeness(self) -> Iterator[ModeResult]:
        proof = ClosenessProof(self._sized(), self._drafter, self._prompts, self._options.max_tokens)
        for mode in closeness_modes():
            with self._console.status(mode.name):
                yield from proof.run(mode)

    # ------------------------------------------------------------------ checks

    def _engine(self, **speculative: Any) -> EngineCore:
        sized = self._sized()
        options = {"num_blocks": sized.num_blocks, "max_num_seqs": sized.max_num_seqs}
        return self._core(options, {**ALL_DRAFTS, **self._drafter, **speculative})

    def _loose_checks(self) -> Iterator[Check]:
        """Those that need no exact arithmetic."""
        core = self._engine()
        complete(core, self._prompts, GREEDY.params(len(self._prompts), self._options.max_tokens))
        stats = core.stats()
        detail = f"{stats.num_accepted_tokens:,} of {stats.num_draft_tokens:,} drafts"
        floor = acceptance_floor(stats.num_draft_tokens, stats.num_accepted_tokens)
        yield Check("drafts stand", detail, floor)
        yield Check("nothing is held afterwards", f"{core.pool.num_blocks} blocks", nothing_held(core))

    def _checks(self) -> Iterator[Check]:
        yield from self._loose_checks()
        with self._console.status("drafts from the whole text"):
            for state in ("paged", "capture"):
                yield from self._draft_checks(state)
        with self._console.status("second turns"):
            yield self._turns()

    def _draft_checks(self, state: str) -> Iterator[Check]:
        core = self._engine(draft_state=state)
        drafter = runner_of(core).drafting
        assert drafter is not None
        by_share: dict[str, list[tuple[int, int]]] = {}
        prompts = [prompt for prompt in self._prompts if len(prompt) > BLOCK][:8]
        recorder = RoundRecorder.on(core)
        for share in (0, 50, 95, 100):
            core.reset_prefix_cache()
            counts = []
            for prompt in prompts:
                if share:
                    complete(core, [prompt[: -(-len(prompt) * share // 100)]], GREEDY.params(1, 1))
                (((output,),)) = complete(core, [prompt], GREEDY.params(1, self._options.max_tokens))
                counts.append((output.num_draft_tokens, output.num_accepted_tokens))
            by_share[f"{share} % cached"] = counts
        name = f"{state}: same rounds with 0 to 100 % cached"
        if prompts:
            yield Check(name, f"{len(prompts)} prompts", flat_acceptance(by_share))
        greedy = redraft(drafter.drafter, recorder.rounds)
        yield Check(
            f"{state}: drafts are those of the whole text",
            f"{len(greedy):,} rounds",
            drafts_as_recomputed(greedy),
        )
        recorder = RoundRecorder.on(core)
        complete(core, self._prompts, PLAIN.params(len(self._prompts), self._options.max_tokens))
        sampled = redraft(drafter.drafter, recorder.rounds)
        yield Check(
            f"{state}: as many noisy drafts stand as should",
            f"{len(sampled):,} rounds",
            accepted_as_coupled(sampled),
        )

    def _turns(self) -> Check:
        prompt = self._prompts[0]
        border = (len(prompt) // BLOCK + 2) * BLOCK
        conversations = [
            (
                [*prompt[:-1], self._prompts[i % len(self._prompts)][0], prompt[-1]],
                SamplingParams(
                    temperature=0.0, max_tokens=border - len(prompt) - 1 + offset, ignore_eos=True
                ),
            )
            for i, offset in enumerate(range(-6, 6))
        ]
        probe = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=20)
        found = second_turns(self._engine(), self._engine(), conversations, prompt[:3], probe)
        return Check("second turns equal a fresh engine's", f"{len(conversations)} conversations", found)


def _hedges(modes: Sequence[ModeResult]) -> Check:
    """Whether chains won and lost."""
    wins, losses = (sum(getattr(mode, name) for mode in modes) for name in ("hedge_wins", "hedge_losses"))
    detail = f"{wins:,} won, {losses:,} lost"
    return Check("hedge chains win and lose", detail, hedges_win_and_lose(wins, losses))


def _token_ids(line: str) -> list[int] | None:
    """A line that is a JSON list of integers; None for text."""
    if not line.lstrip().startswith("["):
        return None
    try:
        return msgspec.json.decode(line, type=list[int])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
