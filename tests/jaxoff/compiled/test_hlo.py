"""The parser of compiled programs reads back what is written, whatever stands in it."""

import json
import time

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxoff._compiled import hlo
from jaxoff._compiled.hlo import Shape

NAMES = st.from_regex(r"[a-z][a-z0-9_.-]{0,12}", fullmatch=True)
# What may stand in a metadata or a backend configuration, brackets and quotes included.
TEXTS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=20)

ARRAYS = st.builds(
    lambda dtype, dims, has_layout, memory: Shape(
        dtype,
        tuple(dims),
        tuple(reversed(range(len(dims)))) if has_layout else (),
        memory if has_layout else 0,
    ),
    st.sampled_from(["pred", "s4", "s32", "u8", "bf16", "f32", "f8e4m3fn", "c64"]),
    st.lists(st.integers(0, 99), max_size=4),
    st.booleans(),
    st.sampled_from([0, 1, 5]),
)
SHAPES = st.recursive(
    ARRAYS,
    lambda inner: st.builds(lambda parts: Shape("tuple", elements=tuple(parts)), st.lists(inner, max_size=4)),
    max_leaves=8,
)


@given(SHAPES)
def test_shapes_are_read_as_written(shape):
    assert hlo.parse_shape(str(shape)) == shape


@given(SHAPES, st.randoms())
def test_comments_in_shapes_do_not_count(shape, random):
    parts = str(shape).split(", ")
    commented = parts[0] + "".join(f", /*index={random.randint(0, 9)}*/{part}" for part in parts[1:])
    assert hlo.parse_shape(commented) == shape


@pytest.mark.parametrize(
    ("text", "nbytes", "on_host"),
    [
        ("bf16[6,1024]{1,0:T(8,128)(2,1)S(5)}", 12288, True),
        ("f32[]", 4, False),
        ("s4[3]{0:E(4)}", 2, False),
        ("f8e4m3fn[8]{0}", 8, False),
        ("c64[2]{0:S(1)}", 16, False),
        ("pred[5]", 5, False),
        ("token[]", 0, False),
        ("f32[<=8,2]{1,0}", 64, False),
        ("(s32[], (bf16[4]{0:S(5)}, u32[]))", 16, True),
        ("()", 0, False),
    ],
)
def test_bytes_and_memory_of_shapes(text, nbytes, on_host):
    shape = hlo.parse_shape(text)
    assert (shape.nbytes, shape.on_host) == (nbytes, on_host)


@pytest.mark.parametrize("text", ["", "f32", "f32[2", "(f32[2]", "f32[2] f32[3]", "(f32[]) x"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ValueError, match=r"shape|bracket"):
        hlo.parse_shape(text)


@given(st.lists(st.sampled_from(["a", "f(x, y)", '"p,(q"', "{1, [2]}", r'"\"],"', "%z.1"]), max_size=6))
def test_commas_in_brackets_and_strings_do_not_split(parts):
    assert hlo.split_commas(", ".join(parts)) == parts


@st.composite
def computations(draw):
    """Names, operands, attributes and metadata of a computation's instructions."""
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    rows = []
    for at, name in enumerate(names):
        operands = draw(st.lists(st.sampled_from(names[:at]), max_size=7)) if at else []
        op_name, config = draw(TEXTS), draw(st.dictionaries(NAMES, TEXTS, max_size=3))
        rows.append((name, draw(SHAPES), operands, op_name, config))
    return rows


def written(rows, *, percent, shapes, quoted):
    """A computation as XLA writes it under one or another of its printing options."""
    lines, sign = [], "%" if percent else ""
    by_name = {name: shape for name, shape, *_ in rows}
    for at, (name, shape, operands, op_name, config) in enumerate(rows):
        arguments = [(f"{by_name[o]} " if shapes else "") + f"{sign}{o}" for o in operands]
        arguments = [f"/*index={i}*/{a}" if i and i % 5 == 0 else a for i, a in enumerate(arguments)]
        called = f"{'custom-call' if at else 'parameter'}({', '.join(arguments) if at else 0})"
        text = json.dumps(json.dumps(config)) if quoted else json.dumps(config)
        root = "ROOT " if at == len(rows) - 1 else ""
        lines.append(
            f"  {root}{sign}{name} = {shape} {called}, custom_call_target={json.dumps(op_name)}, "
            f"metadata={{op_name={json.dumps(op_name)} stack_frame_id=3}}, backend_config={text}"
        )
    return "\n".join(lines)


@given(computations(), st.booleans(), st.booleans(), st.booleans())
def test_programs_are_read_as_written_under_every_printing_option(rows, percent, shapes, quoted):
    body = written(rows, percent=percent, shapes=shapes, quoted=quoted)
    sign = "%" if percent else ""
    text = f"HloModule m, is_scheduled=true\n\nENTRY {sign}main.1 (p: f32[]) -> f32[] {{\n{body}\n}}\n"
    module = hlo.parse(text)
    assert module.is_scheduled and module.num_partitions == 1
    assert [i.name for i in module.entry.instructions] == [row[0] for row in rows]
    assert module.entry.root.name == rows[-1][0]
    for instruction, (_, shape, operands, _, config) in zip(module.entry.instructions, rows, strict=True):
        assert instruction.shape == shape
        assert list(instruction.operands) == operands
        assert instruction.config == config
        assert [o.name for o in module.entry.operands(instruction)] == operands


TWO = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2])->f32[2]}, num_partitions=4

FileNames
1 "some dir/model.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (p.1: (s32[], f32[2])) -> (s32[], f32[2]) {
  %p.1 = (s32[], f32[2]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %v = f32[2]{0} get-tuple-element(%p.1), index=1, metadata={op_name="v" stack_frame_id=1}
  ROOT %t = (s32[], f32[2]{0}) tuple(%i, %v)
}, execution_thread="other"

%cond (p.2: (s32[], f32[2])) -> pred[] {
  %p.2 = (s32[], f32[2]{0}) parameter(0)
  ROOT %c = pred[] constant(false)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0), metadata={op_name="x" source_file="a.py" source_line=7}
  %zero = s32[] constant(0)
  %init = (s32[], f32[2]{0}) tuple(%zero, %x)
  %while.1 = (s32[], f32[2]{0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %either = f32[2]{0} conditional(%zero, %x, %x), branch_computations={%cond, %body}
  ROOT %out = f32[2]{0} get-tuple-element(%while.1), index=1
}
"""


def test_a_program_with_a_loop():
    module = hlo.parse(TWO)
    assert set(module.computations) == {"body", "cond", "main"}
    assert module.entry.name == "main" and module.num_partitions == 4
    loop = module.entry.by_name["while.1"]
    assert loop.callees == ("cond", "body")
    assert loop.config["known_trip_count"]["n"] == "6"
    assert module.entry.by_name["either"].callees == ("cond", "body")
    body = module.computations["body"]
    assert [i.index for i in body.instructions[:3]] == [0, 0, 1]
    assert body.root.name == "t" and body.parameters[0].name == "p.1"
    assert module.source_line(body.by_name["v"]) == "some dir/model.py:12 (layer)"
    assert module.source_line(module.entry.by_name["x"]) == "a.py:7"
    assert module.source_line(loop) == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "module @jit_f {}",
        TWO.replace("ENTRY ", ""),
        TWO[: TWO.rindex("}")],
        TWO.replace(" = s32[] c", " c"),
    ],
)
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError, match=r"ENTRY computation|instruction is written"):
        hlo.parse(text)


def test_a_compiled_program_is_read_whole():
    def loss(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, w)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((5, 4, 4)), jnp.ones((2, 4))).compile().as_text()
    module = hlo.parse(text)
    assert sum(len(c.instructions) for c in module.computations.values()) == sum(
        line.startswith("  ") and " = " in line for line in text.splitlines()
    )
    trips = []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            assert len(list(computation.operands(instruction))) == len(instruction.operands)
            assert all(name in module.computations for name in instruction.callees)
            assert str(instruction.shape) in instruction.shape_text or instruction.shape.dtype == "tuple"
            trips += [instruction.config["known_trip_count"]["n"]] if instruction.opcode == "while" else []
    assert trips == ["5", "5"]
    lines = {module.source_line(i) for c in module.computations.values() for i in c.instructions}
    assert any("test_hlo.py:" in line and "loss" in line for line in lines)


@pytest.mark.long
def test_megabytes_take_seconds():
    row = (
        "  %fusion.{0} = (bf16[2048,1024]{{1,0}}, f32[8]{{0:S(5)}}) fusion(%p, %p, /*index=5*/%p), "
        'kind=kLoop, calls=%body, metadata={{op_name="jit(f)/while/body/add" stack_frame_id=9}}, '
        'backend_config={{"operation_queue_id":"0","fusion_backend_config":{{"kind":"__triton"}}}}\n'
    )
    rows = "".join(row.format(number) for number in range(30_000))
    text = TWO.replace("  %zero = ", f"  %p = f32[] constant(1)\n{rows}  %zero = ")
    start = time.perf_counter()
    module = hlo.parse(text)
    fusions = [i for i in module.entry.instructions if i.opcode == "fusion"]
    assert sum(fusion.shape.nbytes for fusion in fusions) == 30_000 * (2048 * 1024 * 2 + 8 * 4)
    assert all(fusion.config for fusion in fusions)
    assert len(text) > 7_000_000
    assert time.perf_counter() - start < 20  # 2 on an idle core
