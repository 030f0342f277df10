"""Losses: pure functions that return the sum over supervised tokens; the caller divides by their count."""

from __future__ import annotations

from meshtune.losses.linear_cross_entropy import VocabularyPart, default_chunk_size, linear_cross_entropy, token_scores

__all__ = ["VocabularyPart", "default_chunk_size", "linear_cross_entropy", "token_scores"]
