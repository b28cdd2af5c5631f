"""The mesh from text, and which processes a run joins."""

import jax
import pytest

from models import processes
from models.errors import InputError
from models.mesh import AXES, MeshShape
from models.processes import Processes


def test_axes_from_text():
    shape = MeshShape.parse("data=2, expert = 2,pipe=2")
    assert shape == MeshShape(data=2, expert=2, pipe=2)
    assert (shape.size, shape.batch, str(shape)) == (8, 4, "data=2,expert=2,pipe=2")
    assert MeshShape.parse("") == MeshShape()
    assert MeshShape.parse(str(MeshShape())) == MeshShape()


def test_a_mesh_has_all_axes_and_each_device_once():
    mesh = MeshShape(data=2, fsdp=2, pipe=2).build()
    assert dict(mesh.shape) == dict(pipe=2, data=2, fsdp=2, context=1, expert=1)
    assert mesh.axis_names == AXES
    assert set(mesh.devices.flat) == set(jax.devices())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor=2", "axis out of pipe, data, fsdp, context, expert.*got 'tensor=2'"),
        ("expart=2", "Did you mean 'expert'"),
        ("data", "got 'data'"),
        ("data=two", "got 'data=two'"),
        ("data=-1", "got 'data=-1'"),
        ("data=0", "at least 1 device, got data=0"),
        ("data=2,data=4", "each axis once, got 'data' twice"),
    ],
)
def test_what_is_no_mesh_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        MeshShape.parse(text)


def test_sizes_that_do_not_make_up_the_devices_are_refused():
    with pytest.raises(InputError, match=r"the number of devices, 8, got data=3,pipe=2 = 6\."):
        MeshShape(data=3, pipe=2).build()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("localhost:1", None, None), "go together"),
        ((None, 2, 0), "go together"),
        (("localhost", 2, 0), "HOST:PORT, got 'localhost'"),
        (("localhost:x", 2, 0), "HOST:PORT"),
        (("localhost:1", 2, 2), "from 0 to --processes - 1 = 1, got 2"),
    ],
)
def test_processes_that_cannot_meet_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        Processes(*given)


@pytest.mark.parametrize(
    ("given", "environment", "joins"),
    [
        ((), {}, None),
        ((), {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ((), {"SLURM_STEP_NUM_TASKS": "2"}, ()),
        ((), {"OMPI_COMM_WORLD_SIZE": "4"}, ()),
        ((), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ((), {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, ()),
        (("localhost:1", 2, 1), {"SLURM_STEP_NUM_TASKS": "2"}, ("localhost:1", 2, 1)),
    ],
)
def test_a_run_joins_the_processes_that_it_has(monkeypatch, given, environment, joins):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: joined.append((args, kwargs)))
    Processes(*given).start(environment)
    seconds = processes.HEARTBEAT_TIMEOUT_S
    timeout = {"heartbeat_timeout_seconds": seconds, "shutdown_timeout_seconds": seconds}
    assert joined == ([] if joins is None else [(joins, timeout)])
