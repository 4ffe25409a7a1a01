"""Stage 8: put the trained model, its tokenizer and its figures where the package ships them."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from pretrain.common import END_OF_TEXT, IM_END, MODEL, RECIPE, REPOSITORY

ASSETS = REPOSITORY / "src" / "paceline" / "assets" / "mini"
MAX_WEIGHT_BYTES = 20_000_000

GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 40,
    "eos_token_id": [IM_END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
}


def export(data: Path, assets: Path) -> None:
    """Copy weights and tokenizer to ``assets``; write the configs there and the figures to ``results/``."""
    weights = data / "out" / "model" / "model.safetensors"
    if weights.stat().st_size > MAX_WEIGHT_BYTES:
        raise RuntimeError(
            f"{weights} has {weights.stat().st_size} bytes, at most {MAX_WEIGHT_BYTES} may ship"
        )
    assets.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(weights, assets / weights.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / "tokenizer" / name, assets / name)
    (assets / "config.json").write_text(json.dumps(MODEL, indent=2) + "\n")
    (assets / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    results = RECIPE / "results"
    results.mkdir(exist_ok=True)
    for name in ("train.json", "eval.json"):
        shutil.copyfile(data / "out" / name, results / name)
    shutil.copyfile(data / "shards" / "totals.json", results / "tokens.json")
    card = REPOSITORY / "docs" / "models" / "mini.md"
    if card.exists():
        shutil.copyfile(card, assets / "README.md")
    print(f"export: {assets}, {weights.stat().st_size:,} bytes of weights")


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--assets", type=Path, default=ASSETS)
    args = parser.parse_args()
    export(args.data, args.assets)


if __name__ == "__main__":
    main()
