"""The work of a training step, and the share of the device's peak reached by a run."""

from __future__ import annotations

import dataclasses

from models.config import Config

# Dense bfloat16 operations a second, from the data sheets, by JAX's name of the device: boards with the same
# chip and another power limit have another peak. For other devices no utilization is printed.
PEAK_BF16_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def flops_per_token(config: Config, seq: int) -> int:
    """Counts the operations of a token in a training step.

    `6 P + 6 L N H (S + 1)`: two operations a weight, and as many for each of the two gradients. P counts the
    weights in a token's products: the active parameters without the embedding, which is looked up, and
    without norms. A causal query meets (S + 1) / 2 keys on average, in two products of N H multiplications a
    key. Recomputation under a policy is not counted.

    Args:
      config: numbers of the model.
      seq: length S of a sequence.

    Returns:
      The operations, forward and backward.

    Example:
      >>> from models import Config
      >>> from models.work import flops_per_token
      >>> flops_per_token(Config.preset("nano", num_layers=4, vocab_size=256), seq=4096)
      2892398592

    References:
      Chowdhery et al., PaLM, 2022, appendix B, which counts all keys, including keys after the query.
    """
    c, counts = config, config.param_counts()
    heads_read = c.mtp_layers * c.vocab_size * c.d_model  # the shared head's weights, a second time
    norms = counts.norms + 5 * c.mtp_layers * c.d_model
    products = counts.active - counts.embedding - norms + heads_read
    layers = c.num_layers + c.mtp_layers
    return 6 * products + 6 * layers * c.num_heads * c.head_dim * (seq + 1)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of an optimizer step.

    Attributes:
      tokens: tokens of a step.
      flops: operations of a step, see `flops_per_token`.
      peak_flops: peak of the device, operations a second; None where unknown.

    Example:
      >>> from models.work import Work
      >>> Work(tokens=1000, flops=10**12, peak_flops=1e14).rate(time_ms=20.0)
      '50,000 tokens/s, MFU 50.0%'
    """

    tokens: int
    flops: int
    peak_flops: float | None

    @classmethod
    def of(cls, config: Config, *, tokens: int, seq: int, device_kind: str) -> Work:
        """Computes the work of a step of `tokens` tokens on a single device."""
        peak = PEAK_BF16_FLOPS.get(device_kind) if config.dtype == "bfloat16" else None
        return cls(tokens, tokens * flops_per_token(config, seq), peak)

    def tokens_per_s(self, time_ms: float) -> float:
        return self.tokens / time_ms * 1e3

    def mfu(self, time_ms: float) -> float | None:
        """Computes the share of the device's peak; None where the peak is unknown."""
        return None if self.peak_flops is None else self.flops / time_ms * 1e3 / self.peak_flops

    def rate(self, time_ms: float) -> str:
        """Describes the speed of a step as text."""
        share = self.mfu(time_ms)
        return f"{self.tokens_per_s(time_ms):,.0f} tokens/s" + ("" if share is None else f", MFU {share:.1%}")
