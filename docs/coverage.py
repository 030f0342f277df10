"""Writes docs/coverage.md: architectures of transformers, made small, on each layout beside one process (`meshtune verify`).

    python docs/coverage.py                    all of them; writes the page
    python docs/coverage.py NAME...            only these; prints the page instead
    python docs/coverage.py --layouts LIST     other layouts than the page has; prints the page
    python docs/coverage.py --json FILE        keeps what was found in a file, and does not try again what is in it

Exits with 1 if a cell is failing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from meshtune.errors import MeshtuneError
from meshtune.verify.engine import verify_config
from meshtune.verify.pool import Pool
from meshtune.verify.report import Report, Verdict

PAGE = Path(__file__).with_name("coverage.md")
LAYOUTS = ["fsdp2", "hsdp", "ddp", "tp2", "tp2+sp", "cp2", "ep2", "pp2", "fsdp2xtp2", "pp2xfsdp2xtp2", "ep4xtp2"]


@dataclass(frozen=True)
class Architecture:
    """A causal language model of transformers by its `model_type`; `values` are settings of its config that checkpoints have
    and its class defaults leave out, or have in a size that nothing divides."""

    title: str
    model_type: str
    values: dict[str, Any] = field(default_factory=dict)


_FALCON = {"new_decoder_architecture": True, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8}
_DOTS = {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}

ARCHITECTURES = [
    Architecture("Llama 3", "llama", {"num_key_value_heads": 8}),
    Architecture("Llama 4 text", "llama4_text"),
    Architecture("Qwen 2, 2.5", "qwen2", {"num_key_value_heads": 8}),
    Architecture("Qwen 2 MoE", "qwen2_moe"),
    Architecture("Qwen 3", "qwen3", {"num_key_value_heads": 8}),
    Architecture("Qwen 3 MoE", "qwen3_moe"),
    Architecture("Qwen 3 Next", "qwen3_next"),
    Architecture("Qwen 3.5", "qwen3_5_text"),
    Architecture("Qwen 3.5 MoE", "qwen3_5_moe_text"),
    Architecture("DeepSeek V2", "deepseek_v2", {"num_experts_per_tok": 6, "moe_intermediate_size": 1408}),
    Architecture("DeepSeek V3", "deepseek_v3"),
    Architecture("DeepSeek V4", "deepseek_v4"),
    Architecture("Gemma 1", "gemma"),
    Architecture("Gemma 2", "gemma2"),
    Architecture("Gemma 3 text", "gemma3_text"),
    Architecture("Gemma 3n text", "gemma3n_text"),
    Architecture("Gemma 4 text", "gemma4_text"),
    Architecture("Mistral", "mistral"),
    Architecture("Ministral", "ministral", {"head_dim": 128}),
    Architecture("Ministral 3", "ministral3"),
    Architecture("Mixtral", "mixtral"),
    Architecture("GLM", "glm"),
    Architecture("GLM 4", "glm4"),
    Architecture("GLM 4 MoE", "glm4_moe"),
    Architecture("GLM MoE DSA", "glm_moe_dsa"),
    Architecture("MiniMax", "minimax"),
    Architecture("MiniMax M2", "minimax_m2"),
    Architecture("MiniMax M3 text", "minimax_m3_vl_text"),
    Architecture("ERNIE 4.5", "ernie4_5"),
    Architecture("ERNIE 4.5 MoE", "ernie4_5_moe"),
    Architecture("MiMo V2 Flash", "mimo_v2_flash"),
    Architecture("GPT-OSS", "gpt_oss"),
    Architecture("Phi", "phi"),
    Architecture("Phi-3", "phi3", {"num_key_value_heads": 8}),
    Architecture("Phi MoE", "phimoe"),
    Architecture("OLMo", "olmo"),
    Architecture("OLMo 2", "olmo2"),
    Architecture("OLMo 3", "olmo3"),
    Architecture("OLMoE", "olmoe"),
    Architecture("Flex OLMo", "flex_olmo", {"num_experts": 8}),
    Architecture("Granite", "granite"),
    Architecture("Granite MoE", "granitemoe"),
    Architecture("Cohere", "cohere"),
    Architecture("Cohere 2", "cohere2"),
    Architecture("SmolLM 3", "smollm3"),
    Architecture("Seed-OSS", "seed_oss"),
    Architecture("Starcoder 2", "starcoder2"),
    Architecture("Nemotron", "nemotron", {"num_key_value_heads": 8, "head_dim": 128}),
    Architecture("Nemotron-H", "nemotron_h"),
    Architecture("Kimi Linear", "kimi_linear"),
    Architecture("Exaone 4", "exaone4"),
    Architecture("Hunyuan dense", "hunyuan_v1_dense", {"head_dim": 128}),
    Architecture("Hunyuan MoE", "hunyuan_v1_moe", {"head_dim": 128, "num_experts": 16, "moe_topk": 2}),
    Architecture("Falcon, 71 heads", "falcon"),
    Architecture("Falcon, new decoder", "falcon", _FALCON),
    Architecture("GPT-2", "gpt2"),
    Architecture("GPT-J", "gptj"),
    Architecture("GPT-Neo", "gpt_neo"),
    Architecture("GPT-NeoX", "gpt_neox"),
    Architecture("GPT BigCode", "gpt_bigcode"),
    Architecture("OPT", "opt"),
    Architecture("Bloom", "bloom"),
    Architecture("MPT", "mpt"),
    Architecture("StableLM", "stablelm"),
    Architecture("Persimmon", "persimmon"),
    Architecture("CodeGen", "codegen"),
    Architecture("Helium", "helium"),
    Architecture("Arcee", "arcee"),
    Architecture("Apertus", "apertus"),
    Architecture("Dots 1", "dots1", _DOTS),
    Architecture("InternLM 3", "internlm3"),
    Architecture("LFM 2", "lfm2"),
    Architecture("LFM 2 MoE", "lfm2_moe", {"layer_types": ["conv", "full_attention"] * 16}),
    Architecture("Jamba", "jamba"),
    Architecture("Bamba", "bamba"),
    Architecture("Mamba 2", "mamba2"),
]

_INTRODUCTION = """\
<!-- Written by docs/coverage.py (`make coverage`) from what `meshtune verify` found; not by hand. -->

# Coverage

Architectures of transformers {transformers}, each made small (same class, every kind of layer, random weights), trained in
float32 on local CPU ranks in each layout and compared with one process: 3 steps of SGD with momentum and 3 of AdamW,
2 micro-batches a step, unequal numbers of supervised tokens, clipping active. What is compared, and how closely, is told in
[Proving a layout](verify.md), which is also how to try the same with a model of your own.

- **exact**: loss, gradient norm and every weight are those of one process, and copies are equal bit for bit.
- refused: training in this layout stops before any weight is read, with the reason that stands below the table.
- **FAILING**: it runs, and the numbers are not those of one process, or it breaks.
- A dash: the architecture has no experts to share out.

Sizes are those of each config class, made small. `rows` says whether documents were packed: an architecture whose tokens mix
in another way than by attention is trained on padded rows ([why](decisions/0003-proofs-on-a-twin.md)).

"""


def survey(chosen: list[Architecture], layouts: list[str], jobs: int, known: Known) -> dict[str, Report]:
    """Try each, so many at once; by title, in the order given."""
    pools: SimpleQueue[Pool] = SimpleQueue()

    def work(one: Architecture) -> Report:
        if (report := known.report(one.title, layouts)) is not None:
            return report
        pool, begun = pools.get(), time.perf_counter()
        try:
            report = _try(pool, one, layouts)
        finally:
            pools.put(pool)
        report.seconds = time.perf_counter() - begun
        cells = " ".join(f"{v.layout}:{v.status}" for v in report.verdicts if _applies(report, v))
        print(f"{one.title} ({report.parameters:,}, {report.seconds:.0f} s) {cells}", file=sys.stderr, flush=True)
        known.keep(one.title, report)
        return report

    with ExitStack() as started, ThreadPoolExecutor(jobs) as threads:
        for _ in range(jobs):
            pools.put(started.enter_context(Pool()))
        return dict(zip((one.title for one in chosen), threads.map(work, chosen), strict=True))


class Known:
    """What was found, in a file if there is one, so that a run that was interrupted goes on."""

    def __init__(self, file: Path | None):
        self._file, self._lock = file, Lock()
        self._found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}

    def report(self, title: str, layouts: list[str]) -> Report | None:
        """What is known of all these layouts; of what was failing, nothing is."""
        found = dict(self._found.get(title) or {})
        verdicts = {one["layout"]: Verdict(**{**one, "comparisons": []}) for one in found.pop("verdicts", ())}
        if not found.pop("passed", False) or not verdicts.keys() >= set(layouts):
            return None
        return Report(**found, verdicts=[verdicts[name] for name in layouts])

    def keep(self, title: str, report: Report) -> None:
        with self._lock:
            self._found[title] = report.as_dict()
            if self._file:
                self._file.write_text(json.dumps(self._found, indent=2), encoding="utf-8")


def _try(pool: Pool, one: Architecture, layouts: list[str]) -> Report:
    try:
        return verify_config(pool, one.model_type, one.values, ",".join(layouts))
    except MeshtuneError as error:  # one process is refused, so every layout is
        verdicts = [Verdict(name, 1, "refused", str(error)) for name in layouts]
    except Exception as error:
        verdicts = [Verdict(name, 1, "failing", f"{type(error).__name__}: {error}") for name in layouts]
    return Report(one.model_type, one.model_type, 0, {}, experts=True, packed=False, attention="", verdicts=verdicts)


def render(reports: dict[str, Report], layouts: list[str]) -> str:
    """The page."""
    lines = ["| | rows | " + " | ".join(layouts) + " |", "|---|---|" + "---|" * len(layouts)]
    for title, report in reports.items():
        cells = [_cell(report, verdict) for verdict in report.verdicts]
        lines.append(f"| {title} | {'packed' if report.packed else 'padded'} | " + " | ".join(cells) + " |")
    counts = [_cell(report, verdict) for report in reports.values() for verdict in report.verdicts]
    told = ", ".join(
        f"{counts.count(cell)} {cell.strip('*').lower()}" for cell in ("**exact**", "refused", "**FAILING**")
    )
    lines += ["", f"{len(reports)} architectures; {told}.", "", "## Reasons", ""]
    for title, report in reports.items():
        lines += _reasons(title, report)
    return _INTRODUCTION.format(transformers=version("transformers")) + "\n".join(lines) + "\n"


def _cell(report: Report, verdict: Verdict) -> str:
    if not _applies(report, verdict):
        return "-"
    return {"exact": "**exact**", "refused": "refused", "failing": "**FAILING**"}[verdict.status]


def _applies(report: Report, verdict: Verdict) -> bool:
    return report.experts or "ep" not in re.split(r"\d*x|\d+", verdict.layout)


def _reasons(title: str, report: Report) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for verdict in report.verdicts:
        if verdict.status != "exact" and _applies(report, verdict):
            by_reason.setdefault(" ".join(verdict.reason.split()), []).append(verdict.layout)
    found = [f"- {', '.join(names)}: {reason.replace('<', '&lt;')}" for reason, names in by_reason.items()]
    return [f"{title}", "", *found, ""] if found else []


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="titles or model types")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="architectures at once")
    parser.add_argument("--json", type=Path, help="keep all that is found in this file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Try, then write or print the page; returns the exit code."""
    asked = _arguments(arguments)
    chosen = [one for one in ARCHITECTURES if not asked.names or {one.title, one.model_type} & set(asked.names)]
    layouts = asked.layouts.split(",")
    reports = survey(chosen, layouts, asked.jobs, Known(asked.json))
    page = render(reports, layouts)
    if asked.names or layouts != LAYOUTS:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8", newline="\n")
    return 0 if all(report.passed for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
