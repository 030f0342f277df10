"""Supervised fine-tuning beside transformers' Trainer, TRL's SFTTrainer and a bare loop: the same rows, the same model."""
