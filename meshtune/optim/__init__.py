"""Optimizers, parameter groups, learning-rate schedules and the gradient norm."""

from __future__ import annotations

from meshtune.optim.grad_norm import clip_grad_norm_, grad_norm
from meshtune.optim.parameter_groups import parameter_groups
from meshtune.optim.schedule import LRSchedulerSection
from meshtune.optim.section import OptimizerSection

__all__ = ["LRSchedulerSection", "OptimizerSection", "clip_grad_norm_", "grad_norm", "parameter_groups"]
