"""Activation offload in JAX: named residuals, placed at trace time, copied to pinned host memory, proven.

`name` and the marks tag values, `policy` decides where each value waits for the backward pass, and `jit`
overlaps the copies with compute. `jit(device_bytes=...)` chooses the placements for a budget of memory, and
`plan` shows them beforehand. `explain` reads the
program before its compilation, `verify` the compiled program, `measure` the running program, and `diagnose`
the machine.
"""

from jaxoff._budget.budget_error import BudgetError as BudgetError
from jaxoff._budget.report import PlacedValue as PlacedValue
from jaxoff._budget.report import Plan as Plan
from jaxoff._compiled.facts import CompiledFacts as CompiledFacts
from jaxoff._compiled.facts import HostCopy as HostCopy
from jaxoff._compiled.verify import verify as verify
from jaxoff._device.profile import Device as Device
from jaxoff._device.profile import SharedLink as SharedLink
from jaxoff._device.target import Target as Target
from jaxoff._device.target import target as target
from jaxoff._layers.scan import layers as layers
from jaxoff._layers.scan import scan as scan
from jaxoff._layers.tiled import tiled as tiled
from jaxoff._plan.frontier import Frontier as Frontier
from jaxoff._plan.frontier import frontier as frontier
from jaxoff._plan.plan import plan as plan
from jaxoff._policy.combinators import FirstLayers as FirstLayers
from jaxoff._policy.marks import mark_not_offload as mark_not_offload
from jaxoff._policy.marks import mark_offload as mark_offload
from jaxoff._policy.marks import name as name
from jaxoff._policy.policy import Policy as Policy
from jaxoff._policy.presets import policies as policies
from jaxoff._policy.presets import policy as policy
from jaxoff._policy.presets import register as register
from jaxoff._profile.gpu_trace import CopyTime as CopyTime
from jaxoff._profile.gpu_trace import Event as Event
from jaxoff._profile.gpu_trace import GpuTimes as GpuTimes
from jaxoff._profile.gpu_trace import Trace as Trace
from jaxoff._profile.gpu_trace import read as read_trace
from jaxoff._profile.measure import Measurement as Measurement
from jaxoff._profile.measure import measure as measure
from jaxoff._report.finding import Finding as Finding
from jaxoff._report.finding import FindingCode as FindingCode
from jaxoff._residuals.report import Report as Report
from jaxoff._residuals.report import explain as explain
from jaxoff._residuals.residuals import Residual as Residual
from jaxoff._residuals.residuals import residuals as residuals
from jaxoff._residuals.traffic import Traffic as Traffic
from jaxoff._runtime.doctor import Diagnosis as Diagnosis
from jaxoff._runtime.doctor import diagnose as diagnose
from jaxoff._runtime.environment import Environment as Environment
from jaxoff._runtime.environment import collect as collect_environment
from jaxoff._schedule.filter_jit import filter_jit as filter_jit
from jaxoff._schedule.jit import jit as jit
from jaxoff._schedule.nnx_jit import nnx_jit as nnx_jit

__version__ = "0.1.0"
