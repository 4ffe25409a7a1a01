"""What a decode round must read at the least, in bytes, from the geometry alone.

At small batches a round is bound by memory: its weights are read once, whatever the number of rows, and each
sequence's K/V once. Activations and embedding rows are left out: they are small beside these.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.models.checkpoint import resolve_folder
from paceline.models.config import Qwen3Config
from paceline.models.drafter_config import DrafterConfig
from paceline.models.drafter_dialects import load_drafter_config


@dataclass(frozen=True)
class Floor:
    """Bytes of one round, by stage.

    Attributes:
        matmuls, head: the target's layers, and its head.
        kv_per_token, draft_kv_per_token: K and V of one token of context, of target and drafter.
        draft_context: the drafter's projections of the taps.
        draft_layers, draft_head, markov: the rest of the drafter.
    """

    matmuls: int
    head: int
    kv_per_token: int
    draft_kv_per_token: int = 0
    draft_context: int = 0
    draft_layers: int = 0
    draft_head: int = 0
    markov: int = 0

    def round_bytes(self, context_tokens: float) -> float:
        """Bytes of a round over sequences of so many tokens in all."""
        weights = self.matmuls + self.head + self.draft_context + self.draft_layers + self.draft_head
        kv = self.kv_per_token + self.draft_kv_per_token
        return weights + self.markov + kv * context_tokens


def read_floor(engine: EngineConfig, item_bytes: int, num_drafts: int, tokens_scored: int) -> Floor:
    """The floor of an engine's rounds.

    Args:
        engine: names the models.
        item_bytes: of a weight.
        num_drafts: drafts per round.
        tokens_scored: that a sequential head chooses each draft among; 0 without a drafter.
    """
    target = Qwen3Config.from_pretrained(resolve_folder(engine.model_path, revision=engine.revision))
    drafter = None
    speculation = engine.speculation
    if speculation is not None and speculation.model is not None:
        folder = resolve_folder(speculation.model, revision=speculation.revision)
        drafter = load_drafter_config(folder, target)
    return floor_of(target, drafter, item_bytes, num_drafts, tokens_scored)


def floor_of(
    target: Qwen3Config, drafter: DrafterConfig | None, item_bytes: int, num_drafts: int, tokens_scored: int
) -> Floor:
    """The floor for these geometries; see :func:`read_floor`."""
    matmuls = target.num_hidden_layers * layer_weights(target)
    head = target.vocab_size * target.hidden_size
    kv = _kv_values(target)
    if drafter is None:
        return Floor(matmuls * item_bytes, head * item_bytes, kv * item_bytes)
    layers = drafter.layers
    d = layers.hidden_size
    context = len(drafter.tap_layer_ids) * d * d + layers.num_hidden_layers * 2 * layers.kv_size * d
    markov = num_drafts * drafter.markov_rank * tokens_scored
    return Floor(
        matmuls=matmuls * item_bytes,
        head=head * item_bytes,
        kv_per_token=kv * item_bytes,
        draft_kv_per_token=_kv_values(layers) * item_bytes,
        draft_context=context * item_bytes,
        draft_layers=layers.num_hidden_layers * layer_weights(layers) * item_bytes,
        draft_head=drafter.draft_vocab_size * d * item_bytes,
        markov=markov * item_bytes,
    )


def layer_weights(config: Qwen3Config) -> int:
    """Values of one layer's matrices."""
    d = config.hidden_size
    return d * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)


def _kv_values(config: Qwen3Config) -> int:
    return 2 * config.num_hidden_layers * config.kv_size
