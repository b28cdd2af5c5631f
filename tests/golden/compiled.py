"""Compiled programs as XLA writes their text for a GPU, small and written by hand, for `jaxoff.verify`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

DEVICE, HOST = "bf16[8,4096]{1,0}", "bf16[8,4096]{1,0:S(5)}"
LARGE, LARGE_HOST = "bf16[4096,4096]{1,0}", "bf16[4096,4096]{1,0:S(5)}"
STACK = "bf16[6,8,4096]{2,1,0:S(5)}"
SLICE = "bf16[1,8,4096]{2,1,0}"
CONFIG = 'backend_config={"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"65536"}}'
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
CAPTURED = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"}


@dataclasses.dataclass(frozen=True)
class Memory:
    """XLA's analysis of memory, in bytes."""

    host_temp_size_in_bytes: int = 1 << 20
    temp_size_in_bytes: int = 3 << 20
    argument_size_in_bytes: int = 5 << 20
    output_size_in_bytes: int = 2 << 20
    alias_size_in_bytes: int = 1 << 20


class Stored(jax.stages.Compiled):
    """A compiled program of which the text is known, and no device."""

    def __init__(self, text: str, memory: Memory | None = None):
        self._text, self._memory = text, memory or Memory()

    def as_text(self) -> str:
        return self._text

    def memory_analysis(self) -> Any:
        return self._memory

    @property
    def input_shardings(self) -> Any:
        return ()

    @property
    def output_shardings(self) -> Any:
        return ()


def program(body: str, computations: str = "", parameters=(DEVICE, HOST, STACK, LARGE)) -> str:
    """A program of an entry whose parameters are %d, %h, %s and %l."""
    lines = [
        f"%{n} = {shape} parameter({i})" for i, (n, shape) in enumerate(zip("dhsl", parameters, strict=True))
    ]
    entry = "\n".join(f"  {line.strip()}" for line in [*lines, *body.strip().splitlines()])
    return f"HloModule m, is_scheduled=true\n\n{computations}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"


KERNEL = f"%k (p: f32[]) -> f32[] {{\n  ROOT %p = {DEVICE} parameter(0)\n}}\n"
SEND = (
    f"%send (p: f32[]) -> f32[] {{\n  %q = {DEVICE} parameter(0)\n  ROOT %r = {HOST} copy(%q)\n}}\n"
    f"%fetch (p: f32[]) -> f32[] {{\n  %q = {HOST} parameter(0)\n  ROOT %r = {DEVICE} copy(%q)\n}}\n" + KERNEL
)
SYNCHRONOUS = f"""
    %up = {DEVICE} copy(%h)
    %down = {HOST} copy(%d)
    %again = {HOST} copy(%down)
    %twice = {HOST} copy(%d)
    ROOT %local = {DEVICE} copy(%up)
"""
ASYNCHRONOUS = f"""
    %zero = s32[] constant(0)
    %a = {DEVICE} fusion(%d), kind=kLoop, calls=%k, metadata={{op_name="a" source_file="a.py" source_line=7}}
    %start = ({HOST}, {DEVICE}, u32[]) fusion-start(%a), kind=kLoop, calls=%send
    %b = {DEVICE} fusion(%a), kind=kLoop, calls=%k
    %done = {HOST} fusion-done(%start)
    %c = {DEVICE} fusion(%b), kind=kLoop, calls=%k
    %back = ({DEVICE}, {HOST}, u32[]) copy-start(%done)
    %e = {DEVICE} fusion(%c), kind=kLoop, calls=%k
    %sort = {DEVICE} custom-call(%e), custom_call_target="CUSTOM"
    %f = {DEVICE} fusion(%sort), kind=kLoop, calls=%k
    %back.done = {DEVICE} copy-done(%back)
    ROOT %g = {DEVICE} fusion(%back.done, %f), kind=kLoop, calls=%k
"""
TOUCHED = f"""%f (p: f32[]) -> f32[] {{
  %p0 = {LARGE_HOST} parameter(0)
  %p1 = {LARGE} parameter(1)
  ROOT %sum = {LARGE_HOST} add(%p0, %p1)
}}
"""
TOUCHING = f"""
    %room = {LARGE_HOST} custom-call(), custom_call_target="AllocateBuffer"
    %both = {LARGE_HOST} fusion(%room, %l), kind=kLoop, calls=%f
    %mul.remat = {LARGE} multiply(%l, %l)
    %mul.remat2.1 = {LARGE} multiply(%l, %mul.remat)
    ROOT %call = {LARGE} custom-call(%mul.remat2.1, %both), custom_call_target="kernel"
"""
LOOP = (
    f"""%take (p: f32[]) -> f32[] {{
  %p0 = {STACK} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = {SLICE} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={{1,8,4096}}, CONFIG
}}

%put (p: f32[]) -> f32[] {{
  %p0 = {STACK} parameter(0)
  %p1 = {DEVICE} parameter(1)
  %p2 = s32[] parameter(2)
  %b = {SLICE} bitcast(%p1)
  ROOT %update = {STACK} dynamic-update-slice(%p0, %b, %p2, %p2, %p2), CONFIG
}}

%body (p: f32[]) -> f32[] {{
  %p = (s32[], {DEVICE}, {STACK}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = {DEVICE} get-tuple-element(%p), index=1
  %stack = {STACK} get-tuple-element(%p), index=2
  %kept = ({STACK}, {DEVICE}, u32[]) fusion-start(%stack, %x, %i), kind=kLoop, calls=%put
  %new = {DEVICE} custom-call(%x), custom_call_target="step"
  %sorted = {DEVICE} custom-call(%new), custom_call_target="xla.gpu.ext.cub_sort_keys"
  %last = {DEVICE} fusion(%sorted), kind=kLoop, calls=%k
  %kept.done = {STACK} fusion-done(%kept)
  %read = {SLICE} fusion(%kept.done, %i), kind=kLoop, calls=%take
  %row = {DEVICE} bitcast(%read)
  ROOT %t = (s32[], {DEVICE}, {STACK}) tuple(%i, %last, %kept.done)
}}

%cond (p: f32[]) -> f32[] {{
  ROOT %yes = pred[] constant(true)
}}

"""
    + KERNEL
)
LOOPING = f"""
    %zero = s32[] constant(0)
    %init = (s32[], {DEVICE}, {STACK}) tuple(%zero, %d, %s)
    %loop = (s32[], {DEVICE}, {STACK}) while(%init), condition=%cond, body=%bodyCOUNT
    ROOT %out = {DEVICE} get-tuple-element(%loop), index=1
"""
COUNT = ', backend_config={"known_trip_count":{"n":"6"}}'


def _loop(config: str, count: str) -> str:
    return program(LOOPING.replace("COUNT", count), LOOP.replace(", CONFIG", config))


def _asynchronous(target: str) -> str:
    return program(ASYNCHRONOUS.replace("CUSTOM", target), SEND)


_IN_GRAPHS = {"compiler_options": CONCURRENT | CAPTURED}
COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "synchronous": (program(SYNCHRONOUS), {}),
    "vanished": (program(SYNCHRONOUS), {"expected_host_bytes": 1 << 30}),
    "asynchronous": (_asynchronous("step"), {}),
    "asynchronous in graphs": (_asynchronous("step"), _IN_GRAPHS),
    "asynchronous in cut graphs": (_asynchronous("xla.gpu.ext.cub_sort_keys"), _IN_GRAPHS),
    "kernels": (program(TOUCHING, TOUCHED), {"saved_twin": Stored("", Memory(temp_size_in_bytes=1))}),
    "loop": (_loop(f", {CONFIG}", COUNT), _IN_GRAPHS),
    "loop without counts": (_loop("", ""), {"compiler_options": CONCURRENT}),
}
