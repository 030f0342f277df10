"""Other libraries' chatter, which would bury what a run says itself."""

from __future__ import annotations

import os
import warnings

from meshtune.observe.chatter import hush


def quiet() -> None:
    """Errors only from transformers, unless TRANSFORMERS_VERBOSITY says otherwise; no progress bars for loading; of the libraries
    that it imports nothing that no user can act on."""
    hush()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    warnings.filterwarnings("ignore", category=FutureWarning)
    from transformers.utils import logging

    logging.disable_progress_bar()
