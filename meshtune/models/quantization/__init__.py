"""Frozen weights held in few bits, by bitsandbytes or torchao, under adapters that are trained."""
