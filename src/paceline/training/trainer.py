"""The optimisation loop: anchored blocks in, a trained drafter out, resumable to the bit."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import ConfigError, PacelineError
from paceline.models.attention import DenseCausalContext
from paceline.models.drafter import Drafter
from paceline.training.batches import Batch, BatchPlan
from paceline.training.blocks import BlockContext, block_labels, slot_weights
from paceline.training.distributed import World
from paceline.training.losses import LossSums, LossWeights, block_losses, flatten_blocks
from paceline.training.options import TrainOptions

LOG_EVERY: Final = 50
STATE_FILE: Final = "state.pt"
# fp32 logits of the blocks whose loss is taken at once; autograd keeps several of their size
PART_BYTES: Final = {"cuda": 2 * 2**30, "cpu": 64 * 2**20}
BETAS: Final = (0.9, 0.95)


class Trainer:
    """One training run.

    Parameters are fp32 masters; on a GPU the passes run in bf16 under autocast. Target, embedding and head
    are frozen.

    Args:
        drafter: initialised, fp32, on its target's device.
        plan: batches.
        options: of the run.
        world: processes that share it.
    """

    def __init__(self, drafter: Drafter, plan: BatchPlan, options: TrainOptions, world: World) -> None:
        self.drafter = drafter
        self.target = drafter.target
        self.plan = plan
        self.options = options
        self.world = world
        self.device = drafter.fc.weight.device
        self.step = 0
        self.elapsed_s = 0.0
        self.log: list[dict[str, Any]] = []
        num_drafts = drafter.config.max_drafts
        self._share = LossWeights.of(options.method)
        self._weights = slot_weights(num_drafts, options.decay, self.device)
        per_block = num_drafts * drafter.config.draft_vocab_size * 4
        self._part = max(1, PART_BYTES[self.device.type] // per_block)
        self._losses: Callable[..., LossSums] = block_losses
        if options.compile:
            self._losses = torch.compile(block_losses, dynamic=False)
        self._parameters = [p for p in drafter.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=options.learning_rate,
            betas=BETAS,
            weight_decay=options.weight_decay,
            fused=self.device.type == "cuda",
        )
        self._total_steps = options.steps
        if options.steps is None and options.minutes is None:
            self._total_steps = 6 * plan.steps_per_epoch

    # ------------------------------------------------------------------ one step

    def gradients(self, batch: Batch) -> Tensor:
        """Add the gradients of this process's share of a batch; returns its sums, see :func:`pack_sums`."""
        tokens, lengths, starts, valid = (part.to(self.device, non_blocking=True) for part in batch)
        config = self.drafter.config
        labels = block_labels(tokens, lengths, starts, valid, config.max_drafts)
        total_weight = (self._weights * labels.supervised).sum()
        self.world.sum_([total_weight])
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        with torch.no_grad():
            out = self.target(tokens, positions, DenseCausalContext(), config.tap_layer_ids)
        with self._precision():
            features = self.drafter.context_features(out.taps)
            k, v = self.drafter.context_kv(features, positions)
            hidden = self.drafter(labels.anchors, starts, BlockContext(k, v, starts))
        # The head's part of the graph is built and released part by part; the rest is walked once.
        leaf = hidden.detach().flatten(0, 1).requires_grad_()  # [N, W, d]
        parts = [leaf, *flatten_blocks(labels, out.hidden)]
        sums: Tensor | None = None
        for part in zip(*(tensor.split(self._part) for tensor in parts), strict=True):
            with self._precision():
                got = self._losses(self.drafter, *part, self._weights, self._share)
            (got.loss / total_weight.clamp_min(1e-6)).backward()
            packed = pack_sums(got)
            sums = packed if sums is None else sums + packed
        assert leaf.grad is not None and sums is not None
        hidden.backward(leaf.grad.view_as(hidden))
        return torch.cat((sums, (total_weight / self.world.size)[None]))

    def _precision(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()

    def train_step(self) -> Tensor:
        """One optimiser step; returns the batch's sums and the gradient norm."""
        sums = self.gradients(self.plan.batch(self.step, self.world.rank))
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.world.sum_(gradients)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.options.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.learning_rate * self.scale(self.progress())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return torch.cat((sums, norm[None].to(sums.dtype)))

    # ------------------------------------------------------------------ the run

    def progress(self) -> float:
        """How much of the run is done, 0..1."""
        if self._total_steps is not None:
            return min(1.0, self.step / self._total_steps)
        assert self.options.minutes is not None
        return min(1.0, self.elapsed_s / (self.options.minutes * 60))

    def scale(self, progress: float) -> float:
        """Factor on the learning rate: linear warm-up, cosine to 0."""
        warmup = self.options.warmup
        if progress < warmup:
            return max(progress, 1e-3 * warmup) / warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) if warmup < 1 else 1.0

    def run(self, folder: Path) -> None:
        """Train to the end; states for resuming go to ``folder``.

        Raises:
            PacelineError: the loss is no longer a number.
        """
        self.gradients(self.plan.batch(self.step, self.world.rank))  # allocations, compilation: off the clock
        self._optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        before, saved = self.elapsed_s, time.monotonic()
        started = time.monotonic()
        recent: list[Tensor] = []
        with self._bar() as show:
            while self.progress() < 1:
                recent.append(self.train_step())
                self.elapsed_s = self.world.agree(before + time.monotonic() - started, self.device)
                if self.step % LOG_EVERY == 0 or self.progress() >= 1:
                    self._note(recent)
                    recent.clear()
                show()
                if self.elapsed_s - (saved - started) - before > self.options.checkpoint_minutes * 60:
                    self.save(folder)
                    saved = started + self.elapsed_s - before
        self.save(folder)

    def _note(self, recent: list[Tensor]) -> None:
        """Add the mean of recent steps to the log."""
        total = torch.stack(recent)
        self.world.sum_([shared := total[:, :-1].sum(0)])
        values = shared.tolist()
        g = self.drafter.config.max_drafts
        weight = max(values[-1], 1e-9)
        accepted, matched, count = values[4 : 4 + g], values[4 + g : 4 + 2 * g], values[4 + 2 * g : -1]
        entry = {
            "step": self.step,
            "elapsed_s": round(self.elapsed_s, 2),
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "loss": values[0] / weight,
            "cross_entropy": values[1] / weight,
            "distance": values[2] / weight,
            "confidence": values[3] / weight,
            "accept": [round(a / max(c, 1), 4) for a, c in zip(accepted, count, strict=True)],
            "match": [round(m / max(c, 1), 4) for m, c in zip(matched, count, strict=True)],
            "gradient_norm": float(total[:, -1].mean()),
        }
        if not (math.isfinite(entry["loss"]) and math.isfinite(entry["gradient_norm"])):
            raise PacelineError(
                f"training diverged before step {self.step}: the loss is {entry['loss']}. Lower "
                f"learning_rate (now {self.options.learning_rate}) and start anew"
            )
        self.log.append(entry)

    @contextlib.contextmanager
    def _bar(self) -> Iterator[Callable[[], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        disable = not (self.options.show_progress and self.world.leads)
        with Progress(
            *columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True), disable=disable
        ) as bar:
            task = bar.add_task(f"Training {self.options.method}", total=1.0, note="")

            def show() -> None:
                note = f"step {self.step}"
                if self.log:
                    last = self.log[-1]
                    note += f"  loss {last['loss']:.3f}  first draft {last['match'][0]:.1%}"
                bar.update(task, completed=self.progress(), note=note)

            yield show

    # ------------------------------------------------------------------ state

    def save(self, folder: Path) -> None:
        """Write everything a later process needs to go on exactly here."""
        if self.world.leads:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / (STATE_FILE + ".partial")
            torch.save(
                {
                    "options": self.options.fingerprint(),
                    "drafter": self.drafter.state_dict(),
                    "optimizer": self._optimizer.state_dict(),
                    "step": self.step,
                    "elapsed_s": self.elapsed_s,
                    "log": self.log,
                },
                partial,
            )
            partial.replace(folder / STATE_FILE)
        self.world.barrier()

    def resume(self, folder: Path) -> bool:
        """Go on from a saved state, if there is one.

        Raises:
            ConfigError: the state is of a run with other options.
        """
        path = folder / STATE_FILE
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        ours, theirs = self.options.fingerprint(), state["options"]
        changed = sorted(name for name in ours if ours[name] != theirs.get(name))
        if changed:
            raise ConfigError(
                f"{path} is the state of a run with other options ({', '.join(changed)}). Give the same "
                "ones to resume it, another --out to start a new run, or remove the file"
            )
        self.drafter.load_state_dict(state["drafter"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed_s, self.log = state["step"], state["elapsed_s"], state["log"]
        return True


def pack_sums(sums: LossSums) -> Tensor:
    """All sums as one vector: loss, three terms, then accepted, matched and count per draft."""
    scalars = torch.stack((sums.loss.detach(), sums.cross_entropy, sums.distance, sums.confidence))
    return torch.cat((scalars, sums.accepted, sums.matched, sums.supervised))
