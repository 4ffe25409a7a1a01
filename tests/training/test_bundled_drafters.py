"""The drafters that ship with the package: they load, draft well, and say so themselves."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.config import BUNDLED_DRAFTERS, BUNDLED_MODEL, EngineConfig
from paceline.engine.factory import make_core
from paceline.engine.messages import EngineRequest, EngineStats
from paceline.models.drafter_loader import load_drafter, read_sts
from paceline.models.loader import load_model
from paceline.models.markov_head import MarkovHead
from paceline.ops import ChainHead
from paceline.proving.drive import runner_of
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer

PROMPTS = (
    'def count_words(text):\n    """Return a dict that maps each word of the text to its count."""\n',
    'class Queue:\n    """A first-in, first-out collection."""\n\n    def __init__(self):\n',
    'def is_prime(n):\n    """Return True if n is a prime number."""\n',
    "import json\n\n\ndef load_config(path):\n",
    "<|im_start|>user\nWrite a Python function that joins two lists.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is a generator?<|im_end|>\n<|im_start|>assistant\n",
)


def serve(method: str, candidates: int | None = None) -> tuple[list[list[int]], EngineStats]:
    """Greedy answers with a bundled drafter; candidates of its Markov head, None for the whole vocabulary."""
    every = {"method": method, "verify_planner": "off"}
    core = make_core(
        EngineConfig.of(device="cpu", max_model_len=512, max_num_seqs=8, speculative_config=every)
    )
    stage = runner_of(core).drafting
    assert stage is not None and (candidates is None or stage.drafter.restrict(candidates))
    tokenizer = Tokenizer.from_folder(BUNDLED_MODEL)
    answers: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=64)
        ids = tokenizer.encode(prompt)
        core.add(EngineRequest(request_id=str(number), prompt_token_ids=ids, params=params))
    while core.has_work:
        for output in core.step():
            answers[int(output.request_id)] += output.token_ids
    return answers, core.stats()


def test_they_draft_well_and_alike() -> None:
    """Seven drafts each: DSpark's accept length is at least 3 and above DFlash's; the text is the same."""
    lengths, answers = {}, {}
    for method in ("dspark", "dflash"):
        answers[method], stats = serve(method)
        assert (
            stats.num_draft_tokens > 5 * stats.num_drafts
        )  # blocks of seven, shorter at the end of an answer
        lengths[method] = 1 + stats.num_accepted_tokens / stats.num_drafts
    assert answers["dspark"] == answers["dflash"]
    assert lengths["dspark"] > 3.0 and lengths["dspark"] > lengths["dflash"] > 1.5, lengths


def test_candidates_of_the_markov_head_cost_nothing_and_successors_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 7,680 tokens; the same text, whatever is drafted."""
    (answers, whole), (same, few) = serve("dspark"), serve("dspark", 64)
    monkeypatch.setattr(MarkovHead, "chain_head", without_successors(MarkovHead.chain_head))
    also, alone = serve("dspark", 64)
    assert answers == same == also
    lengths = [1 + stats.num_accepted_tokens / stats.num_drafts for stats in (whole, few, alone)]
    assert lengths[1] > 0.98 * lengths[0] and lengths[2] < 0.95 * lengths[0], lengths


def without_successors(chain_head: Callable[..., ChainHead]) -> Callable[..., ChainHead]:
    """Heads whose successors are the vocabulary's first tokens."""

    def made(self: MarkovHead, num_successors: int, target_ids: Tensor | None) -> ChainHead:
        head = chain_head(self, num_successors, target_ids)
        return head._replace(successors=torch.arange(num_successors).int().expand_as(head.successors))

    return made


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_what_they_are(method: str) -> None:
    folder = BUNDLED_DRAFTERS[method]
    drafter = load_drafter(folder, load_model(BUNDLED_MODEL, dtype="float32"))
    config = drafter.config
    assert (config.method, config.max_drafts, config.anchor_first) == (method, 7, method == "dspark")
    assert config.confidence == config.confidence_with_markov == (method == "dspark")
    if method == "dspark":
        assert torch.equal(drafter.sts_temperatures, read_sts(folder / "sts.json", 7))
        fit = json.loads((folder / "sts.json").read_text())
        assert sum(fit["ece_after"]) < sum(fit["ece_before"])


def test_they_fit_the_package() -> None:
    sizes = [f.stat().st_size for folder in BUNDLED_DRAFTERS.values() for f in folder.iterdir()]
    assert sum(sizes) <= 12e6
