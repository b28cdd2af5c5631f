"""Policies as text, for a command line: `offload=moe.act,moe.dispatched;save=attn.core`."""

from __future__ import annotations

import re

import jaxoff
from models.errors import InputError, near_miss

KEYS = ("offload", "save", "recompute", "store", "modules", "unmarked", "min_bytes")
_LISTS = ("offload", "save", "recompute", "store", "modules")
_FIRST = "first="
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse(text: str) -> jaxoff.Policy | jaxoff.FirstLayers:
    """Reads the text of a policy.

    Semicolons divide the text into parts. The first part may be a preset's name; every other part is
    `key=value`, with commas between the items of a list: `te_v2`, `te_v2;min_bytes=1MiB`,
    `megatron;modules=core_attn,expert_fc1`, `offload=moe.*;save=attn.core;unmarked=recompute`. Names in
    `store=` are kept in float8. A number of
    first layers and two texts, with bars between, are a `jaxoff.FirstLayers`, e.g.
    `first=8 | te_v2 | offload=moe.act`.

    Args:
      text: text of the policy. Spaces around names do not count.

    Returns:
      A `jaxoff.Policy`, or a `jaxoff.FirstLayers`.

    Raises:
      InputError: a preset, key, module or value is unknown, a key is given twice, or the text is empty; the
        message has a single line.

    Example:
      >>> from models import policy_text
      >>> policy_text.parse("offload=moe.act,moe.dispatched;save=attn.core")
      jaxoff.policy(offload=['moe.act', 'moe.dispatched'], save=['attn.core'])
    """
    if text.strip().startswith(_FIRST):
        return _by_layer(text)
    preset: str | None = None
    given: dict[str, object] = {}
    parts = [part.strip() for part in text.split(";")]
    for position, part in enumerate(part for part in parts if part):
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals and position == 0:
            preset = key
            continue
        if key not in KEYS or not equals:
            raise InputError(
                f"--policy takes a preset ({', '.join(jaxoff.policies())}) or key=value parts between "
                f"semicolons, the keys being {', '.join(KEYS)}; got {part!r}.{near_miss(key, KEYS)}"
            )
        if key in given:
            raise InputError(
                f"--policy takes each key once, got {key!r} twice in {text!r}. Divide names by commas."
            )
        given[key] = _value(key, value)
    if preset is None and not given:
        raise InputError(
            f"--policy takes a preset ({', '.join(jaxoff.policies())}) or text such as 'offload=moe.act', "
            f"got {text!r}."
        )
    try:
        if isinstance(names := given.get("store"), list):
            given["store"] = dict.fromkeys(names, "float8_e4m3fn")
        return jaxoff.policy(preset, **given)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InputError(f"--policy {text!r}: {' '.join(str(error).split())}") from None


def render(policy: jaxoff.Policy | jaxoff.FirstLayers) -> str:
    """Writes a policy as text, from which `parse` makes a policy with the same decisions.

    Args:
      policy: policy from `jaxoff.policy` or `parse`.

    Returns:
      Text with every field spelt out, without the preset's name.

    Raises:
      ValueError: a name contains a delimiter of the text, or the policy is a twin from `Policy.on_device`.
    """
    if isinstance(policy, jaxoff.FirstLayers):
        first, rest = policy.policy, policy.rest
        assert isinstance(first, jaxoff.Policy) and isinstance(rest, jaxoff.Policy)
        return f"{_FIRST}{policy.count}|{render(first)}|{render(rest)}"
    if policy.memory_kind != "pinned_host":
        raise ValueError(f"The text of a policy has no word for memory_kind={policy.memory_kind!r}.")
    parts: list[str] = []
    lists = {key: getattr(policy, key) for key in ("offload", "save", "recompute")}
    for key, names in (lists | {"store": [pattern for pattern, _ in policy.store]}).items():
        for name in names:
            if name != name.strip() or re.search("[,;|]", name):
                raise ValueError(
                    "A name in the text of a policy has no comma, semicolon, bar or outer space, got "
                    f"{name!r}."
                )
        if names:
            parts.append(f"{key}={','.join(names)}")
    parts.append(f"unmarked={policy.unmarked}")
    if policy.min_bytes:
        parts.append(f"min_bytes={policy.min_bytes}")
    return ";".join(parts)


def _by_layer(text: str) -> jaxoff.FirstLayers:
    count, *both = (part.strip() for part in text.split("|"))
    number = count.removeprefix(_FIRST).strip()
    if len(both) != 2 or not re.fullmatch("[0-9]{1,6}", number) or any(b.startswith(_FIRST) for b in both):
        raise InputError(
            "--policy takes a number of first layers with two policies, theirs and that of the others, as in "
            f"'first=8 | te_v2 | offload=moe.act', got {text!r}."
        )
    return jaxoff.FirstLayers(int(number), *map(parse, both))


def _value(key: str, value: str) -> object:
    if key in _LISTS:
        names = [name.strip() for name in value.split(",")]
        if not all(names):
            raise InputError(
                f"--policy takes names divided by commas, got {key}={value!r}, in which one is empty."
            )
        return names
    if key == "min_bytes":
        match = re.fullmatch(r"([0-9]{1,15})\s*([A-Za-z]*)", value)
        if not match or match[2] not in _UNITS:
            raise InputError(
                f"--policy takes min_bytes as a whole number of bytes, KiB, MiB or GiB, such as 512KiB, "
                f"got {value!r}."
            )
        return int(match[1]) * _UNITS[match[2]]
    return value
