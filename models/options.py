"""The options of a training run, their defaults, and the options that decide the weights."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jaxoff
from models import policy_text
from models.config import Config
from models.data import Corpus
from models.divided import CAPACITY, Layout
from models.errors import InputError, near_miss
from models.mesh import MeshShape

# Defaults of a preset. tiny: a run of about a minute on two cores.
DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": dict(steps=500, batch=16, seq=128, lr=3e-3, warmup=20, eval_every=100, eval_batches=16),
}
DEFAULTS |= {name: dict(batch=1, seq=8192) for name in ("llama3_8b", "llama3_1b")}
OTHERWISE: dict[str, Any] = dict(steps=100, batch=8, seq=4096, lr=3e-4, warmup=10)
# `moe.[di]*` is the experts' input: `moe.in`, or `moe.dispatched` where devices divide the experts.
POLICY = "offload=moe.[di]*,moe.act;save=*.norm_in,attn.qkv,attn.core"


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options of a run.

    Attributes:
      preset, overrides: arguments of `models.Config.preset`.
      policy: text of the policy, see `models.policy_text.parse`.
      data: files and folders; empty for the standard library.
      steps, batch, seq, accum: optimizer steps; sequences a step; bytes a sequence; microbatches a step.
      lr, warmup, weight_decay, clip: settings of AdamW, see `models.optim`.
      seed: seed of the weights and the input's order.
      eval_every, eval_batches: steps between held-out losses, 0 for the last step alone; microbatches in
        each loss.
      mesh, virtual, capacity: sizes of the mesh's axes, "" for a single device; see `models.divided.Layout`.
      checkpoint_every, keep: steps between checkpoints, 0 for the last step alone; number of checkpoints to
        keep, 0 to write none.

    Raises:
      InputError: an option is out of range or contradicts another.
    """

    preset: str = "tiny"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    policy: str = POLICY
    data: tuple[str, ...] = ()
    steps: int = 100
    batch: int = 8
    seq: int = 128
    accum: int = 1
    lr: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 8
    checkpoint_every: int = 100
    keep: int = 2
    mesh: str = ""
    virtual: int = 1
    capacity: float = CAPACITY

    def __post_init__(self):
        for field in ("steps", "batch", "seq", "accum", "eval_batches"):
            if getattr(self, field) < 1:
                raise InputError(f"{_flag(field)} is at least 1, got {getattr(self, field)}.")
        for field in ("warmup", "weight_decay", "seed", "eval_every", "checkpoint_every", "keep"):
            if not getattr(self, field) >= 0:  # also for nan
                raise InputError(f"{_flag(field)} is at least 0, got {getattr(self, field)}.")
        for field in ("lr", "clip", "capacity"):
            if not getattr(self, field) > 0:
                raise InputError(f"{_flag(field)} is greater than 0, got {getattr(self, field)}.")
        for field in ("lr", "weight_decay"):
            if math.isinf(getattr(self, field)):
                raise InputError(f"{_flag(field)} is a finite number, got {getattr(self, field)}.")
        if self.warmup >= self.steps:
            raise InputError(f"--warmup is less than --steps, got {self.warmup} and {self.steps}.")
        if self.batch % self.accum:
            raise InputError(f"--batch is a multiple of --accum, got {self.batch} and {self.accum}.")
        policy, layers = policy_text.parse(self.policy), self.config().num_layers
        if isinstance(policy, jaxoff.FirstLayers) and policy.count > layers:
            raise InputError(f"--policy first={policy.count} is more than the model's {layers} layers.")
        if self.layout is not None:
            self.layout.check(self.config(), self.batch // self.accum, self.accum, self.seq)
        elif self.virtual != 1:
            raise InputError(f"--virtual divides what --mesh divides, got {self.virtual} and no --mesh.")
        if self.seq > (longest := self.config().max_seq_len):
            raise InputError(
                f"--seq is at most the model's max_seq_len, {longest}, got {self.seq}. "
                f"Raise it with --set max_seq_len={self.seq}."
            )

    @classmethod
    def of(cls, preset: str, **given: Any) -> Options:
        """Combines the given options (not None) with the preset's defaults for the rest."""
        defaults = OTHERWISE | DEFAULTS.get(preset, {})
        steps = given.get("steps")
        if steps is not None:
            defaults["warmup"] = min(defaults["warmup"], max(0, steps // 10))
        return cls(preset=preset, **(defaults | {k: v for k, v in given.items() if v is not None}))

    def config(self) -> Config:
        try:
            return Config.preset(self.preset, **self.overrides)
        except (TypeError, ValueError) as error:
            raise InputError(" ".join(str(error).split())) from None

    @property
    def layout(self) -> Layout | None:
        """The division of a step between devices; None on a single device."""
        return Layout(MeshShape.parse(self.mesh), self.virtual, self.capacity) if self.mesh else None

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def identity(self, corpus: Corpus) -> dict[str, Any]:
        """Collects everything that decides the weights, JSON-ready: a resumed run needs an equal identity.

        The policy is left out, since placement changes no bit of a weight. The mesh is left out, too: another
        mesh rounds sums differently and computes the same function.
        """
        same = ("steps", "batch", "seq", "accum", "lr", "warmup", "weight_decay", "clip", "seed")
        return {
            "model": dataclasses.asdict(self.config()),
            "data": corpus.sha256,
            **{field: getattr(self, field) for field in same},
        }


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lists the differences between two identities as 'field was A, is B'."""
    found = []
    for key in dict.fromkeys([*saved, *now]):
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"{key}.{line}" for line in differences(old, new)]
        elif old != new:
            old, new = (
                f"{v[:12]}..." if key == "data" and isinstance(v, str) else repr(v) for v in (old, new)
            )
            found.append(f"{key} was {old}, is {new}")
    return found


def parse_overrides(texts: list[str]) -> dict[str, Any]:
    """Turns ["num_layers=4"] into {"num_layers": 4}, in the types of `Config`'s fields.

    Raises:
      InputError: a field is unknown or given twice, or a value has another type.
    """
    fields = {field.name: field.type for field in dataclasses.fields(Config)}
    overrides: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (side.strip() for side in text.partition("="))
        key = key.replace("-", "_")
        if not equals or key not in fields:
            raise InputError(
                f"--set takes key=value with a key out of {', '.join(fields)}; got {text!r}."
                f"{near_miss(key, fields)}"
            )
        if key in overrides:
            raise InputError(f"--set takes each key once, got {key!r} twice.")
        overrides[key] = _convert(key, value, fields[key])
    return overrides


def _convert(key: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise InputError(f"--set {key} takes true or false, got {value!r}.")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InputError(f"--set {key} takes {what}, got {value!r}.") from None


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
