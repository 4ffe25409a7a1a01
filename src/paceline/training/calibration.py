"""Sequential temperature scaling of the confidence head (DSpark, section on calibration).

One temperature per draft position, fitted left to right: position k's makes the product of confidences up to
k match how often the first k drafts all stand, with the earlier temperatures frozen. Rankings within a
position do not change.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_BINS: Final = 15
GRID: Final = np.geomspace(0.25, 4.0, 97)


@dataclass(frozen=True)
class Calibration:
    """A fit, in the fields of SGLang's file.

    Attributes:
        temperatures: [g].
        dataset: what it was fitted on.
        num_samples: blocks.
        ece_before, ece_after: [g] expected calibration errors of the survival product per position, on blocks
            that were not used for the fit.
    """

    temperatures: list[float]
    dataset: str
    num_samples: int
    ece_before: list[float]
    ece_after: list[float]

    def save(self, path: Path) -> None:
        """Write the JSON file that serving reads."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def calibration_error(chance: NDArray[np.float64], happened: NDArray[np.bool_]) -> float:
    """Expected calibration error over ``NUM_BINS`` equal bins: mean |confidence - frequency|, by bin size."""
    bins = np.minimum((chance * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gap = np.bincount(bins, weights=chance - happened, minlength=NUM_BINS)
    return float(np.abs(gap).sum() / max(len(chance), 1))


def survival(logits: NDArray[np.float64], temperatures: NDArray[np.float64]) -> NDArray[np.float64]:
    """Product of scaled confidences up to each position, [N, g]."""
    confidences: NDArray[np.float64] = 1 / (1 + np.exp(-logits / temperatures))
    return confidences.cumprod(axis=1)


def fit_temperatures(logits: NDArray[np.float64], stands: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Temperatures [g] by grid search, left to right.

    Args:
        logits: [N, g], raw confidences along sampled drafts.
        stands: [N, g], whether the drafts up to each position were all accepted.
    """
    fitted: list[float] = []
    before = np.ones(len(logits))
    for position in range(logits.shape[1]):
        confidences = 1 / (1 + np.exp(-logits[:, position, None] / GRID))  # [N, grid]
        errors = [calibration_error(before * c, stands[:, position]) for c in confidences.T]
        best = int(np.argmin(errors))
        fitted.append(float(GRID[best]))
        before = before * confidences[:, best]
    return np.array(fitted)


def calibrate(
    logits: NDArray[np.float64], stands: NDArray[np.bool_], group: NDArray[np.int64], dataset: str
) -> Calibration:
    """Fit on one half of the texts, measure on the other.

    Args:
        group: [N], the text each block belongs to.
    """
    half = group % 2 == 0
    temperatures = fit_temperatures(logits[half], stands[half])
    ones = np.ones_like(temperatures)
    other = ~half

    def errors(scales: NDArray[np.float64]) -> list[float]:
        chance = survival(logits[other], scales)
        return [round(calibration_error(c, s), 5) for c, s in zip(chance.T, stands[other].T, strict=True)]

    return Calibration(
        [round(t, 4) for t in temperatures.tolist()],
        dataset,
        int(half.sum()),
        errors(ones),
        errors(temperatures),
    )
