"""What the server that ranks are forked from imports, and nothing more: no thread may run in it."""

from __future__ import annotations

import gc
import importlib
import os

from meshtune.observe.chatter import hush

_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_MODULES = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.tokenization_utils_tokenizers",
    "meshtune.models.proofs",
    "meshtune.verify.course",
    "meshtune.verify.miniature",
)

for name, value in _SETTINGS.items():
    os.environ.setdefault(name, value)
hush()
for module in _MODULES:
    importlib.import_module(module)
# Ranks collect garbage when they leave a world, and need not walk through all of this each time (nor copy its pages).
gc.collect()
gc.freeze()
