"""What a stream costs the training process, and how long a step waits for it, by the number of processes that encode it.

    python -m benchmarks.streaming --tokenizer FOLDER --train-path chats.jsonl --step 0.2

A step is a pause here: the accelerator works, the process does nothing. Prints for each number of processes (data.num_workers)
the share of the time that steps waited, the longest wait, tokens a second, and the CPU seconds of the training process for a
million tokens, reading and collating included: Python that runs in it holds up the launching of kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks.prepare import load, made_rows


def main() -> None:
    """Run as asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="examples/tiny-model", help="a folder with a fast tokenizer")
    parser.add_argument("--train-path", help="rows of your own instead of made ones")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="data.num_workers, one run for each")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step takes")
    parser.add_argument("--packs", type=int, default=16, help="packs of 2,048 tokens in a step")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = asked.train_path or _made(Path(folder) / "rows.jsonl", asked.tokenizer)
        for workers in asked.workers:
            print(measured(asked, path, workers, Path(folder) / "blocks"), flush=True)


def measured(asked: argparse.Namespace, path: str, workers: int, folder: Path) -> str:
    """Return what came of one number of processes, as a line."""
    from meshtune.config import from_mapping
    from meshtune.data.loader import Loader
    from meshtune.data.section import DataSection
    from meshtune.data.stream import Stream, Streaming
    from meshtune.data.stream_order import StreamOrder
    from meshtune.data.units import UnitOptions

    settings = {"train_path": path, "streaming": True, "packing": True, "num_workers": workers, "shuffle_buffer": 1024}
    section = from_mapping(DataSection, settings)
    stream = Stream(section, [path], load(asked.tokenizer), 2048, Streaming(folder, says=False))
    order = StreamOrder(stream, asked.packs, UnitOptions(packing=True, max_seq_length=2048))
    loader = Loader(order, rank=0, world_size=1, per_device_batch_size=asked.packs, pad_token_id=0)
    loader.next()  # the first block is made before training
    waits, tokens, began, cpu = [], 0, time.perf_counter(), time.process_time()
    for _ in range(asked.steps):
        asked_at = time.perf_counter()
        batches = loader.next()
        waits.append(time.perf_counter() - asked_at)
        tokens += sum(batch.tokens for batch in batches)
        time.sleep(asked.step)
    took, worked = time.perf_counter() - began, time.process_time() - cpu
    stream.close()
    return (
        f"num_workers {workers}: waited {sum(waits) / took:.1%} of the time, {max(waits):.2f} s at most; "
        f"{tokens / took:,.0f} tokens/s; {1e6 * worked / tokens:.2f} CPU s of the training process for a million tokens"
    )


def _made(path: Path, tokenizer: str) -> str:
    rows = made_rows(load(tokenizer), 20_000)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
