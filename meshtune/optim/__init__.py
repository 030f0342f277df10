"""Optimizers, parameter groups, learning-rate schedules and the gradient norm.

Import from the modules: the sections of a recipe are read without torch.
"""
