"""Models: transformers causal LMs, resolved, built on meta, loaded into shards, and exported, never modified."""

from meshtune.models.section import ModelSection

__all__ = ["ModelSection"]
