"""Checkpoints on disk, and the disk they need."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.checkpoints import Checkpoints, check_disk
from models.errors import InputError

# Saves a small step 1, then dies while a large step 2 is being written.
DIES_WHILE_WRITING = """
import os, signal, sys, time
from pathlib import Path
import jax.numpy as jnp
from models.checkpoints import Checkpoints
folder = Path(sys.argv[1])
with Checkpoints(folder, keep=3) as checkpoints:
    checkpoints.save(1, {"w": jnp.full(3, 7.0)}, {"seed": 0})
    checkpoints.wait()
    checkpoints.save(2, {"w": jnp.arange(10_000_000.0)}, {"seed": 0})
    while not list(folder.glob("2.*")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def state():
    params = {
        "layer": {"w": jnp.linspace(0.0, 1.0, 12).reshape(3, 4), "scale": jnp.ones(4, jnp.bfloat16) / 3}
    }
    optimizer = optax.adamw(1e-3).init(params)
    return {"step": jnp.int32(5), "params": params, "optimizer": optimizer}


def test_a_state_comes_back_bit_for_bit(tmp_path: Path, state):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.latest is None
        checkpoints.save(5, state, {"identity": {"lr": 0.1, "model": "tiny"}})
        assert checkpoints.latest == 5
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.latest == 5
        assert checkpoints.run(5) == {"identity": {"lr": 0.1, "model": "tiny"}}
        restored = checkpoints.restore(5, jax.eval_shape(lambda: state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert new.dtype == old.dtype
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


def test_a_saved_state_may_be_donated(tmp_path: Path):
    add = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    x = add(jnp.zeros((512, 512)))
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, {"x": x}, {})
            x = add(x)
        checkpoints.wait()
        for step in range(1, 5):
            restored = checkpoints.restore(step, {"x": jax.ShapeDtypeStruct((512, 512), jnp.float32)})
            np.testing.assert_array_equal(restored["x"], float(step))


def test_only_the_newest_are_kept(tmp_path: Path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 10):
            checkpoints.save(step, {"w": jnp.ones(2)}, {})
        checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "2"]


def test_a_half_written_checkpoint_is_ignored_and_removed(tmp_path: Path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    killed = subprocess.run(
        [sys.executable, "-c", DIES_WHILE_WRITING, str(tmp_path)], env=environment, check=False
    )
    assert killed.returncode == -9
    left = [p.name for p in tmp_path.iterdir()]
    assert any(name.startswith("2.") for name in left)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.latest == 1
        np.testing.assert_array_equal(
            checkpoints.restore(1, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})["w"], 7.0
        )
        checkpoints.save(3, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "3"]


@pytest.mark.parametrize(("free", "fits"), [(299, False), (300, True)])
def test_the_disk_holds_those_kept_and_one_more(tmp_path: Path, free, fits):
    asked = []

    def free_bytes(folder):
        asked.append(folder)
        return free

    if fits:
        check_disk(tmp_path, 100, keep=2, free_bytes=free_bytes)
    else:
        with pytest.raises(
            InputError, match=r"--keep 2 and one being written, need 0\.0 MB on disk, got 0\.0 MB free"
        ):
            check_disk(tmp_path, 100, keep=2, free_bytes=free_bytes)
    assert asked == [tmp_path]


def test_checkpoints_already_there_need_no_more_disk(tmp_path: Path):
    check_disk(tmp_path, 100, keep=2, present=2, free_bytes=lambda folder: 100)
    with pytest.raises(InputError):
        check_disk(tmp_path, 100, keep=2, present=2, free_bytes=lambda folder: 99)


def test_a_run_without_checkpoints_needs_no_disk(tmp_path: Path):
    check_disk(tmp_path, 10**18, keep=0, free_bytes=lambda folder: 0)
    with pytest.raises(InputError, match="or --keep 0, which writes none"):
        check_disk(tmp_path, 10**18, keep=1, free_bytes=lambda folder: 0)


def test_a_folder_yet_to_be_made_is_measured_by_its_parent(tmp_path: Path):
    check_disk(tmp_path / "a" / "b", 1, keep=1)
    with pytest.raises(InputError):
        check_disk(tmp_path / "a" / "b", 10**18, keep=1)
