"""Everything a training run is asked for, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.models.config import Qwen3Config
from paceline.models.drafter_config import MARKOV_KINDS, DrafterConfig, MarkovKind, Method
from paceline.models.drafter_dialects import default_taps

MAX_DEFAULT_TAPS: Final = 5


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of ``paceline train-drafter``.

    Attributes:
        target: checkpoint folder or hub name of the model to draft for.
        data: files of prompts, or of answers made before.
        out: folder that receives the drafter, the report and the state for resuming.
        method: "dspark" (anchor first, Markov and confidence heads) or "dflash" (anchor drop, none).
        num_layers: layers of the drafter.
        block_size: rows of a block; None = 7 (dspark) or 8 (dflash), which are 7 drafts either way.
        intermediate_size: of the drafter's MLPs; None = the target's.
        markov_rank, markov_head: of the sequential head; dspark only.
        taps: target layers whose outputs condition the drafter; None = up to five, evenly spaced.
        mask_token_id: None = the tokenizer's mask token, or an id the tokenizer does not use.
        eval_data: held-out prompts or answers; None holds out ``eval_share`` of the prompts.
        max_eval_prompts: held-out prompts used at most.
        temperatures: answers are sampled at these in turn; 0 is greedy.
        answer_len: tokens of an answer at most.
        max_len: tokens of prompt and answer at most.
        num_seqs: answers generated at once per engine; None = 32 on a CPU, 512 on a GPU.
        num_engines: engines per process that generate side by side; a small target leaves a GPU idle between
            the steps of one.
        regenerate_minutes: stop generating after so long and train on what is there.
        steps, minutes: length of the training; with neither, six passes over the data.
        learning_rate, warmup, weight_decay, clip_norm: AdamW; warm-up is a share of the run, a cosine to 0
            follows.
        tokens_per_step: padded tokens per step, over all processes.
        anchor_every: one block per so many tokens.
        decay: draft j weighs exp(-j / decay).
        compile: compile the loss, the widest part of a step; pays on a GPU in runs of some minutes.
        with_tables: write copies of the target's embedding and head, as DeepSpec's own checkpoints have.
        checkpoint_minutes: between states for resuming.
        device: "auto", "cpu" or "cuda".
        seed: of weights, data order and sampling.
        show_progress: progress bars on stderr.
    """

    target: str
    data: tuple[Path, ...]
    out: Path
    method: Method = "dspark"
    num_layers: int = 2
    block_size: int | None = None
    intermediate_size: int | None = None
    markov_rank: int = 256
    markov_head: MarkovKind = "vanilla"
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    eval_data: tuple[Path, ...] = ()
    eval_share: float = 0.02
    max_eval_prompts: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    answer_len: int = 512
    max_len: int = 2048
    num_seqs: int | None = None
    num_engines: int = 1
    regenerate_minutes: float | None = None
    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 6e-4
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    tokens_per_step: int = 32768
    anchor_every: int = 8
    decay: float = 4.0
    compile: bool = False
    with_tables: bool = False
    checkpoint_minutes: float = 10.0
    device: str = "auto"
    seed: int = 0
    show_progress: bool = False

    def __post_init__(self) -> None:
        if self.method not in ("dspark", "dflash"):
            raise _refusal("method", self.method, "dspark or dflash")
        if self.markov_head not in MARKOV_KINDS:
            raise _refusal("markov_head", self.markov_head, " or ".join(MARKOV_KINDS))
        if self.steps is not None and self.minutes is not None:
            raise ConfigError("steps and minutes are both given; the length of the run is one or the other")
        positive = (
            "num_layers intermediate_size max_eval_prompts answer_len num_seqs num_engines "
            "regenerate_minutes steps minutes learning_rate clip_norm tokens_per_step anchor_every decay "
            "checkpoint_minutes"
        )
        for name in positive.split():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise _refusal(name, value, "above 0")
        limits = (
            ("block_size", 2, 64),
            ("markov_rank", 0, 4096),
            ("eval_share", 0.0, 0.5),
            ("max_len", 16, 2**20),
            ("warmup", 0.0, 1.0),
            ("weight_decay", 0.0, 1.0),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise _refusal(name, value, f"from {low} to {high}")
        if not self.temperatures or not all(0 <= t <= 2 for t in self.temperatures):
            raise _refusal("temperatures", list(self.temperatures), "one or more numbers from 0 to 2")
        if self.method == "dspark" and self.markov_rank == 0:
            raise _refusal("markov_rank", 0, "at least 1 for dspark, whose heads need it")

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must agree on, as plain values."""
        changeable = ("out", "data", "eval_data", "show_progress", "device", "compile", "checkpoint_minutes")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in changeable}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def drafter_config(self, target: Qwen3Config, mask_token_id: int) -> DrafterConfig:
        """The drafter to train.

        Raises:
            CheckpointError: taps or mask token do not fit the target.
        """
        depth = target.num_hidden_layers
        dspark = self.method == "dspark"
        # Full attention, no scaling of the rotation: both are the target's own business.
        layers = replace(
            target,
            num_hidden_layers=self.num_layers,
            intermediate_size=self.intermediate_size or target.intermediate_size,
            windows=(None,) * self.num_layers,
            rope=replace(target.rope, kind="default", factor=1.0),
            tie_word_embeddings=False,
        )
        config = DrafterConfig(
            method=self.method,
            dialect="deepspec" if dspark else "z-lab",
            layers=layers,
            block_size=self.block_size or (7 if dspark else 8),
            anchor_first=dspark,
            mask_token_id=mask_token_id,
            tap_layer_ids=self.taps or default_taps(depth, max(1, min(MAX_DEFAULT_TAPS, depth - 3))),
            draft_vocab_size=target.vocab_size,
            markov=self.markov_head if dspark else None,
            markov_rank=self.markov_rank if dspark else 0,
            confidence=dspark,
            confidence_with_markov=dspark,
            num_target_layers=depth,
        )
        config.check_fit(target, "the drafter to train")
        return config


def _refusal(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value}; it must be {allowed}")
