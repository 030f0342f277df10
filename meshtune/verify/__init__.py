"""Prove layouts on a user's own model made small: each one trains as one process does, or it is said where it does not."""
