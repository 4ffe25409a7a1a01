"""``paceline train-drafter`` from end to end: answers, training, report, checkpoint."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from paceline.errors import CheckpointError, ConfigError
from paceline.models.checkpoint import resolve_folder
from paceline.models.config import Qwen3Config
from paceline.models.drafter import Drafter
from paceline.models.drafter_loader import load_drafter, save_drafter
from paceline.models.loader import load_model
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.runtime.build import pick_device
from paceline.text.tokenizer import Tokenizer
from paceline.training.batches import BatchPlan
from paceline.training.calibration import calibrate
from paceline.training.distributed import World, joined
from paceline.training.documents import Documents
from paceline.training.evaluate import evaluate
from paceline.training.options import TrainOptions
from paceline.training.prompts import PromptReader, split
from paceline.training.regenerate import regenerate
from paceline.training.trainer import Trainer

REPORT_FILE: Final = "report.json"
STS_FILE: Final = "sts.json"
_ANSWERS: Final = "answers"


def train_drafter(options: TrainOptions) -> dict[str, Any]:
    """Train a drafter into ``options.out``; returns the report.

    The folder then holds the checkpoint (``config.json``, ``model.safetensors``), ``sts.json`` when there is
    a confidence head, ``report.json``, the answers, and the state a run that is started again goes on from.

    Raises:
        ConfigError, CheckpointError: before anything expensive, with what would work.
    """
    device = pick_device(options.device)
    folder = resolve_folder(options.target)
    config = Qwen3Config.from_pretrained(folder)
    max_len = min(options.max_len, config.max_context_len)
    options = replace(options, max_len=max_len)
    drafter_config = options.drafter_config(config, mask_token(folder, config, options.mask_token_id))
    reader = PromptReader(folder, config.vocab_size, max_len - 2, options.seed)
    data = reader.read(options.data)
    data.check(config.vocab_size, max_len, "the data")
    held = reader.read(options.eval_data) if options.eval_data else None
    if held is None:
        data, held = split(data, options.eval_share, options.seed)
    held.check(config.vocab_size, max_len, "the held-out data")
    held = _first_prompts(held, options.max_eval_prompts)
    with joined(device) as world:
        _claim(options, data, world)
        started = time.monotonic()
        answers, held = _answers(folder, data, held, options, world, device)
        regenerated_s = time.monotonic() - started
        target = load_model(folder, device=device, dtype="auto" if device.type == "cuda" else "float32")
        drafter = Drafter(drafter_config, target, device=device, dtype=torch.float32)
        drafter.init_weights(torch.Generator(device).manual_seed(options.seed))
        plan = BatchPlan(
            answers,
            tokens_per_step=options.tokens_per_step,
            anchor_every=options.anchor_every,
            world_size=world.size,
            seed=options.seed,
        )
        if plan.num_usable == 0:
            raise ConfigError("no answer has two tokens or more; give other prompts or a longer answer_len")
        trainer = Trainer(drafter, plan, options, world)
        trainer.resume(options.out)
        trainer.run(options.out)
        if not world.leads:
            return {}
        return _finish(trainer, target, answers, held, regenerated_s)


def mask_token(folder: Path, config: Qwen3Config, given: int | None) -> int:
    """The id fed to draft slots: as given, the tokenizer's mask token, or an embedding row no token uses.

    Raises:
        ConfigError: there is none.
    """
    if given is not None:
        if not 0 <= given < config.vocab_size:
            raise ConfigError(f"mask_token_id is {given}; it must lie in 0..{config.vocab_size - 1}")
        return given
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except CheckpointError as error:
        raise ConfigError(f"mask_token_id is needed: {error}") from error
    named = tokenizer.special_tokens.get("mask_token")
    found = None if named is None else tokenizer.token_to_id(named)
    if found is None and tokenizer.vocab_size < config.vocab_size:
        found = tokenizer.vocab_size
    if found is None:
        raise ConfigError(
            "the target's tokenizer has no mask token and uses every row of the embedding; give "
            "mask_token_id, the id of a token that never occurs in text"
        )
    return found


def _first_prompts(documents: Documents, count: int) -> Documents:
    """The documents of the first ``count`` prompts."""
    kept = sorted(set(documents.source.tolist()))[:count]
    return documents.subset(np.flatnonzero(np.isin(documents.source, kept)))


def _claim(options: TrainOptions, data: Documents, world: World) -> None:
    """Tie the output folder to these options and data, so that a later start cannot mix two runs.

    Raises:
        ConfigError: the folder belongs to another run, or cannot be made.
    """
    lead = {"steps", "minutes"}  # the trainer's own state checks them
    values = {k: v for k, v in options.fingerprint().items() if k not in lead}
    values["data"] = hashlib.sha256(data.tokens.tobytes()).hexdigest()[:16]
    path = options.out / "run.json"
    if world.leads and not path.is_file():
        begun = path.with_suffix(".part")  # who reads the file finds all of it, or none
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            begun.write_text(json.dumps(values, indent=1) + "\n")
            begun.replace(path)
        except OSError as error:
            raise ConfigError(
                f"out is {options.out}, which cannot be written: {error.strerror}. Name another folder"
            ) from error
    world.barrier()
    known = json.loads(path.read_text())
    changed = sorted(name for name in values if known.get(name) != values[name])
    if changed:
        raise ConfigError(
            f"{options.out} holds a run with other options or data ({', '.join(changed)}). Give the "
            "same ones to resume it, or another folder"
        )


def _answers(
    folder: Path,
    data: Documents,
    held: Documents,
    options: TrainOptions,
    world: World,
    device: torch.device,
) -> tuple[Documents, Documents]:
    """(training, held-out) answers: as given, or made by the target."""
    if not held.answered:
        # Two answers to each: greedy and at temperature 1, the two ways acceptance is reported.
        out = options.out / _ANSWERS / "heldout"
        held = regenerate(folder, held, out, options, world, device, every_temperature=(0.0, 1.0))
    if not data.answered:
        out = options.out / _ANSWERS / "train"
        data = regenerate(folder, data, out, options, world, device, minutes=options.regenerate_minutes)
    return data, held


def _finish(
    trainer: Trainer, target: Qwen3ForCausalLM, answers: Documents, held: Documents, regenerated_s: float
) -> dict[str, Any]:
    """Write the checkpoint, load it as serving does, and report on that."""
    options = trainer.options
    save_drafter(trainer.drafter, options.out, dtype=torch.bfloat16, with_tables=options.with_tables)
    drafter = load_drafter(options.out, target)
    started = time.monotonic()
    evaluation = evaluate(drafter, held, seed=options.seed)
    report: dict[str, Any] = {
        "method": options.method,
        "drafter": cost(drafter),
        "heldout": evaluation.report(),
        "data": {
            "answers": len(answers),
            "answer_tokens": int((answers.lengths - answers.num_context).sum()),
            "seconds": round(regenerated_s, 1),
        },
        "training": {
            "steps": trainer.step,
            "seconds": round(trainer.elapsed_s, 1),
            "processes": trainer.world.size,
            "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "options": options.fingerprint(),
            "log": trainer.log,
        },
    }
    if len({int(g[0]) % 2 for g in evaluation.group}) == 2:
        calibration = calibrate(
            np.concatenate(evaluation.confidence),
            np.concatenate(evaluation.stands),
            np.concatenate(evaluation.group),
            "held-out answers at temperature 1",
        )
        calibration.save(options.out / STS_FILE)
        report["calibration"] = {"ece_before": calibration.ece_before, "ece_after": calibration.ece_after}
    report["evaluation_s"] = round(time.monotonic() - started, 1)
    (options.out / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n")
    return report


def cost(drafter: Drafter) -> dict[str, int]:
    """Size and multiply-adds of a drafter beside its target's, attention over the context left out."""
    config, target = drafter.config, drafter.target.config
    shape = config.layers
    layers = sum(p.numel() for layer in drafter.draft_layers() for p in layer.parameters() if p.dim() == 2)
    layers += drafter.qkv_proj.numel()
    kv = shape.num_hidden_layers * 2 * shape.kv_size * shape.hidden_size
    head = shape.hidden_size * config.draft_vocab_size
    sequential = config.markov_rank * config.draft_vocab_size
    d, inner = target.hidden_size, target.intermediate_size
    per_layer = (target.q_size + 2 * target.kv_size) * d + target.q_size * d + 3 * d * inner
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "macs_per_block": config.block_size * layers + config.max_drafts * (head + sequential),
        "macs_per_context_token": drafter.fc.weight.numel() + kv,
        "target_macs_per_token": target.num_hidden_layers * per_layer + d * target.vocab_size,
    }
