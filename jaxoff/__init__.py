"""Activation offload in JAX: named residuals, placed at trace time, moved to pinned host memory, proven."""

from jaxoff._explain import Report as Report
from jaxoff._explain import explain as explain
from jaxoff._finding import Finding as Finding
from jaxoff._marks import mark_not_offload as mark_not_offload
from jaxoff._marks import mark_offload as mark_offload
from jaxoff._marks import name as name
from jaxoff._policy import Policy as Policy
from jaxoff._presets import policies as policies
from jaxoff._presets import policy as policy
from jaxoff._presets import register as register
from jaxoff._residuals import Residual as Residual
from jaxoff._residuals import residuals as residuals

__version__ = "0.1.0"
