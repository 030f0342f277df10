"""Checkpoints: written beside and renamed when complete, loadable on any layout and number of ranks."""

from meshtune.checkpoint.section import CheckpointSection

__all__ = ["CheckpointSection"]
