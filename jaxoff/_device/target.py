"""`target`: compiles for an absent GPU, by XLA's description of the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxoff._jaxpr.jit_functions import add_shardings, compiler_options_of
from jaxoff._jaxpr.lowered import lower_callbacks_for_absent_gpus
from jaxoff._report.near_miss import near_miss
from jaxoff._runtime.flags import remember_options

# Of a description's file in `data/`.
_SUFFIX = ".txtpb"
# Beginnings of JAX's errors for shardings of `jax.jit` over other devices than those of the arguments.
_OTHER_DEVICES = (
    "Received incompatible devices for jitted computation",
    "Memory kinds passed to jax.jit does not match memory kind",
)
# Modules of jax's CUDA plugins.
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@functools.cache
def _describe_topology(description: str, devices: int) -> topologies.TopologyDescription:
    """The topology of GPUs, made once: equal targets have the same devices."""
    return topologies.get_topology_desc(platform="cuda", target_config=description, topology=f"1x1x{devices}")


@dataclasses.dataclass(frozen=True)
class Target:
    """GPUs of a kind to compile for, by XLA's description. See `target`.

    Attributes:
      name: the argument of `target`.
      devices: the number of GPUs.
      device_kind: `jax.Device.device_kind` of such a GPU.
      num_cores: streaming multiprocessors.
      description: XLA's dump about the GPU, as text.
    """

    name: str
    devices: int
    device_kind: str
    num_cores: int
    description: str = dataclasses.field(repr=False)

    @property
    def topology(self) -> topologies.TopologyDescription:
        """The GPUs as jax's topology: programs compile for `topology.devices`, which hold no arrays.

        Raises:
          RuntimeError: where jax could not start its CUDA plugin.
        """
        lower_callbacks_for_absent_gpus()
        try:
            return _describe_topology(self.description, self.devices)
        except NotImplementedError as error:
            raise RuntimeError(
                "jax's CUDA plugin is installed and did not start; jax logged why. On a machine without a "
                "GPU it starts under JAX_PLATFORMS=cpu only: set that before jax is imported."
            ) from error

    def mesh(
        self,
        axis_shapes: Sequence[int] | None = None,
        axis_names: Sequence[str] = ("devices",),
        axis_types: Sequence[AxisType] | None = None,
    ) -> Mesh:
        """A mesh of these GPUs.

        Args:
          axis_shapes: its sizes, whose product is `devices`. None: a single axis of all.
          axis_names: as for `jax.make_mesh`.
          axis_types: as for `jax.make_mesh`. None: automatic axes.

        Raises:
          ValueError: for sizes whose product is not `devices`.
        """
        shapes = (self.devices,) if axis_shapes is None else tuple(axis_shapes)
        if math.prod(shapes) != self.devices:
            raise ValueError(
                f"a mesh has as many devices as its target; got {shapes} = {math.prod(shapes)} devices and a "
                f"target of {self.devices}: jaxoff.target(..., devices={math.prod(shapes)})."
            )
        mesh = topologies.make_mesh(self.topology, shapes, tuple(axis_names))
        return mesh if axis_types is None else Mesh(mesh.devices, tuple(axis_names), tuple(axis_types))

    def place(self, tree: Any) -> Any:
        """The arrays of a pytree as `jax.ShapeDtypeStruct`s on this target.

        Args:
          tree: a pytree of arrays or structs. A leaf with a `NamedSharding` keeps its partition, over a mesh
            of the same axes here; other leaves are replicated. A leaf without a shape is left alone.

        Returns:
          The pytree of structs.

        Raises:
          ValueError: for a mesh of another number of devices than the target's.
        """
        shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty]
        whole = self._like(meshes[0]) if meshes else self.mesh()

        def place_leaf(leaf):
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                return leaf
            sharding = NamedSharding(whole, PartitionSpec())
            given = getattr(leaf, "sharding", None)
            if isinstance(given, NamedSharding) and not given.mesh.empty:
                sharding = NamedSharding(self._like(given.mesh), given.spec)
            weak = getattr(leaf, "weak_type", False)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

        return jax.tree.map(place_leaf, tree)

    def _like(self, mesh: Mesh | AbstractMesh) -> Mesh:
        return self.mesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types)

    @contextlib.contextmanager
    def trace_here(self) -> Iterator[None]:
        """A context in which the abstract device of jax's mesh is this GPU.

        A kernel with a GPU path reads `jax.sharding.get_abstract_mesh().abstract_device` and takes the path.
        The mesh in force keeps its axes.
        """
        device = AbstractDevice(device_kind=self.device_kind, num_cores=self.num_cores, platform="gpu")
        mesh = jax.sharding.get_abstract_mesh()
        told = AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device)
        with jax.sharding.use_abstract_mesh(told):
            yield

    def lower(self, fun: Callable[..., Any], /, *args, **kwargs) -> jax.stages.Lowered:
        """Traces and lowers a function for these GPUs.

        Args:
          fun: a function, or a `jax.jit` function.
          *args, **kwargs: its arguments; arrays and structs are placed as by `place`, structs without a
            sharding by the `in_shardings` of a `jax.jit` function.

        Returns:
          The `jax.stages.Lowered`.

        Raises:
          ValueError: for arguments without any array, and for a function of `jax.jit` with shardings over the
            devices of this process.
        """
        jitted: Any = fun if hasattr(fun, "lower") else jax.jit(fun)
        args, kwargs = self.place((add_shardings(fun, args), kwargs))
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))):
            raise ValueError(
                "a function is compiled for the devices of its arguments; got no array among them: pass at "
                "least one array or jax.ShapeDtypeStruct."
            )
        try:
            with self.trace_here():
                return jitted.lower(*args, **kwargs)
        except ValueError as error:
            if not str(error).startswith(_OTHER_DEVICES):
                raise
            raise ValueError(
                "the shardings given to jit are over devices of this process, and the program is to be "
                "compiled for the target's: give jit shardings over target.mesh(axis_shapes, axis_names), or "
                f"none, with shardings on the arguments instead. JAX says: {error}"
            ) from error

    def compile(
        self,
        fun: Callable[..., Any],
        /,
        *args,
        compiler_options: Mapping[str, Any] | None = None,
        **kwargs,
    ) -> jax.stages.Compiled:
        """Compiles a function for these GPUs. Without a GPU the result can be read, not run.

        XLA picks kernels without timing, so a compilation on the GPU may have other kernels. Read buffers,
        memory spaces, copies and their order.

        Args:
          fun: a function, or a `jax.jit` function.
          *args, **kwargs: its arguments; arrays and structs are placed as by `place`.
          compiler_options: as for `jax.stages.Lowered.compile`, on top of the options of `jax.jit`.

        Returns:
          The `jax.stages.Compiled`, e.g. for `jaxoff.verify`.

        Raises:
          ValueError: for arguments without any array.
        """
        lowered = self.lower(fun, *args, **kwargs)
        compiled = lowered.compile(dict(compiler_options) if compiler_options else None)
        # `jaxoff.jit` chooses its options by then.
        return remember_options(compiled, compiler_options_of(fun) | dict(compiler_options or {}))


def target(name: str | os.PathLike[str] = "h200", devices: int = 1) -> Target:
    """GPUs to compile for on a machine without a GPU, to see where residuals live and how copies run.

    Needs jax's CUDA plugin, `pip install "jax[cuda13]"`, and no GPU or driver. Without a GPU jax starts the
    plugin under JAX_PLATFORMS=cpu only.

    Args:
      name: "h200" or "h100" (SXM), whose descriptions are of cards that were at hand; "a100" (80 GB SXM),
        "b200" or "h100-pcie", by XLA's own numbers of these cards; or the path of a description of another
        GPU. On a machine with the GPU, XLA writes a description for every program compiled under
        `XLA_FLAGS=--xla_dump_to=DIR`: a file whose name ends with `gpu_target_config.pbtxt`.
      devices: the number of GPUs, all of the same host.

    Returns:
      A `Target`.

    Raises:
      ValueError: for an unknown name, for a file without a description, or for less than 1 device.
      TypeError: for a `devices` other than a whole number.
      FileNotFoundError: for a path without a file.
      ModuleNotFoundError: without jax's CUDA plugin.

    Example:
      >>> import jax, jaxoff
      >>> def memory_of(fun, *args):  # needs jax[cuda13], no GPU
      ...     return jaxoff.target("h200").compile(fun, *args).memory_analysis()
    """
    if isinstance(devices, bool) or not isinstance(devices, int):
        raise TypeError(f"devices is how many GPUs to compile for, a whole number; got {devices!r}.")
    if devices < 1:
        raise ValueError(f"devices is how many GPUs to compile for, at least 1; got {devices}.")
    text = _description(name)
    kind = re.search(r'^device_description_str: "([^"]+)"', text, re.MULTILINE)
    cores = re.search(r"^\s*core_count: (\d+)", text, re.MULTILINE)
    if kind is None or cores is None or "gpu_device_info" not in text:
        raise ValueError(
            "a GPU's description is the text that XLA dumps as *gpu_target_config.pbtxt, with "
            f"gpu_device_info, core_count and device_description_str; got {os.fspath(name)!r} without them."
        )
    if not any(importlib.util.find_spec(plugin) for plugin in PLUGINS):
        raise ModuleNotFoundError(
            "jaxoff.target compiles with jax's CUDA plugin, which is not installed. It needs no GPU: "
            "pip install 'jax[cuda13]'."
        )
    return Target(os.fspath(name), devices, kind[1], int(cores[1]), text)


def list_targets() -> list[str]:
    """The names of the GPUs whose descriptions ship with jaxoff."""
    folder = importlib.resources.files("jaxoff._device") / "data"
    return sorted(f.name.removesuffix(_SUFFIX) for f in folder.iterdir() if f.name.endswith(_SUFFIX))


def _description(name: str | os.PathLike[str]) -> str:
    folder, known = importlib.resources.files("jaxoff._device") / "data", list_targets()
    if name in known:
        return (folder / f"{name}{_SUFFIX}").read_text()
    path = os.fspath(name)
    if isinstance(name, str) and not os.path.isfile(path) and os.path.basename(path) == path:
        raise ValueError(
            f"a target is one of {', '.join(known)}, or the path of a GPU's description; got {name!r}."
            + near_miss(name, known)
        )
    return Path(path).read_text()
