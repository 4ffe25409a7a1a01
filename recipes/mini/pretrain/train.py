"""Stage 6: train the model from scratch for a fixed wall-clock time.

Weights and activations in bf16 over fp32 master weights, Muon and AdamW (``optimizer.py``). The step
size is a function of elapsed training time (warm-up, plateau, linear to zero), so a run always anneals
fully, whatever the machine's speed. The last part of the run uses sequences of the full context length.
Compilation happens before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.attention import DenseCausalContext
from paceline.models.config import Qwen3Config
from paceline.models.loader import save_checkpoint
from paceline.models.qwen3 import Qwen3ForCausalLM
from pretrain.batches import Sampler, load_streams
from pretrain.common import CONTEXT_LEN, MODEL
from pretrain.optimizer import Optimizer


@dataclass(frozen=True)
class Phase:
    """One sequence length and its mix: rows of each stream in a batch."""

    length: int
    code: int
    prose: int
    instruct: int

    @property
    def rows(self) -> int:
        """Sequences per batch."""
        return self.code + self.prose + self.instruct


@dataclass(frozen=True)
class Schedule:
    """Shares of the training time, 0..1.

    Attributes:
        warmup: linear warm-up of the step size.
        plateau: where the decay to zero begins.
        long_from: where the long sequences begin.
    """

    warmup: float = 0.01
    plateau: float = 0.4
    long_from: float = 0.87

    def scale(self, progress: float) -> float:
        """Factor on the peak step size at ``progress`` 0..1."""
        if progress < self.warmup:
            return max(progress, 1e-4) / self.warmup
        return max(0.0, min(1.0, (1 - progress) / (1 - self.plateau)))


SHORT = Phase(length=1024, code=43, prose=15, instruct=6)
LONG = Phase(length=CONTEXT_LEN, code=11, prose=3, instruct=2)
# Fewer, shorter rows for a check on a CPU.
TINY = (Phase(64, 3, 2, 1), Phase(128, 1, 1, 1))
TINY_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "layer_types": ["full_attention"] * 2,
}

Z_LOSS = 1e-4  # on the squared log-partition, keeps bf16 logits small (PaLM, arXiv:2204.02311, section 5)
CLIP_NORM = 1.0
LOG_EVERY = 50


def loss_of(model: Qwen3ForCausalLM, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(training loss, mean cross entropy in nats); tokens [B, S + 1], positions [B, S]."""
    hidden = model(tokens[:, :-1], positions, DenseCausalContext()).hidden
    logits = model.logits(hidden).float().flatten(0, 1)  # [B * S, V]
    partition = torch.logsumexp(logits, dim=-1)
    target = logits.gather(1, tokens[:, 1:].reshape(-1, 1)).squeeze(1)
    entropy = (partition - target).mean()
    return entropy + Z_LOSS * partition.square().mean(), entropy.detach()


def start_values(config: Qwen3Config, device: torch.device, seed: int) -> dict[str, Tensor]:
    """fp32 master weights: N(0, 0.02); what writes into the residual stream divided by sqrt(2 layers)."""
    model = Qwen3ForCausalLM(config, device=device, dtype=torch.float32)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, value in values.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value /= (2 * config.num_hidden_layers) ** 0.5
    return values


@dataclass
class Progress:
    """Where a run stands; saved with its state."""

    step: int = 0
    elapsed_s: float = 0.0
    tokens: int = 0


class Run:
    """One training run.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        config = Qwen3Config.from_dict({**MODEL, **(TINY_MODEL if args.tiny else {})})
        self.phases = TINY if args.tiny else (SHORT, LONG)
        self.schedule = Schedule()
        masters = start_values(config, self.device, args.seed)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = Qwen3ForCausalLM(config, device=self.device, dtype=dtype)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(masters[name])
        self.optimizer = Optimizer(
            self.model,
            masters,
            use_muon=args.optimizer == "muon",
            matrix_lr=args.matrix_lr,
            adam_lr=args.adam_lr,
            weight_decay=0.1,
        )
        streams = load_streams(args.shards, self.device, args.workers)
        self.stream_tokens = {name: ids.numel() for name, ids in streams.items()}
        snap = {"code": 0.25, "prose": 0.25, "instruct": 1.0}
        self.samplers = {
            n: Sampler(ids, snap[n], args.seed + i) for i, (n, ids) in enumerate(streams.items())
        }
        self.progress = Progress()
        self.log: list[dict[str, float]] = []
        self.loss: Callable[..., tuple[Tensor, Tensor]] = loss_of
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            self.loss = torch.compile(loss_of, dynamic=False)

    def batch(self, phase: Phase) -> Tensor:
        """[rows, length + 1] tokens in the phase's mix."""
        counts = {"code": phase.code, "prose": phase.prose, "instruct": phase.instruct}
        return torch.cat([self.samplers[n].draw(rows, phase.length) for n, rows in counts.items()])

    def positions(self, phase: Phase) -> Tensor:
        """[rows, length]."""
        return torch.arange(phase.length, device=self.device).expand(phase.rows, -1).contiguous()

    def compile(self) -> float:
        """Compile both phases, without an update; returns seconds."""
        start = time.perf_counter()
        for phase in self.phases:
            tokens = torch.zeros(phase.rows, phase.length + 1, dtype=torch.int64, device=self.device)
            loss, _ = self.loss(self.model, tokens, self.positions(phase))
            loss.backward()
            self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def train(self) -> None:
        """Train until the time is up."""
        args, progress = self.args, self.progress
        positions = {phase: self.positions(phase) for phase in self.phases}
        checkpoints = [share for share in (0.45, 0.8) if progress.elapsed_s < share * args.seconds]
        start = time.perf_counter() - progress.elapsed_s
        logged_at, logged_tokens, entropies = progress.elapsed_s, progress.tokens, []
        while progress.elapsed_s < args.seconds:
            share = progress.elapsed_s / args.seconds
            phase = self.phases[share >= self.schedule.long_from]
            loss, entropy = self.loss(self.model, self.batch(phase), positions[phase])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
            self.optimizer.step(self.schedule.scale(share))
            self.model.zero_grad(set_to_none=True)
            entropies.append(entropy)
            progress.step += 1
            progress.tokens += phase.rows * phase.length
            if progress.step % 10 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()  # the host may not run ahead of the clock that sets the step size
            progress.elapsed_s = time.perf_counter() - start
            if progress.step % LOG_EVERY == 0:
                mean = float(torch.stack(entropies).mean())
                rate = (progress.tokens - logged_tokens) / (progress.elapsed_s - logged_at)
                self.log.append(
                    {
                        "step": progress.step,
                        "elapsed_s": round(progress.elapsed_s, 2),
                        "tokens": progress.tokens,
                        "nats": round(mean, 4),
                        "length": phase.length,
                        "tokens_per_s": round(rate),
                    }
                )
                if progress.step % (LOG_EVERY * 10) == 0:
                    print(json.dumps(self.log[-1]), flush=True)
                if not mean < 20:
                    raise RuntimeError(f"the loss is {mean}: diverged at step {progress.step}")
                logged_at, logged_tokens, entropies = progress.elapsed_s, progress.tokens, []
            if checkpoints and progress.elapsed_s >= checkpoints[0] * args.seconds:
                checkpoints.pop(0)
                self.save_state()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def save_state(self) -> None:
        """Full state for ``--resume`` in ``--state``; the weights of the moment in ``--out``."""
        state = {
            "progress": asdict(self.progress),
            "optimizer": self.optimizer.state(),
            "samplers": {name: sampler.state() for name, sampler in self.samplers.items()},
            "log": self.log,
        }
        self.args.state.mkdir(parents=True, exist_ok=True)
        temporary = self.args.state / "state.pt.tmp"
        torch.save(state, temporary)
        temporary.replace(self.args.state / "state.pt")
        self.export()

    def load_state(self) -> None:
        """Continue from the state that :meth:`save_state` wrote."""
        state: dict[str, Any] = torch.load(self.args.state / "state.pt", map_location=self.device)
        self.progress = Progress(**state["progress"])
        self.optimizer.load_state(state["optimizer"])
        for name, sampler in self.samplers.items():
            sampler.load_state(state["samplers"][name])
        self.log = state["log"]

    def export(self) -> None:
        """The checkpoint folder in Hugging Face's layout, bf16."""
        save_checkpoint(self.model, self.args.out / "model", dtype=torch.bfloat16)

    def report(self, compile_s: float) -> dict[str, Any]:
        """What ``train.json`` holds."""
        return {
            "optimizer": self.args.optimizer,
            "matrix_lr": self.args.matrix_lr,
            "adam_lr": self.args.adam_lr,
            "steps": self.progress.step,
            "tokens": self.progress.tokens,
            "train_s": round(self.progress.elapsed_s, 2),
            "compile_s": round(compile_s, 2),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "schedule": asdict(self.schedule),
            "phases": [asdict(phase) for phase in self.phases],
            "stream_tokens": self.stream_tokens,
            "tokens_drawn": {name: sampler.tokens_drawn for name, sampler in self.samplers.items()},
            "log": self.log,
        }


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="receives model/ and train.json")
    parser.add_argument("--state", type=Path, required=True, help="where the state for --resume goes")
    parser.add_argument("--seconds", type=float, default=450.0, help="training time, compilation not counted")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--matrix-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8, help="processes that unpack shards")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and batch, to try the recipe on a CPU"
    )
    parser.add_argument("--resume", action="store_true", help="continue from --state if it holds a run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    print(f"train: tokens per stream {run.stream_tokens}", flush=True)
    if args.resume and (args.state / "state.pt").exists():
        run.load_state()
        print(f"train: resumed at {run.progress}", flush=True)
    compile_s = run.compile()
    print(f"train: compiled in {compile_s:.1f} s", flush=True)
    run.train()
    run.export()
    (args.out / "train.json").write_text(json.dumps(run.report(compile_s)) + "\n")
    final = run.log[-1] if run.log else {}
    print(f"train: {run.progress}, last {final}", flush=True)


if __name__ == "__main__":
    main()
