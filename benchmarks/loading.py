"""Private memory of each rank while it loads its shard of a checkpoint of random weights.

    python benchmarks/loading.py [--gigabytes 5] [--ranks 2] [--strategy fsdp2] [--quantization nf4]

Writes the checkpoint in files of 1 GB, loads it on local ranks by the parts that training uses, and prints for each rank its
shard, the largest USS (memory that no other process shares, sampled fifty times a second) beyond that before loading, the
difference, and the seconds taken. Weights may stay in the mapped file until they are written to, so each is written once.
With `--quantization` layers are held in few bits, as for an adapter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HIDDEN, INNER, VOCABULARY = 2048, 5632, 32_000


def main() -> None:
    """Make, load, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--quantization", choices=["nf4", "fp4", "int8", "int4"])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder:
        load(asked.folder, asked.strategy, asked.quantization)
        return
    with tempfile.TemporaryDirectory(prefix="meshtune-loading-") as root:
        stored = make(Path(root), asked.gigabytes)
        print(
            f"checkpoint of {stored / 1e9:.2f} GB, {asked.ranks} ranks, {asked.strategy}, {asked.quantization or 'float32'}"
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.ranks}"]
        again = [__file__, "--folder", root, "--strategy", asked.strategy]
        again += ["--quantization", asked.quantization] if asked.quantization else []
        said = subprocess.run([*command, *again], check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = sorted((json.loads(line) for line in said.splitlines() if line.startswith("{")), key=lambda row: row["rank"])
    for row in rows:
        beyond = row["peak"] - row["shard"]
        print(
            f"rank {row['rank']}: shard {row['shard'] / 1e9:.2f} GB, peak {row['peak'] / 1e9:.2f} GB, "
            f"beyond the shard {beyond / 1e9:.2f} GB, {row['seconds']:.1f} s"
        )


def make(folder: Path, gigabytes: float) -> int:
    """A Llama of about so many bytes in float32, drawn tensor by tensor; returns its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    layer = 4 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * INNER)
    layers = max(1, round((gigabytes * 1e9 - 8 * VOCABULARY * HIDDEN) / layer))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    part: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    total = 0

    def write() -> None:
        name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, name))
        part.clear()

    for name, parameter in model.named_parameters():
        part[name] = torch.randn(parameter.shape) * 0.02
        total += part[name].nbytes
        if sum(tensor.nbytes for tensor in part.values()) > 1e9:
            write()
    write()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def load(folder: Path, strategy: str, quantization: str | None) -> None:
    """On a rank: build on meta, shard, load; print what it took."""
    from meshtune.observe.chatter import hush

    hush()
    import torch

    from meshtune.config import from_mapping
    from meshtune.layout import Layout
    from meshtune.layout.section import DistributedSection
    from meshtune.layout.world import connect, disconnect
    from meshtune.models import hf
    from meshtune.models.causal_lm import CausalLM
    from meshtune.models.quantization.choosing import choose, quantise
    from meshtune.models.quantization.section import QuantizationSection
    from meshtune.models.section import ModelSection
    from meshtune.models.source import resolve
    from meshtune.parallel import Settings, shard
    from meshtune.recipes.plans import declare

    world = connect("cpu")
    layout = Layout.resolve(from_mapping(DistributedSection, {"strategy": strategy}), world.size).connect()
    source = resolve(ModelSection(name=str(folder)))
    model = hf.build(source, "sdpa")
    plan = declare(model, None, layout)
    if quantization is not None:
        quantise(model, choose(model, from_mapping(QuantizationSection, {"type": quantization})))
    shard(CausalLM(model), model, layout, plan, Settings(torch.float32, "none", False))
    watch = Watch()
    begun = time.perf_counter()
    hf.load(model, source, torch.device("cpu"))
    seconds = time.perf_counter() - begun
    own = [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in model.parameters()]
    for tensor in own:
        tensor.mul_(1)
    peak = watch.stop()
    shard_bytes = sum(tensor.nbytes for tensor in own)
    disconnect()
    print(json.dumps({"rank": world.rank, "shard": shard_bytes, "peak": peak, "seconds": seconds}), flush=True)


class Watch(threading.Thread):
    """The largest private memory of this process since it was made, beyond that which it then had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before, self._most, self._ended = private_bytes(), 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self._most = max(self._most, private_bytes())

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return max(self._most, private_bytes()) - self._before


def private_bytes() -> int:
    """USS: pages that are this process's alone, those of files it has mapped included."""
    with open(f"/proc/{os.getpid()}/smaps_rollup", encoding="ascii") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    main()
