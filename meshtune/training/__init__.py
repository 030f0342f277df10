"""Training: one optimizer step, the loop around it, what is kept of it, and who is told."""
