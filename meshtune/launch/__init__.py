"""Launch: start the ranks of a run. Several machines are started by torchrun, Slurm or Kubernetes, whose world a run joins."""

from meshtune.launch.local import launch

__all__ = ["launch"]
