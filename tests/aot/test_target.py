"""Compiling for GPUs that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxoff
import pallas_kernels
from jaxoff._compiled.verify import verify
from jaxoff._device.profile import Device
from jaxoff._device.target import target
from tests.aot.programs import BOTH, arguments, scanned, step

pytestmark = pytest.mark.aot


def double(x, times=2, *, shift=0.0):
    return jnp.sin(x) * times + shift


def test_a_target_knows_its_gpu():
    h200 = target()
    assert (h200.name, h200.devices, h200.device_kind, h200.num_cores) == ("h200", 1, "NVIDIA H200", 132)
    assert "gpu_device_info" not in repr(h200)
    h100 = target("h100")
    assert (h100.name, h100.device_kind, h100.num_cores) == ("h100", "NVIDIA H100 80GB HBM3", 132)
    assert [d.device_kind for d in target("h200", 4).topology.devices] == ["NVIDIA H200"] * 4


@pytest.mark.parametrize(
    ("name", "kind", "cores", "major"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", 108, "8"),
        ("b200", "NVIDIA B200", 148, "10"),
        ("h100-pcie", "NVIDIA H100 PCIe", 114, "9"),
    ],
)
def test_cards_by_their_numbers_compile_and_have_a_profile_of_the_name(name, kind, cores, major):
    gpu = target(name)
    assert (gpu.device_kind, gpu.num_cores) == (kind, cores)
    assert f"major: {major}\n" in gpu.description
    assert Device.of(name).name == kind
    x = jax.ShapeDtypeStruct((512, 512), "bfloat16")
    compiled = gpu.compile(lambda x: jnp.tanh(x @ x) @ x, x)
    assert compiled.memory_analysis().argument_size_in_bytes == x.size * 2


def test_functions_and_jitted_functions_compile_with_all_kinds_of_arguments():
    x = np.ones((8, 128), np.float32)
    h200 = target()
    for gpu, fun in ((h200, double), (target("h100"), jax.jit(double, static_argnames="times"))):
        program = gpu.compile(fun, x, shift=jax.ShapeDtypeStruct((8, 128), jnp.float32))
        (device,) = program.output_shardings.device_set
        assert device.platform == "gpu" and program.as_text().startswith("HloModule")
    assert "constant(7)" in h200.compile(jax.jit(double, static_argnums=1), x, 7).as_text()


def test_the_options_of_jit_and_of_compile_both_count():
    def flags(fun, **options):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such"
        ) as raised:
            target().compile(fun, jnp.ones(8), compiler_options=options)
        return str(raised.value)

    assert "xla_no_such_a" in flags(jax.jit(jnp.sin, compiler_options={"xla_no_such_a": True}))
    assert "xla_no_such_b" in flags(jnp.sin, xla_no_such_b=True)


def test_an_argument_without_arrays_names_no_device():
    with pytest.raises(ValueError, match="got no array among them"):
        target().lower(lambda: jnp.ones(3))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_arrays_keep_their_partition(axis_type):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices to shard an array")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    rows = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, PartitionSpec("data")))
    placed, other, number = target("h200", 4).place((rows, jnp.ones(3, jnp.bfloat16), 5))
    assert number == 5
    assert placed.sharding.spec == PartitionSpec("data")
    assert placed.sharding.mesh.axis_types == (axis_type,) * 2
    assert (other.shape, other.dtype, other.sharding.spec) == ((3,), jnp.bfloat16, PartitionSpec())
    assert other.sharding.mesh == placed.sharding.mesh
    assert {d.device_kind for d in placed.sharding.device_set} == {"NVIDIA H200"}
    program = target("h200", 4).compile(lambda x, y: x * 2 + y[0], rows, jnp.ones(3))
    assert "num_partitions=4" in program.as_text()


def test_a_mesh_has_as_many_devices_as_the_target():
    with pytest.raises(ValueError, match=r"got \(2, 3\) = 6 devices and a target of 4.*devices=6"):
        target("h200", 4).mesh((2, 3), ("a", "b"))


def test_code_that_depends_on_the_device_takes_the_gpus_path():
    seen = []

    def look(x):
        seen.append(jax.sharding.get_abstract_mesh())
        return x * 2

    h200 = target("h200", 2)
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    h200.lower(look, x)
    with jax.set_mesh(h200.mesh()):
        h200.lower(look, x)
    assert [mesh.abstract_device.device_kind for mesh in seen] == ["NVIDIA H200"] * 2
    assert [mesh.axis_names for mesh in seen] == [(), ("devices",)]
    assert jax.sharding.get_abstract_mesh().abstract_device is None


def test_the_grouped_mlps_kernel_is_compiled_for_the_target():
    shapes = {"x": (1024, 256), "w1": (4, 256, 512), "w2": (4, 512, 256)}
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes.values()]
    program = target().compile(pallas_kernels.grouped_mlp, *args, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert "mosaic_gpu" in program.as_text()


def test_a_description_of_ones_own(tmp_path):
    text = target().description.replace("core_count: 132", "core_count: 114")
    file = tmp_path / "mine.txtpb"
    file.write_text(text)
    mine = target(file)
    assert (mine.name, mine.num_cores) == (str(file), 114)
    assert verify(mine.compile(step(scanned(BOTH)), *arguments())).d2h_bytes > 0


@pytest.mark.parametrize("kind", [None, "device"])
def test_shardings_of_jit_over_other_devices_are_an_error_with_the_remedy(kind):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"), memory_kind=kind)
    for options in (dict(in_shardings=sharding), dict(out_shardings=sharding)):
        with pytest.raises(ValueError, match=r"give jit shardings over target\.mesh\(axis_shapes"):
            target("h200").compile(jax.jit(lambda x: 2 * x, **options), jnp.ones((8, 8)))
    own = target("h200").mesh((1,), ("data",))
    here = NamedSharding(own, PartitionSpec("data"), memory_kind=kind)
    target("h200").compile(jax.jit(lambda x: 2 * x, in_shardings=here), jnp.ones((8, 8)))


@pytest.mark.parametrize("kind", ["jit", "policy", "budget"])
def test_callbacks_are_compiled_for_a_gpu_that_is_not_there(kind):
    """JAX asks for the GPU's client, which a compilation ahead of time does not need."""

    def layer(x, w):
        jax.debug.print("{}", x.sum())
        return x + jnp.tanh(jaxoff.name(x, "x") @ w), None

    def loss(w, x):
        policy = jaxoff.policy(offload=["x"]) if kind == "policy" else None
        out, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)
        value = jnp.square(out).mean()
        return value + jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), value.dtype), 1.0)

    options = {"device_bytes": "1GB"} if kind == "budget" else {}
    jitted = jax.jit(jax.grad(loss)) if kind == "jit" else jaxoff.jit(jax.grad(loss), **options)
    args = jax.ShapeDtypeStruct((3, 512, 512), "float32"), jax.ShapeDtypeStruct((4096, 512), "float32")
    compiled = target().compile(jitted, *args)
    assert "xla_ffi_python_gpu_callback" in compiled.as_text()
    if kind == "policy":
        assert verify(compiled).host_bytes >= 3 * 4096 * 512 * 4
