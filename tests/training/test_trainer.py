"""Training end to end on a CPU: it learns, resumes exactly, and is the same on two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import MASK, VOCAB, save_target, tiny_drafter, tiny_options, tiny_target

from paceline.errors import CheckpointError, ConfigError, PacelineError
from paceline.models.attention import DenseCausalContext
from paceline.models.drafter import Drafter
from paceline.models.drafter_loader import load_drafter, read_sts
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.training.batches import BatchPlan
from paceline.training.distributed import World
from paceline.training.documents import Documents
from paceline.training.evaluate import evaluate
from paceline.training.regenerate import load_answers, regenerate
from paceline.training.run import _claim, mask_token, train_drafter
from paceline.training.trainer import Trainer


@torch.no_grad()
def target_texts(
    target: Qwen3ForCausalLM, count: int, length: int, temperature: float, seed: int
) -> list[list[int]]:
    """Texts of the target by full recomputation: no engine in the way."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, MASK, (count, 4), generator=generator)
    while tokens.shape[1] < length:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = target.logits(target(tokens, positions, DenseCausalContext()).hidden[:, -1]).float()
        if temperature > 0:
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, chosen), dim=1)
    return [list(map(int, row)) for row in tokens]


def answers(
    target: Qwen3ForCausalLM, count: int, length: int, temperature: float, seed: int = 0
) -> Documents:
    texts = target_texts(target, count, length, temperature, seed)
    return Documents.of(texts, VOCAB, [4] * count, [temperature] * count)


def new_trainer(method: str, documents: Documents, target: Qwen3ForCausalLM, **changes: Any) -> Trainer:
    options = tiny_options(method, **changes)
    drafter = Drafter(options.drafter_config(target.config, MASK), target, dtype=torch.float32)
    drafter.init_weights(torch.Generator().manual_seed(0))
    plan = BatchPlan(documents, tokens_per_step=options.tokens_per_step, anchor_every=4, world_size=1, seed=0)
    return Trainer(drafter, plan, options, World())


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_learns_by_heart(method: str) -> None:
    """A small set of greedy texts is learnt until whole blocks stand: signal, layout, taps and positions
    from training to :meth:`Drafter.chain`. With the context shuffled, nothing of it is left."""
    target = tiny_target()
    documents = answers(target, 8, 40, 0.0)
    trainer = new_trainer(method, documents, target, steps=170, learning_rate=1e-2)
    for _ in range(170):
        trainer.train_step()
    drafter = trainer.drafter.eval()
    learnt = evaluate(drafter, documents).greedy
    assert learnt.accept_length > 4.5, learnt.conditional
    with torch.no_grad():
        drafter.fc.weight.copy_(drafter.fc.weight[:, torch.randperm(drafter.fc.weight.shape[1])])
    assert evaluate(drafter, documents).greedy.accept_length < 0.6 * learnt.accept_length


def test_parts_of_the_loss_add_up() -> None:
    """Gradients do not depend on how many blocks are taken at once."""
    target = tiny_target()
    documents = answers(target, 6, 60, 1.0)
    found = []
    for part in (10**6, 5):
        trainer = new_trainer("dspark", documents, target)
        trainer._part = part
        sums = trainer.gradients(trainer.plan.batch(0))
        found.append((sums, [p.grad for p in trainer.drafter.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    for whole, parts in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-3, atol=1e-6)


def test_resume_is_exact(tmp_path: Path) -> None:
    target = tiny_target()
    documents = answers(target, 12, 60, 1.0)
    straight = new_trainer("dspark", documents, target, steps=8)
    straight.run(tmp_path / "straight")
    first = new_trainer("dspark", documents, target, steps=8)
    for _ in range(3):
        first.train_step()
    first.save(tmp_path / "halves")
    second = new_trainer("dspark", documents, target, steps=8)
    assert second.resume(tmp_path / "halves") and second.step == 3
    second.run(tmp_path / "halves")
    for name, value in straight.drafter.state_dict().items():
        assert torch.equal(value, second.drafter.state_dict()[name]), name
    other = new_trainer("dspark", documents, target, steps=8, learning_rate=1e-4)
    with pytest.raises(ConfigError, match="learning_rate"):
        other.resume(tmp_path / "halves")


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    target = tiny_target()
    trainer = new_trainer("dspark", answers(target, 4, 30, 1.0), target, warmup=0.1)
    scales = [trainer.scale(i / 100) for i in range(101)]
    assert scales[10] == pytest.approx(1.0) and scales[100] == pytest.approx(0.0, abs=1e-12)
    assert 0 < scales[0] < scales[5] < scales[10] > scales[50] > scales[90]


@torch.no_grad()
def test_offline_accept_length_is_that_of_simulated_rounds() -> None:
    """Closed form against drafts sampled with the noise the target must have had: the chain, the Markov head
    and teacher forcing agree."""
    target = tiny_target()
    drafter = tiny_drafter("dspark", target, scale=2.0)
    drafter.confidence_head = None
    documents = answers(target, 40, 100, 1.0)
    result = evaluate(drafter, documents)
    assert result.shared_noise.num_anchors == 40 * (100 - 4 - 7)
    assert result.simulated.accept_length == pytest.approx(result.shared_noise.accept_length, rel=0.03)
    assert result.rejection.accept_length > result.shared_noise.accept_length > 1.1
    report = result.report()
    for rule in ("shared_noise", "rejection"):
        # the mean over texts of the chance given the token is the unconditional chance
        first = report["sampled"][rule]["conditional_acceptance"][0]
        assert first == pytest.approx(report["sampled"][rule]["acceptance"][0], abs=0.02)


def write_prompts(path: Path, count: int) -> Path:
    draw = np.random.default_rng(0)
    rows = [{"prompt_token_ids": draw.integers(0, MASK - 1, 5).tolist()} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_command_end_to_end(method: str, tmp_path: Path) -> None:
    """Answers by the engine, training, a checkpoint that serving loads, STS, a report; a second start finds
    everything done."""
    target = tiny_target()
    folder = save_target(target, tmp_path / "target")
    data = write_prompts(tmp_path / "prompts.jsonl", 24)
    options = tiny_options(method, folder, data=(data,), out=tmp_path / "out", eval_share=0.25, steps=6)
    report = train_drafter(options)
    loaded = load_drafter(tmp_path / "out", target)
    assert loaded.config.method == method and loaded.config.max_drafts == 7
    assert loaded.config.anchor_first == (method == "dspark")
    state = torch.load(tmp_path / "out" / "state.pt", weights_only=True)["drafter"]
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, state[name].bfloat16().float(), rtol=0, atol=0)
    assert report["heldout"]["greedy"]["num_answers"] > 0
    assert report["data"]["answers"] == 18
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    if method == "dspark":
        assert read_sts(tmp_path / "out" / "sts.json", 7).shape == (7,)
        made = Documents.load(next((tmp_path / "out" / "answers" / "train").glob("*.safetensors")))
        assert set(made.temperature.tolist()) == {0.0, float(np.float32(0.7)), 1.0}
    again = train_drafter(options)
    assert again["heldout"] == report["heldout"] and again["training"]["steps"] == 6
    with pytest.raises(ConfigError, match="other options or data"):
        train_drafter(replace(options, seed=1))


def test_answers_are_the_targets_own_and_resume(tmp_path: Path) -> None:
    """Greedy answers equal recomputation, whatever the batch; a missing file is made again."""
    target = tiny_target()
    folder = save_target(target, tmp_path / "target")
    data = write_prompts(tmp_path / "prompts.jsonl", 10)
    options = tiny_options(
        "dflash", folder, data=(data,), out=tmp_path / "out", eval_share=0.2, steps=1, temperatures=(0.0,)
    )
    train_drafter(options)
    files = sorted((tmp_path / "out" / "answers" / "train").glob("*.safetensors"))
    made = Documents.concatenate([Documents.load(file) for file in files])
    assert len(made) == 8
    for i in range(len(made)):
        ids = made[i].astype(int).tolist()
        tokens = torch.tensor(ids)[None]
        hidden = target(tokens, torch.arange(len(ids))[None], DenseCausalContext()).hidden
        best = target.logits(hidden)[0].argmax(-1).tolist()
        context = int(made.num_context[i])
        assert context == 5 and best[context - 1 : -1] == ids[context:]
    files[0].unlink()
    train_drafter(options)
    remade = Documents.concatenate([Documents.load(f) for f in (tmp_path / "out/answers/train").glob("*")])
    order, before = np.argsort(remade.source), np.argsort(made.source)
    assert all((remade[int(a)] == made[int(b)]).all() for a, b in zip(order, before, strict=True))


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """torchrun's environment, gloo, two processes: the answers and weights of one process."""
    save_target(tiny_target(), tmp_path / "target")
    write_prompts(tmp_path / "prompts.jsonl", 16)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import torch\n"
        "from drafter_cases import tiny_options; from paceline.training.run import train_drafter\n"
        "torch.set_num_threads(1); t = Path(sys.argv[2])\n"
        "train_drafter(tiny_options('dspark', t / 'target', data=(t / 'prompts.jsonl',), steps=5,\n"
        "    eval_share=0.2, out=t / sys.argv[3], learning_rate=1e-3))\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    base = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2"} for r in range(2)]
    processes = [subprocess.Popen([*command, "two"], env=base | rank) for rank in ranks]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    subprocess.run([*command, "one"], env=base, check=True, timeout=120)
    made = [load_answers(tmp_path / name / "answers" / "train") for name in ("one", "two")]
    assert made[0] is not None and made[1] is not None
    assert np.array_equal(made[0].tokens, made[1].tokens)
    assert len(list((tmp_path / "two" / "answers" / "train").glob("*"))) == 2
    states = [torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("one", "two")]
    for name, value in states[0]["drafter"].items():
        torch.testing.assert_close(value, states[1]["drafter"][name], rtol=2e-3, atol=2e-5)
    one, two = (state["log"][-1] for state in states)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)


def test_engines_side_by_side(tmp_path: Path) -> None:
    """Two engine processes share the prompts; what fails in one of them is raised here."""
    target = tiny_target()
    folder = save_target(target, tmp_path / "target")
    prompts = Documents.of([[i, i + 1] for i in range(8)], VOCAB)
    options = tiny_options("dspark", folder, num_engines=2, num_seqs=2, answer_len=4, temperatures=(0.0,))
    device = torch.device("cpu")
    made = regenerate(folder, prompts, tmp_path / "made", options, World(), device)
    assert made.source.tolist() == list(range(8))
    assert {file.name[:3] for file in (tmp_path / "made").iterdir()} == {"000", "001"}
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(PacelineError, match="cannot be read as safetensors"):
        regenerate(folder, prompts, tmp_path / "fails", options, World(), device)


def test_mask_token_is_found_or_asked_for(tmp_path: Path) -> None:
    config = tiny_target().config
    assert mask_token(tmp_path, config, 5) == 5
    with pytest.raises(ConfigError, match=r"0\.\.63"):
        mask_token(tmp_path, config, 64)
    with pytest.raises(ConfigError, match="mask_token_id is needed"):
        mask_token(tmp_path, config, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 5, "minutes": 1.0}, "steps and minutes"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"block_size": 1}, "block_size is 1; it must be from 2 to 64"),
        ({"temperatures": ()}, "temperatures"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"method": "eagle"}, "dspark or dflash"),
    ],
)
def test_options_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_options(**({"method": "dspark", "steps": None} | changes))  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = replace(tiny_options("dspark"), out=tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        _claim(options, Documents.of([[1, 2]], VOCAB), World())


@pytest.mark.parametrize("same", [True, False])
def test_who_follows_reads_what_who_leads_has_written(tmp_path: Path, same: bool) -> None:
    """Not before the others have come as far: until then there is nothing, or half a file."""
    options, data = replace(tiny_options("dspark"), out=tmp_path), Documents.of([[1, 2]], VOCAB)
    theirs = options if same else replace(options, learning_rate=0.5)

    class Follower(World):
        def barrier(self) -> None:
            (tmp_path / "run.json").unlink()
            _claim(theirs, data, World())

    (tmp_path / "run.json").write_text("")
    with nullcontext() if same else pytest.raises(ConfigError, match="other options or data"):
        _claim(options, data, Follower(rank=1, size=2))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_taps_must_fit() -> None:
    with pytest.raises(CheckpointError, match="last layer"):
        tiny_options("dspark", taps=(0, 3)).drafter_config(tiny_target().config, MASK)
    assert tiny_options("dspark", taps=None).drafter_config(tiny_target().config, MASK).tap_layer_ids == (2,)
