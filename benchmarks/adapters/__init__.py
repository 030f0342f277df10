"""LoRA, QLoRA and full fine-tuning beside TRL's SFTTrainer with PEFT: the same rows, the same model, the same adapter."""
