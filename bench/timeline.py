"""Draws what profiles saw on a GPU, one below the other on one scale: kernels, copies, copies that nothing hid.

    python -m bench.timeline stock=DIR jaxoff=DIR --out timeline.png --from 80 --to 120
    python -m bench.timeline stock=DIR jaxoff=DIR --out timeline.png --layer 2

A folder is one that `jax.profiler.trace`, or `jaxoff.measure` with `trace_dir`, left behind. Times count from
the first thing that ran. A layer is what lies between a kernel that runs once in each and its next run: from
the start of run number LAYER of the first kernel that --marker finds; by default that of attention's backward
pass, so that both directions of copies may be seen with `--layer -1` for the last layer of the forward pass.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxoff._trace import Interval, Trace, read, total
