"""DFlash and DSpark drafters against the independent numbers of ``tests/golden``; mutants must miss them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from model_cases import TOLERANCE, GoldenSet
from torch import Tensor

from paceline.models import drafter as drafters
from paceline.models.attention import DenseCausalContext
from paceline.models.config import RopeConfig
from paceline.models.draft_attention import DenseDraftContext
from paceline.models.drafter import Chain, Drafter, DraftSlots
from paceline.models.drafter_config import DrafterConfig
from paceline.models.drafter_loader import load_drafter
from paceline.models.loader import load_model
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.ops import BlockNoise
from paceline.sampling.noise import gumbel, row_keys
from paceline.sampling.state import INV_TEMPERATURE, NUM_FLOATS, NUM_INTS, SEED_KEY
from support.engines import DRAFTERS

DSPARK = tuple(name for name in DRAFTERS if name.startswith("dspark"))


@cache
def target() -> Qwen3ForCausalLM:
    """All drafter sets are for this one."""
    return load_model(GoldenSet("qwen3_tiny").folder)


@cache
def golden(name: str) -> tuple[GoldenSet, Drafter]:
    """Loaded once per process."""
    found = GoldenSet(name)
    return found, load_drafter(found.folder, target())


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def detailed(found: GoldenSet) -> list[dict[str, Any]]:
    """The cases that carry whole rounds."""
    return [case for case in found.meta["cases"] if "r1" in case]


def context_tokens(found: GoldenSet, case: dict[str, Any], round_name: str) -> Tensor:
    """Every token before the anchor of that round."""
    prompt = found[f"{case['name']}.input_ids"]
    if round_name == "r1":
        return prompt
    return torch.cat((prompt, found[f"{case['name']}.r2.new_context_tokens"]))


@torch.no_grad()
def features_of(drafter: Drafter, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(tap rows [S, n * d], context features [S, d]) of a token sequence."""
    rows = target()(tokens[None], torch.arange(len(tokens))[None], DenseCausalContext(), taps).taps[0]
    return rows, drafter.context_features(rows)


@torch.no_grad()
def run_rounds(
    drafter: Drafter, contexts: Sequence[Tensor], anchors: Sequence[int], taps: Sequence[int] | None = None
) -> tuple[Tensor, DraftSlots, Chain]:
    """One round of several sequences at once; contexts of unequal length are padded with noise.

    Returns hidden [B, W, d], the draft slots and the greedy chain.
    """
    longest = max(len(tokens) for tokens in contexts)
    d = drafter.config.layers.hidden_size
    features = torch.randn(len(contexts), longest + 2, d, generator=torch.Generator().manual_seed(9))
    for i, tokens in enumerate(contexts):
        features[i, : len(tokens)] = features_of(drafter, tokens, taps or drafter.config.tap_layer_ids)[1]
    k, v = drafter.context_kv(features, torch.arange(longest + 2).expand(len(contexts), -1))
    starts = torch.tensor([[len(tokens)] for tokens in contexts])
    hidden = drafter(torch.tensor(anchors)[:, None], starts, DenseDraftContext(k, v, starts))[:, 0]
    slots = drafter.slots(hidden)
    return hidden, slots, drafter.chain(slots, torch.tensor(anchors))


def assert_round(
    found: GoldenSet, drafter: Drafter, round_name: str, taps: Sequence[int] | None = None
) -> None:
    """Hidden states, logits, drafts, runners-up, confidences of every detailed case, batched."""
    cases = detailed(found)
    contexts = [context_tokens(found, case, round_name) for case in cases]
    anchors = [case[round_name]["anchor"] for case in cases]
    assert [len(tokens) for tokens in contexts] == [case[round_name]["start"] for case in cases]
    hidden, slots, chain = run_rounds(drafter, contexts, anchors, taps)
    for i, case in enumerate(cases):
        key = f"{case['name']}.{round_name}"
        close(hidden[i], found[f"{key}.block_hidden"])
        close(drafter.head(hidden[i]), found[f"{key}.base_logits"])
        assert chain.tokens[i].tolist() == found[f"{key}.draft_ids"].tolist()
        best_two = torch.stack((chain.tokens[i], chain.runner_up[i]), dim=-1)
        wide = case[round_name]["min_top2_top3_gap"] > 1e-3
        if wide:  # else the runner-up is a near tie
            assert best_two.tolist() == found[f"{key}.top2_ids"].tolist()
        close(chain.logits[i].topk(3).values, found[f"{key}.top3_values"])
        if drafter.config.method == "dspark":
            assert chain.confidence is not None
            close(chain.logits[i], found[f"{key}.corrected_logits"])
            close(chain.confidence[i], found[f"{key}.conf_logits"])
            close(torch.sigmoid(chain.confidence[i]), found[f"{key}.conf_probs"])
            close(drafter.survival(chain.confidence[i]), found[f"{key}.conf_survival"])
        else:
            assert chain.confidence is None
            assert torch.equal(chain.logits[i], slots.logits[i])


@pytest.mark.parametrize("name", DRAFTERS)
def test_config_agrees_with_the_meta_data(name: str) -> None:
    found, drafter = golden(name)
    config = drafter.config
    assert config.anchor_first == (found.meta["anchor_layout"] == "anchor-first")
    assert (config.block_size, config.max_drafts) == (
        found.meta["block_size"],
        found.meta["drafts_per_round"],
    )
    assert list(config.tap_layer_ids) == found.meta["tap_layer_ids"]
    assert (config.mask_token_id, config.markov) == (found.meta["mask_token_id"], found.meta["markov"])
    assert config.markov_rank == found.meta["markov_rank"]
    assert config.confidence == config.confidence_with_markov == (config.method == "dspark")
    assert config.method == name.split("_")[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_context_features_and_kv(name: str) -> None:
    found, drafter = golden(name)
    kv_cases = 0
    for case in detailed(found):
        key = f"{case['name']}.r1"
        tokens = context_tokens(found, case, "r1")
        rows, features = features_of(drafter, tokens, drafter.config.tap_layer_ids)
        if f"{key}.tap_rows" in found.tensors:
            close(rows, found[f"{key}.tap_rows"])
            close(features, found[f"{key}.context_features"])
        if f"{key}.ctx_k" in found.tensors:
            k, v = drafter.context_kv(features, torch.arange(len(tokens)))
            close(k, found[f"{key}.ctx_k"])
            close(v, found[f"{key}.ctx_v"])
            kv_cases += 1
        longer = context_tokens(found, case, "r2")
        rows, features = features_of(drafter, longer, drafter.config.tap_layer_ids)
        close(rows[len(tokens) :], found[f"{case['name']}.r2.new_tap_rows"])
        close(features[len(tokens) :], found[f"{case['name']}.r2.new_context_features"])
    assert kv_cases


@pytest.mark.parametrize("round_name", ["r1", "r2"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds(name: str, round_name: str) -> None:
    found, drafter = golden(name)
    assert_round(found, drafter, round_name)


@pytest.mark.parametrize("round_name", ["r1", "r2"])
@pytest.mark.parametrize("name", DSPARK)
def test_hedge_chains(name: str, round_name: str) -> None:
    """The chain that takes the runner-up at p, for every p at once: p is a row of the batch."""
    found, drafter = golden(name)
    for case in detailed(found):
        key = f"{case['name']}.{round_name}"
        branches = [p for p in range(3) if f"{key}.hedge{p}_ids" in found.tensors]
        assert branches
        context, anchor = context_tokens(found, case, round_name), case[round_name]["anchor"]
        _, slots, chain = run_rounds(drafter, [context], [anchor])
        given = torch.full((len(branches), chain.tokens.shape[-1]), -1)
        for row, p in enumerate(branches):
            given[row, :p] = chain.tokens[0, :p]
            given[row, p] = chain.runner_up[0, p]
        many = DraftSlots(*(x.expand(len(branches), -1, -1) for x in slots))
        hedges = drafter.chain(many, torch.full((len(branches),), anchor), given)
        for row, p in enumerate(branches):
            assert hedges.tokens[row].tolist() == found[f"{key}.hedge{p}_ids"].tolist()
            close(hedges.logits[row], found[f"{key}.hedge{p}_corrected_logits"])


def block_noise(keys: Tensor, starts: Tensor, inv_temperature: Tensor, ids: Tensor) -> BlockNoise:
    """Noise of as many blocks as there are keys."""
    floats = torch.zeros(len(keys), NUM_FLOATS, dtype=torch.float64)
    ints = torch.zeros(len(keys), NUM_INTS, dtype=torch.int64)
    floats[:, INV_TEMPERATURE], ints[:, SEED_KEY] = inv_temperature.double(), keys
    return BlockNoise(torch.arange(len(keys), dtype=torch.int32), starts.int(), floats, ints, ids)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
def test_chains_that_branch_off_are_those_drafted_with_the_runner_up_given(name: str, noisy: bool) -> None:
    found, drafter = golden(name)
    cases = [case for case in detailed(found) if "r2" in case][:3]
    contexts = [context_tokens(found, case, "r1") for case in cases]
    anchors = torch.tensor([case["r1"]["anchor"] for case in cases])
    _, slots, _ = run_rounds(drafter, contexts, anchors.tolist())
    ids = torch.arange(slots.logits.shape[-1], dtype=torch.int32)
    ids = ids if drafter.target_ids is None else drafter.target_ids.int()
    keys = 77 * torch.arange(len(cases)) + 5
    temperature = torch.ones(len(cases))
    temperature[-1] = 0.0
    noise = block_noise(keys, 9 * torch.arange(len(cases)), temperature, ids) if noisy else None

    def scored(slot: int, logits: Tensor) -> Tensor:
        added = gumbel(row_keys(keys, 9 * torch.arange(len(cases)) + 1 + slot), ids)
        return torch.where(temperature[:, None] > 0, logits + added, logits) if noisy else logits

    positions = (0, 2, 3)
    chain = drafter.chain(slots, anchors, noise=scored)
    best = drafter.draft(slots, anchors, noise, count=2)
    assert best[..., 0].tolist() == chain.tokens.tolist()
    assert best[..., 1].tolist() == chain.runner_up.tolist()
    owners = torch.tensor([len(cases) - 1, 0])
    found_chains = drafter.branch_off(slots, anchors, best, positions, owners, noise)
    for i, p in enumerate(positions):
        given = torch.full_like(chain.tokens, -1)
        given[:, :p], given[:, p] = chain.tokens[:, :p], chain.runner_up[:, p]
        expected = drafter.chain(slots, anchors, given, noise=scored).tokens
        assert found_chains[:, i].tolist() == expected[owners].tolist()


@pytest.mark.parametrize("noisy", [False, True])
def test_chains_among_candidates(monkeypatch: pytest.MonkeyPatch, noisy: bool) -> None:
    """Serving drafts, hedges and what tests and training compute are chosen among the same tokens."""
    found, shared = golden("dspark_tiny_b7")
    drafter = load_drafter(found.folder, shared.target)  # not the one other tests use
    assert not drafter.restrict(16), "a vocabulary as small as this one is scored whole"
    monkeypatch.setattr(drafters, "WHOLE_VOCABULARY", 1)
    cases = detailed(found)[:3]
    anchors = torch.tensor([case["r1"]["anchor"] for case in cases])
    contexts = [context_tokens(found, case, "r1") for case in cases]
    _, slots, _ = run_rounds(drafter, contexts, anchors.tolist())
    head = drafter.markov_head
    assert head is not None
    vocab = slots.logits.shape[-1]
    with torch.no_grad():  # a head that matters more than the logits, so that few candidates miss the best
        head.markov_w2.weight.mul_(30.0)
        head.markov_w2.packed = None
    ids, starts = torch.arange(vocab, dtype=torch.int32), torch.arange(3)
    keys, temperature = 77 * torch.arange(3) + 5, torch.tensor([1.0, 1.0, 0.0])
    noise = block_noise(keys, starts, temperature, ids) if noisy else None

    def scored(slot: int, logits: Tensor) -> Tensor:
        added = gumbel(row_keys(keys, starts + 1 + slot), ids)
        return torch.where(temperature[:, None] > 0, logits + added, logits) if noisy else logits

    everything = drafter.draft(slots, anchors, noise, count=2)
    assert drafter.tokens_scored == vocab
    assert drafter.restrict(4) and drafter.tokens_scored == 6
    few = drafter.draft(slots, anchors, noise, count=2)
    chain = drafter.chain(slots, anchors, noise=scored)
    assert torch.equal(few, torch.stack((chain.tokens, chain.runner_up), dim=-1))
    assert not torch.equal(few, everything)
    assert torch.equal(drafter.draft(slots, anchors, noise), few[..., :1])
    owners = torch.tensor([2, 0])
    hedges = drafter.branch_off(slots, anchors, few, (0, 3), owners, noise)
    for i, p in enumerate((0, 3)):
        given = torch.full_like(chain.tokens, -1)
        given[:, :p], given[:, p] = chain.tokens[:, :p], chain.runner_up[:, p]
        expected = drafter.chain(slots, anchors, given, noise=scored).tokens
        assert torch.equal(hedges[:, i], expected[owners])

    half = vocab // 4 * 2  # candidates, and half as many successors: most of the vocabulary
    assert drafter.restrict(half)
    most = drafter.draft(slots, anchors, noise, count=2)
    assert (most == everything).double().mean() > (few == everything).double().mean()


@pytest.mark.parametrize("name", ["dspark_tiny_b7_gated", "dspark_tiny_b7_rnn", "dflash_tiny_b16"])
def test_only_the_vanilla_head_has_candidates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(drafters, "WHOLE_VOCABULARY", 1)
    assert not golden(name)[1].restrict(16)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_round_of_the_traces_as_blocks_of_one_pass(name: str) -> None:
    """All rounds of a generation over one context: blocks see their own past, nothing of each other."""
    found, drafter = golden(name)
    for case in found.meta["cases"]:
        prompt, output = found[f"{case['name']}.input_ids"], found[f"{case['name']}.trace_output_ids"]
        tokens = torch.cat((prompt, output))
        starts = torch.tensor([[entry["start"] for entry in case["trace"]]])
        anchors = tokens[starts[0]][None]
        assert anchors[0].tolist() == [entry["anchor"] for entry in case["trace"]]
        _, features = features_of(drafter, tokens, drafter.config.tap_layer_ids)
        k, v = drafter.context_kv(features[None], torch.arange(len(tokens))[None])
        with torch.no_grad():
            hidden = drafter(anchors, starts, DenseDraftContext(k, v, starts))  # [1, A, W, d]
            chain = drafter.chain(drafter.slots(hidden), anchors)
        for entry, drafts in zip(case["trace"], chain.tokens[0].tolist(), strict=True):
            if entry["min_draft_gap"] > 1e-3:
                assert drafts == entry["drafts"]
            accepted = [a == b for a, b in zip(drafts, entry["target_argmax"], strict=False)]
            if entry["min_verify_gap"] > 1e-3 and entry["min_draft_gap"] > 1e-3:
                assert [*accepted, False].index(False) == entry["accepted"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_fewer_drafts_are_the_first_ones(name: str) -> None:
    found, drafter = golden(name)
    case = detailed(found)[0]
    hidden, _, chain = run_rounds(drafter, [context_tokens(found, case, "r1")], [case["r1"]["anchor"]])
    short = drafter.chain(drafter.slots(hidden, 3), torch.tensor([case["r1"]["anchor"]]))
    assert short.tokens.tolist() == chain.tokens[:, :3].tolist()
    assert short.logits.shape[1] == 3


@pytest.mark.parametrize("name", DSPARK)
def test_teacher_forcing_is_the_chain_with_known_predecessors(name: str) -> None:
    """What training computes in one go equals what drafting computes slot by slot."""
    found, drafter = golden(name)
    case = detailed(found)[0]
    anchor = torch.tensor([case["r1"]["anchor"]])
    _, slots, chain = run_rounds(drafter, [context_tokens(found, case, "r1")], anchor.tolist())
    previous = torch.cat((anchor[:, None], chain.tokens[:, :-1]), dim=1)
    close(drafter.teacher_forced(slots, previous), chain.logits)


@pytest.mark.parametrize("name", ["dflash_tiny_b16", "dspark_tiny_b7"])
def test_noise_changes_the_choice_and_nothing_else(name: str) -> None:
    """Choice and runner-up follow the noisy scores of each slot; reported logits stay the drafter's own."""
    found, drafter = golden(name)
    case = detailed(found)[0]
    anchor = torch.tensor([case["r1"]["anchor"]])
    _, slots, plain = run_rounds(drafter, [context_tokens(found, case, "r1")], anchor.tolist())

    def noise(slot: int, logits: Tensor) -> Tensor:
        scores = logits.clone()
        scores[:, 10 + slot], scores[:, 50 + slot] = 1000.0, 999.0
        return scores

    chain = drafter.chain(slots, anchor, noise=noise)
    wanted = list(range(drafter.config.max_drafts))
    assert chain.tokens[0].tolist() == [10 + slot for slot in wanted]
    assert chain.runner_up[0].tolist() == [50 + slot for slot in wanted]
    assert torch.equal(chain.logits, drafter.chain(slots, anchor, given=chain.tokens).logits)
    assert torch.equal(chain.logits[:, 0], plain.logits[:, 0])


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafting_only_tokens_picks_what_the_chain_picks(name: str) -> None:
    """With and without the sampler's noise; a row without temperature is greedy."""
    found, drafter = golden(name)
    case = detailed(found)[0]
    anchor = case["r1"]["anchor"]
    contexts = [context_tokens(found, case, "r1")] * 2
    _, slots, greedy = run_rounds(drafter, contexts, [anchor, anchor])
    anchors = torch.tensor([anchor, anchor])
    assert torch.equal(drafter.draft(slots, anchors)[..., 0], greedy.tokens)

    ids = drafter.target_ids
    if ids is None:
        ids = torch.arange(drafter.config.draft_vocab_size)
    keys, starts, temperature = torch.tensor([5, -7]), torch.tensor([30, 40]), torch.tensor([0.0, 0.8])

    def noisy(slot: int, logits: Tensor) -> Tensor:
        noise = gumbel(row_keys(keys, starts + 1 + slot), ids.to(torch.int32))
        return torch.stack((logits[0], logits[1] * 0.8 + noise[1]))

    drafts = drafter.draft(slots, anchors, block_noise(keys, starts, temperature, ids.to(torch.int32)))[
        ..., 0
    ]
    assert torch.equal(drafts, drafter.chain(slots, anchors, noise=noisy).tokens)
    assert torch.equal(drafts[0], greedy.tokens[0]) and not torch.equal(drafts[1], greedy.tokens[1])


def mutant(drafter: Drafter, config: DrafterConfig) -> Drafter:
    """The same weights under another config."""
    changed = Drafter(config, target())
    changed.load_state_dict(drafter.state_dict())
    return changed


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_unchanged_mutant_passes(name: str) -> None:
    found, drafter = golden(name)
    assert_round(found, mutant(drafter, drafter.config), "r1")


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_wrong_layout_is_caught(name: str) -> None:
    found, drafter = golden(name)
    with pytest.raises(AssertionError):
        assert_round(
            found,
            mutant(drafter, replace(drafter.config, anchor_first=not drafter.config.anchor_first)),
            "r1",
        )


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", DRAFTERS)
def test_taps_off_by_one_are_caught(name: str, shift: int) -> None:
    found, drafter = golden(name)
    with pytest.raises(AssertionError):
        assert_round(found, drafter, "r1", [tap + shift for tap in drafter.config.tap_layer_ids])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_wrong_rope_base_is_caught(name: str) -> None:
    found, drafter = golden(name)
    layers = replace(drafter.config.layers, rope=RopeConfig(theta=1e4))
    with pytest.raises(AssertionError):
        assert_round(found, mutant(drafter, replace(drafter.config, layers=layers)), "r1")


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_targets_rope_scaling_does_not_leak_in(name: str) -> None:
    """Scaling comes from the drafter's own config; the target's would show as here."""
    found, drafter = golden(name)
    yarn = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=64)
    layers = replace(drafter.config.layers, rope=yarn)
    with pytest.raises(AssertionError):
        assert_round(found, mutant(drafter, replace(drafter.config, layers=layers)), "r1")


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_context_row_at_the_anchor_is_caught(name: str) -> None:
    """The anchor's own features are unknown when drafting: rows from ``start`` on must not be seen."""
    found, drafter = golden(name)
    case = detailed(found)[0]
    tokens = torch.cat((context_tokens(found, case, "r1"), torch.tensor([case["r1"]["anchor"]])))
    _, features = features_of(drafter, tokens, drafter.config.tap_layer_ids)
    k, v = drafter.context_kv(features[None], torch.arange(len(tokens))[None])
    start, anchor = torch.tensor([[len(tokens) - 1]]), tokens[-1:][None]
    with torch.no_grad():
        right = drafter(anchor, start, DenseDraftContext(k, v, start))[0, 0]
        wrong = drafter(anchor, start, DenseDraftContext(k, v, start + 1))[0, 0]
    close(right, found[f"{case['name']}.r1.block_hidden"])
    with pytest.raises(AssertionError):
        close(wrong, found[f"{case['name']}.r1.block_hidden"])
