"""Attention that keeps the documents of a packed row apart, through transformers' attention interface.

One causal scaled-dot-product attention per document: nothing is computed across documents and no mask is built. It is also
where a sequence that is cut over context-parallel ranks comes together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from meshtune.models.context_attention import attend_over_ranks
from meshtune.models.documents import current_row
from meshtune.models.scores import Scores, attend_in_documents

DOCUMENT_ATTENTION = "meshtune_documents"


@torch.compiler.disable
def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention per document.

    query [B, heads, T, head_dim], key and value [B, kv_heads, T, head_dim]; returns ([B, T, heads, head_dim], None). B is 1 if
    documents are open. What else a model hands over is left alone: proofs.py finds out whether it mattered.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scores = Scores(scaling, dropout if module.training else 0.0, softcap, s_aux, sliding_window, causal)
    row = current_row()
    if row.context is not None:
        output = attend_over_ranks(query, key, value, scores, row.context, row.lengths)
    else:
        output = attend_in_documents(query, key, value, scores, row.lengths)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(DOCUMENT_ATTENTION, document_attention)
AttentionMaskInterface.register(DOCUMENT_ATTENTION, lambda *_args, **_kwargs: None)
