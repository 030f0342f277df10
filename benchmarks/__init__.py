"""Scripts that measure this project beside its peers in one run."""
