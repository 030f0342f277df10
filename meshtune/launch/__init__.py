"""Launch: start the ranks of a run on this machine. A run on several joins the world that torchrun has started."""

from meshtune.launch.local import launch

__all__ = ["launch"]
