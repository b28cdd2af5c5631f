"""Texts of lowered programs that hold nothing of where their source stands, and how two of them differ."""

import collections
import difflib
import hashlib
import re
from typing import Any

import jax._src.lib as jax_lib
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

MAX_DIFF_LINES, MAX_WIDTH = 60, 180
_REGION = 2000
_ESCAPES: dict[bytes, bytes] = {b"n": b"\n", b"t": b"\t"}
_STRING = r'"((?:[^"\\]|\\.)*)"'
_KERNEL = re.compile(rf"kernel_hash = {_STRING}, module = {_STRING}")
_OPERATION = re.compile(r"(?:^|= |^\s+)\"?([a-z_]+\.[a-z_.]+|call|return|while)\"?[\s(]")
_NUMBER = re.compile(r"%[\w#:]+")
# The address of the callback of a `custom_partitioning`.
_CALLBACK = re.compile(r'(?<=api_version = 2 : i32), backend_config = "\d+"')
# Mosaic counts the kernels of a process in this name.
_DUMP_NAME = re.compile(r", mosaic_gpu\.dump_basename = \"[^\"]*\"")


def stable_text(lowered: Any) -> str:
    """The StableHLO text of a lowered program.

    A Mosaic kernel is a serialized module with source locations. The text has the kernel's name, the number
    of lines of that module, and a digest of the module without locations. The addresses of callbacks are left
    out.
    """
    return _CALLBACK.sub("", _KERNEL.sub(_kernel, lowered.as_text()))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _kernel(match: re.Match[str]) -> str:
    context = mlir.make_ir_context()
    dialect: Any = getattr(jax_lib, "mosaic_gpu_dialect")  # noqa: B009
    dialect.register_dialect(context)
    context.allow_unregistered_dialects = True  # how Mosaic serializes a dialect of its own
    with context, ir.Location.unknown():
        context.load_all_available_dialects()
        module = ir.Module.parse(_unescaped(match[2]))
        text = _DUMP_NAME.sub("", str(module.operation.get_asm(enable_debug_info=False)))
    name = re.search(r"module @(\w+)", text)
    label = name[1] if name else "kernel"
    return f"kernel = <{label}: {text.count(chr(10))} lines, sha256 {digest(text)}>"


def _unescaped(text: str) -> bytes:
    """The bytes of a string as MLIR writes them."""

    def one(match: Any) -> bytes:
        code: bytes = match[1]
        return bytes([int(code, 16)]) if len(code) == 2 else _ESCAPES.get(code, code)

    return re.sub(rb"\\([0-9A-F]{2}|.)", one, text.encode())


def difference(old: str, new: str) -> str:
    """How two texts differ: operations that are more or fewer, then a unified diff without SSA numbers.

    The diff has the lines from the first difference on, and is cut to a sensible length. Numbers of values
    stay where nothing else differs.
    """
    counts = _operations(new)
    counts.subtract(_operations(old))
    changed = [f"{name} {count:+d}" for name, count in sorted(counts.items()) if count]
    lines = [f"operations: {', '.join(changed) or 'as many of each'}"]
    a, b = _NUMBER.sub("%", old), _NUMBER.sub("%", new)
    if a == b:
        a, b = old, new
    found = list(_unified(a.splitlines(), b.splitlines()))
    lines += [line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}..." for line in found[:MAX_DIFF_LINES]]
    if len(found) > MAX_DIFF_LINES:
        lines.append(f"... {len(found) - MAX_DIFF_LINES} more lines of the diff")
    return "\n".join(lines)


def _operations(text: str) -> collections.Counter[str]:
    found = (_OPERATION.search(line) for line in text.splitlines())
    return collections.Counter(match[1] for match in found if match)


def _unified(a: list[str], b: list[str]) -> Any:
    """A unified diff of the lines between the common start and the common end, or of the first of those."""
    shortest = min(len(a), len(b))
    start = next((i for i in range(shortest) if a[i] != b[i]), shortest)
    end = next((i for i in range(shortest - start) if a[-1 - i] != b[-1 - i]), shortest - start)
    first = max(0, start - 3)
    a = a[first : len(a) - end][:_REGION]
    b = b[first : len(b) - end][:_REGION]
    yield f"from line {first + 1} on:"
    yield from difflib.unified_diff(a, b, "stored", "new", lineterm="", n=3)
