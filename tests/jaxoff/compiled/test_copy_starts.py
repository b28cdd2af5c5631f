"""The profile that tells XLA's scheduler when copies may start."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoff._compiled import hlo
from jaxoff._compiled.copy_starts import make_profile

ROW, STACK = "bf16[1,8,4096]{2,1,0}", "bf16[6,8,4096]{2,1,0:S(5)}"
CONFIG = 'backend_config={"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"65536"}}'
STARTED = f"(({STACK}, s32[]), {ROW}, u32[])"
WROTE = f"(({STACK}, bf16[1,1,1]{{2,1,0}}), {STACK}, u32[])"
FUSED = f"""%read (p: f32[]) -> f32[] {{
  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = {ROW} dynamic-slice(%p, %i), dynamic_slice_sizes={{1,8,4096}}, {CONFIG}
}}
%write (q: f32[]) -> f32[] {{
  %q = {STACK} parameter(0)
  %v = bf16[1,1,1]{{2,1,0}} parameter(1)
  ROOT %update = {STACK} dynamic-update-slice(%q, %v)
}}
%kernel (r: f32[]) -> f32[] {{
  ROOT %r = {ROW} parameter(0)
}}
"""


def profile_of(body, *, in_loop=True):
    """Names of the copies, the one with the shortest latency first."""
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    entry = """ENTRY %main (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  ROOT %loop = s32[] while(%a), condition=%kernel, body=%body
}
"""
    text = f"{FUSED}\n%body (s: s32[]) -> s32[] {{\n{lines}\n}}\n\n{entry}"
    if not in_loop:
        text = f"{FUSED}\nENTRY %main (s: s32[]) -> s32[] {{\n{lines}\n}}\n"
    profile = make_profile(hlo.parse(f"HloModule m, is_scheduled=true\n\n{text}"))
    found = re.findall(r'costs \{ name: "([^"]+)" cost_us: ([\d.]+) \}\n', profile)
    assert len(found) == profile.count("\n")
    latencies = {name: float(latency) for name, latency in found}
    assert len(set(latencies.values())) == len(found) and all(us >= 1e6 for us in latencies.values())
    return sorted(latencies, key=lambda name: latencies[name])


RELEASED = f"""
    %one = {STACK} parameter(0)
    %two = {STACK} parameter(1)
    %at = s32[] parameter(2)
    %first = {ROW} fusion(%at), kind=kLoop, calls=%kernel
    %w.one = {WROTE} fusion-start(%one, %first), kind=kLoop, calls=%write
    %w.one.done = {STACK} fusion-done(%w.one)
    %second = {ROW} fusion(%first), kind=kLoop, calls=%kernel
    %w.two = {WROTE} fusion-start(%two, %second), kind=kLoop, calls=%write
    %w.two.done = {STACK} fusion-done(%w.two)
    LAST
    %done.one = {ROW} fusion-done(%copy.one)
    %done.two = {ROW} fusion-done(%copy.two)
    ROOT %end = ({ROW}, {ROW}) tuple(%done.one, %done.two)
"""
READ_ONE = f"%copy.one = {STARTED} fusion-start(%w.one.done, %at), kind=kLoop, calls=%read"
READ_TWO = f"%copy.two = {STARTED} fusion-start(%w.two.done, %at), kind=kLoop, calls=%read"


@pytest.mark.parametrize("reads", [(READ_ONE, READ_TWO), (READ_TWO, READ_ONE)])
def test_the_copy_that_may_start_earlier_has_the_longer_latency(reads):
    assert profile_of(RELEASED.replace("LAST", "\n".join(reads))) == ["copy.two", "copy.one"]


def test_indices_and_barriers_do_not_count_as_work_that_a_copy_waits_for():
    barrier = f"""
        %pair = ({STACK}, {ROW}) tuple(%w.one.done, %second)
        %held = {STACK} get-tuple-element(%pair), index=0
        %late = s32[] fusion(%at), kind=kLoop, calls=%kernel
    """
    early = READ_TWO.replace("%w.two.done, %at", "%two, %late")
    held = READ_ONE.replace("%w.one.done", "%held")
    assert profile_of(RELEASED.replace("LAST", f"{barrier}\n{early}\n{held}")) == ["copy.one", "copy.two"]


def test_the_scheduler_knew_a_renamed_copy_by_another_name():
    renamed = f'{READ_ONE}, metadata={{op_name="f" scheduling_name="copy.7"}}'
    assert profile_of(RELEASED.replace("LAST", f"{renamed}\n{READ_TWO}")) == ["copy.two", "copy.7"]


def test_only_copies_of_loops_that_run_beside_others_are_named():
    body = RELEASED.replace("LAST", f"{READ_ONE}\n{READ_TWO}")
    assert profile_of(body, in_loop=False) == []
    inline = f"%copy.one = {ROW} fusion(%w.one.done, %at), kind=kLoop, calls=%read"
    assert profile_of(body.replace(READ_ONE, inline)) == ["copy.two"]


@given(order=st.permutations(range(5)))
def test_latencies_follow_the_order_of_the_releases(order):
    """However the copies stand in the text: each waits for the kernel of its number."""
    lines = [f"%s = {STACK} parameter(0)", "%at = s32[] parameter(1)"]
    for i in range(5):
        lines += [
            f"%k{i} = {ROW} fusion(%at), kind=kLoop, calls=%kernel",
            f"%w{i} = {STACK} fusion(%s, %k{i}), kind=kLoop, calls=%write",
        ]
    lines += [f"%c{i} = {STARTED} fusion-start(%w{i}, %at), kind=kLoop, calls=%read" for i in order]
    lines += [f"%d{i} = {ROW} fusion-done(%c{i})" for i in order]
    lines += [f"ROOT %end = ({ROW}) tuple(%d0)"]
    assert profile_of("\n".join(lines)) == ["c4", "c3", "c2", "c1", "c0"]
