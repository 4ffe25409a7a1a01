"""What a DFlash or DSpark drafter computes, and whether it fits a target.

Every dialect of config in the wild is read into this one struct, see :mod:`paceline.models.drafter_dialects`.

Sources: DFlash (z-lab), DSpark (DeepSpec); the layout and the block are those of their papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from paceline.errors import CheckpointError, ConfigError
from paceline.models.config import Qwen3Config

Method = Literal["dflash", "dspark"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: Final = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter, whatever dialect it was written in.

    The layout is a property of the checkpoint. *Anchor first*: block slot k predicts the token after its own
    position and every slot is a draft. *Anchor drop*: slot k predicts the token at its own position and slot
    0, the anchor's, is no draft. The wrong one accepts next to nothing.

    Attributes:
        method: "dspark" when there is a Markov or a confidence head, else "dflash".
        dialect: which dialect it was read from, for messages.
        layers: geometry of the drafter's own layers; its vocabulary is the target's.
        block_size: rows of a block, the anchor's included.
        anchor_first: the layout.
        mask_token_id: the token fed to every slot but the anchor's.
        tap_layer_ids: target layers whose outputs condition the drafter: 0-based, increasing, -1 = embedding.
        markov: kind of the sequential head, None without one.
        markov_rank: its rank r, 0 without one.
        confidence: whether there is a confidence head.
        confidence_with_markov: whether that head also sees the Markov embedding of the previous token.
        draft_vocab_size: rows of the drafter's logits; smaller than the vocabulary when that was reduced.
        num_target_layers: layers of the target it was made for, None when the file does not say.
        window_non_causal: whether block rows of sliding layers see later block rows too.
    """

    method: Method
    dialect: str
    layers: Qwen3Config
    block_size: int
    anchor_first: bool
    mask_token_id: int
    tap_layer_ids: tuple[int, ...]
    draft_vocab_size: int
    markov: MarkovKind | None = None
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    num_target_layers: int | None = None
    window_non_causal: bool = False

    @property
    def max_drafts(self) -> int:
        """Drafts of one block."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def first_slot(self) -> int:
        """Block slot of the first draft."""
        return 0 if self.anchor_first else 1

    @property
    def reduced_vocab(self) -> bool:
        """Whether the drafter proposes from a part of the vocabulary only."""
        return self.draft_vocab_size != self.layers.vocab_size

    def num_drafts(self, requested: int | None) -> int:
        """Drafts per round: as many as asked for, or all of a block.

        Raises:
            ConfigError: more than a block holds, or none.
        """
        if requested is None:
            return self.max_drafts
        if not 1 <= requested <= self.max_drafts:
            raise ConfigError(
                f"num_speculative_tokens is {requested}; this drafter (block of {self.block_size}, anchor "
                f"{'first' if self.anchor_first else 'drop'}) drafts 1 to {self.max_drafts} tokens per round"
            )
        return requested

    def check_fit(self, target: Qwen3Config, where: str) -> None:
        """Refuse a drafter that cannot draft for the target.

        Raises:
            CheckpointError: naming both values.
        """

        def refuse(what: str, ours: object, theirs: object) -> CheckpointError:
            return CheckpointError(
                f"{where}: the drafter does not fit the target: {what} is {ours} in the drafter and {theirs} "
                "in the target"
            )

        if self.layers.hidden_size != target.hidden_size:
            raise refuse("hidden_size", self.layers.hidden_size, target.hidden_size)
        vocab = target.vocab_size
        if self.layers.vocab_size != vocab:
            raise refuse("vocab_size", self.layers.vocab_size, vocab)
        if self.mask_token_id >= vocab:
            raise refuse("the vocabulary", f"at least {self.mask_token_id + 1} (mask_token_id)", vocab)
        if self.draft_vocab_size > vocab:
            raise refuse("the vocabulary", f"at least {self.draft_vocab_size} (draft_vocab_size)", vocab)
        if self.num_target_layers not in (None, target.num_hidden_layers):
            raise refuse("the number of target layers", self.num_target_layers, target.num_hidden_layers)
        taps, last = list(self.tap_layer_ids), target.num_hidden_layers - 1
        if not taps or taps != sorted(set(taps)) or taps[0] < -1:
            raise CheckpointError(f"{where}: tapped layers must increase strictly from -1 on, got {taps}")
        if taps[-1] > last:
            raise refuse("the highest layer", f"{taps[-1]} (taps {taps})", last)
        if taps[-1] == last:
            raise CheckpointError(
                f"{where}: the taps {taps} include the target's last layer ({last}), where it is ambiguous "
                "whether the hidden state is taken before or after the final norm; such drafters are refused"
            )

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` other engines read: DeepSpec's flat dialect, z-lab's for an anchor-drop DFlash.

        Raises:
            CheckpointError: neither dialect can express this drafter.
        """
        dropped_dspark = self.method == "dspark" and not self.anchor_first
        if self.reduced_vocab or self.window_non_causal or dropped_dspark:
            raise CheckpointError(
                "only anchor-first drafters and anchor-drop DFlash drafters, over the full vocabulary and "
                "with causal windows, can be written"
            )
        values = self.layers.to_dict() | {
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
        }
        inner = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.tap_layer_ids)}
        if not self.anchor_first:
            return values | {"architectures": ["DFlashDraftModel"], "dflash_config": inner}
        values |= inner | {
            "architectures": ["Qwen3DSparkModel"],
            "enable_confidence_head": self.confidence,
            "markov_rank": self.markov_rank,
        }
        if self.confidence:
            values["confidence_head_with_markov"] = self.confidence_with_markov
        if self.markov is not None:
            values["markov_head_type"] = self.markov
        return values
