"""Checkpoint folders in the Hugging Face layout: find them, check them, stream their tensors.

Everything that can be wrong is found from the safetensors headers, before the first byte of a weight is read.
Weights then go one tensor at a time from a memory-mapped shard to their place in the model, and a shard is
unmapped before the next is opened: the host holds the weights it keeps plus at most one shard.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.json_files import read_json
from paceline.models.config import SUPPORTED_DTYPES

logger = logging.getLogger(__name__)

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
_LISTED: Final = 8  # names spelled out in an error before "and N more"
_SLAB_ROWS: Final = 8192  # of two matrices that are compared
_DOWNLOADED: Final = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt")
_READABLE: Final = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # safetensors names; bytes per value


def resolve_folder(name_or_path: str | Path, *, revision: str | None = None) -> Path:
    """The local folder of a checkpoint; a hub name is downloaded (or taken from the hub's local cache).

    Args:
        revision: branch, tag or commit on the hub; refused with a local folder, which has only one.

    Raises:
        CheckpointError: no such folder, and it is not a hub name or the hub cannot be reached.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision is {revision!r}, but {path} is a local folder: drop the revision"
            )
        return path
    name = str(name_or_path)
    if path.is_file():
        raise CheckpointError(f"{name} is a file; give the folder that holds config.json and the weights")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"checkpoint folder {name} does not exist")
    from huggingface_hub import snapshot_download  # costs a third of a second: only when needed

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_DOWNLOADED)))
    except Exception as error:  # the hub client raises its own, httpx's and OS errors
        reason = next(iter(str(error).splitlines()), "no message")
        raise CheckpointError(
            f"{name!r} is not a local folder, and fetching it from the Hugging Face hub failed "
            f"({type(error).__name__}: {reason}). Give the path of a local folder, or check the name, the "
            "network and HF_TOKEN"
        ) from error


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        count = _READABLE.get(self.dtype, 1)
        for size in self.shape:
            count *= size
        return count


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes of every tensor of a folder, from the headers alone.

    Raises:
        CheckpointError: no safetensors, a shard the index names is absent or unreadable, or the index and the
            shards disagree.
    """
    index = folder / INDEX_NAME
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no 'weight_map'")
        files = sorted({str(name) for name in weight_map.values()})
        absent = [name for name in files if not (folder / name).exists()]
        if absent:
            raise CheckpointError(f"{folder}: shards named by {INDEX_NAME} are missing: {_listed(absent)}")
    elif (folder / SINGLE_NAME).exists():
        weight_map, files = None, [SINGLE_NAME]
    else:
        weights = {".bin", ".pt", ".gguf", ".safetensors"}
        found = sorted(path.name for path in folder.iterdir() if path.suffix in weights)
        raise CheckpointError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME} (found: {_listed(found) or 'no weights'}); "
            "only safetensors checkpoints are loaded"
        )
    headers: dict[str, StoredTensor] = {}
    for file in files:
        with open_shard(folder / file) as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                part = shard.get_slice(name)
                headers[name] = StoredTensor(folder / file, tuple(part.get_shape()), part.get_dtype())
    if weight_map is not None:
        lost = [n for n, f in weight_map.items() if n not in headers or headers[n].file.name != f]
        if lost:
            raise CheckpointError(
                f"{folder}: {INDEX_NAME} names tensors its shards do not hold: {_listed(lost)}"
            )
    return headers


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """A memory-mapped safetensors file. Raises CheckpointError when it is not one."""
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            pointer = file.read(20).startswith(b"version https://git")
        hint = "; it is a Git LFS pointer: run 'git lfs pull'" if pointer else ""
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}{hint}") from error


def check_tensors(
    folder: Path,
    headers: Mapping[str, StoredTensor],
    expected: Mapping[str, Tensor],
    ignored: Collection[str] = (),
) -> None:
    """Raise CheckpointError naming every missing, unexpected, mis-shaped and unreadable tensor.

    Args:
        expected: name -> the (empty) tensor it will be loaded into.
        ignored: names that may be there and are not loaded.
    """
    missing = sorted(expected.keys() - headers.keys())
    unexpected = sorted(
        name
        for name in headers.keys() - expected.keys() - set(ignored)
        if not name.endswith("rotary_emb.inv_freq")
    )
    known = sorted(expected.keys() & headers.keys())
    shapes = [
        f"{name} is {list(headers[name].shape)}, expected {list(expected[name].shape)}"
        for name in known
        if headers[name].shape != tuple(expected[name].shape)
    ]
    dtypes = [f"{name} is {headers[name].dtype}" for name in known if headers[name].dtype not in _READABLE]
    problems = [
        f"{len(names)} {what}: {_listed(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("mis-shaped", shapes),
            (f"of a dtype other than {', '.join(_READABLE)} (quantised?)", dtypes),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{folder}: the tensors do not fit config.json. " + "; ".join(problems))


class Progress(Protocol):
    """Told how much has been loaded."""

    def advance(self, num_bytes: int) -> None:
        """``num_bytes`` more of the file are in place."""


def stream_tensors(
    headers: Mapping[str, StoredTensor],
    targets: Mapping[str, Tensor],
    *,
    show_progress: bool = False,
    what: str = "weights",
) -> None:
    """Copy each stored tensor into its target, converting dtype and device on the way.

    One shard is mapped at a time and one tensor is in flight. Logs one line with the size and rate in GiB/s.

    Args:
        headers: what is stored; checked by :func:`check_tensors` before.
        targets: name -> tensor (a view of a fused parameter, say) to fill in place.
        show_progress: draw a progress bar on stderr.
        what: noun for the bar and the log line.
    """
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(headers[name].file, []).append(name)
    total_bytes = sum(headers[name].num_bytes for name in targets)
    start_s = time.perf_counter()
    with progress_bar(f"Loading {what}", total_bytes, show_progress) as progress, torch.no_grad():
        for file in sorted(by_file):
            with open_shard(file) as shard:
                for name in by_file[file]:
                    targets[name].copy_(shard.get_tensor(name))
                    progress.advance(headers[name].num_bytes)
    seconds = max(time.perf_counter() - start_s, 1e-9)
    gib = total_bytes / 2**30
    logger.info(
        "Loaded %s: %d tensors, %.2f GiB from %d file(s) in %.2f s (%.2f GiB/s)",
        what,
        len(targets),
        gib,
        len(by_file),
        seconds,
        gib / seconds,
    )


@contextmanager
def progress_bar(label: str, total_bytes: int, show: bool) -> Iterator[Progress]:
    """A bar over bytes on stderr, or nothing."""
    if not show:
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        yield _RichBar(bar, bar.add_task(label, total=total_bytes))


class _Silent:
    def advance(self, num_bytes: int) -> None:
        """Nothing is shown."""


class _RichBar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, num_bytes: int) -> None:
        """Move the bar."""
        self._bar.advance(self._task, num_bytes)


def same_rows(stored: StoredTensor, name: str, loaded: Tensor) -> bool:
    """Whether a stored matrix equals a loaded one, read in slabs so that it is never held whole."""
    if stored.shape != tuple(loaded.shape):
        return False
    with open_shard(stored.file) as shard:
        part = shard.get_slice(name)
        return all(
            torch.equal(part[i : i + _SLAB_ROWS].to(loaded.dtype), loaded[i : i + _SLAB_ROWS].cpu())
            for i in range(0, stored.shape[0], _SLAB_ROWS)
        )


def resolve_dtype(
    requested: str, config_dtype: str | None, headers: Mapping[str, StoredTensor]
) -> torch.dtype:
    """The dtype to serve in.

    Args:
        requested: "auto" (what the config says, else what the file holds) or one of ``SUPPORTED_DTYPES``.

    Raises:
        CheckpointError: unknown name.
    """
    name = requested
    if name == "auto":
        stored = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        name = config_dtype or next(
            (stored[t.dtype] for t in headers.values() if t.dtype in stored), "float32"
        )
    if name not in SUPPORTED_DTYPES:
        raise CheckpointError(f"dtype {requested!r} is not one of auto, {', '.join(SUPPORTED_DTYPES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> Path:
    """Write ``config.json`` and ``model.safetensors``; a file of that name is replaced only once the new one
    is whole.

    Args:
        tensors: name -> tensor of any device; views are fine.
        dtype: convert to it; None keeps each tensor's own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: t.detach().to("cpu", dtype or t.dtype).contiguous() for name, t in tensors.items()}
    temporary = folder / (SINGLE_NAME + ".tmp")
    save_file(stored, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / SINGLE_NAME)
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "config.json")
    return folder


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_LISTED])
    return shown + (f", and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
