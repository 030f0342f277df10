"""Layout: the axes of a mesh, the views derived from them, and the recipe section that names their sizes."""

from meshtune.layout.axes import AXES, VIEWS
from meshtune.layout.layout import Layout
from meshtune.layout.plan import Group, Plan, Split
from meshtune.layout.section import DistributedSection

__all__ = ["AXES", "VIEWS", "DistributedSection", "Group", "Layout", "Plan", "Split"]
