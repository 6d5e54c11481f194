"""Which device of a group runs which operator of a model (Hierarchical Training)."""

from tf_recsync.placement.graph import Edge, StepGraph, Unit
from tf_recsync.placement.loads import DeviceLoads
from tf_recsync.placement.plan import OperatorPlan
from tf_recsync.placement.resources import Resources

__all__ = ["DeviceLoads", "Edge", "OperatorPlan", "Resources", "StepGraph", "Unit"]
