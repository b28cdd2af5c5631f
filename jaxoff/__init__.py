"""Activation offload in JAX: named residuals, placed at trace time, moved to pinned host memory, proven."""

from jaxoff._cost import Device as Device
from jaxoff._cost import SharedLink as SharedLink
from jaxoff._explain import Report as Report
from jaxoff._explain import explain as explain
from jaxoff._facts import CompiledFacts as CompiledFacts
from jaxoff._facts import HostCopy as HostCopy
from jaxoff._finding import Finding as Finding
from jaxoff._frontier import Frontier as Frontier
from jaxoff._frontier import frontier as frontier
from jaxoff._jit import jit as jit
from jaxoff._marks import mark_not_offload as mark_not_offload
from jaxoff._marks import mark_offload as mark_offload
from jaxoff._marks import name as name
from jaxoff._measure import Measurement as Measurement
from jaxoff._measure import measure as measure
from jaxoff._plan import plan as plan
from jaxoff._planned import BudgetError as BudgetError
from jaxoff._planned import Plan as Plan
from jaxoff._planned import Planned as Planned
from jaxoff._policy import FirstLayers as FirstLayers
from jaxoff._policy import Policy as Policy
from jaxoff._presets import policies as policies
from jaxoff._presets import policy as policy
from jaxoff._presets import register as register
from jaxoff._residuals import Residual as Residual
from jaxoff._residuals import residuals as residuals
from jaxoff._scan import layers as layers
from jaxoff._scan import scan as scan
from jaxoff._target import Target as Target
from jaxoff._target import target as target
from jaxoff._trace import CopyTime as CopyTime
from jaxoff._trace import Event as Event
from jaxoff._trace import GpuTimes as GpuTimes
from jaxoff._trace import Trace as Trace
from jaxoff._trace import read as read_trace
from jaxoff._verify import verify as verify

__version__ = "0.1.0"
