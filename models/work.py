"""How much work a training step is, and what share of the device's peak a run reaches."""

from __future__ import annotations

import dataclasses

from models.config import Config

# Dense bfloat16 products a second, from the data sheets; by JAX's name of the device, since boards with the
# same chip and another power limit have another peak. A device that is not here has no utilization.
PEAK_BF16_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def flops_per_token(config: Config, seq: int) -> int:
    """Counts the operations that a token costs in a training step.

    `6 P + 6 L N H (S + 1)`: two operations a weight, and as many again for each of the two gradients. P are
    the weights of products that one token meets: the active parameters without the embedding, which is looked
    up, and without norms. A causal query meets (S + 1) / 2 keys on average, in two products of N H
    multiplications a key. What a policy computes again is no work that the model needs: it is not counted.

    Args:
      config: of the model.
      seq: length S of a sequence.

    Returns:
      The operations, forward and backward.

    Example:
      >>> from models import Config
      >>> from models.work import flops_per_token
      >>> flops_per_token(Config.preset("nano", num_layers=4, vocab_size=256), seq=4096)
      2892398592

    References:
      Chowdhery et al., PaLM, 2022, appendix B, which counts every key, not only those before the query.
    """
    c, counts = config, config.param_counts()
    heads_read = c.mtp_layers * c.vocab_size * c.d_model  # the one head's weights, a second time
    norms = counts.norms + 5 * c.mtp_layers * c.d_model
    products = counts.active - counts.embedding - norms + heads_read
    layers = c.num_layers + c.mtp_layers
    return 6 * products + 6 * layers * c.num_heads * c.head_dim * (seq + 1)


@dataclasses.dataclass(frozen=True)
class Work:
    """One optimizer step of a run.

    Attributes:
      tokens: of a step.
      flops: operations of a step, see `flops_per_token`.
      peak_flops: of the device, a second; None where it is not known.

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
        """The work of a step of so many tokens on one device."""
        peak = PEAK_BF16_FLOPS.get(device_kind) if config.dtype == "bfloat16" else None
        return cls(tokens, tokens * flops_per_token(config, seq), peak)

    def tokens_per_s(self, time_ms: float) -> float:
        return self.tokens / time_ms * 1e3

    def mfu(self, time_ms: float) -> float | None:
        """The share of the device's peak; None where that is not known."""
        return None if self.peak_flops is None else self.flops / time_ms * 1e3 / self.peak_flops

    def rate(self, time_ms: float) -> str:
        """Speed for a reader."""
        share = self.mfu(time_ms)
        return f"{self.tokens_per_s(time_ms):,.0f} tokens/s" + ("" if share is None else f", MFU {share:.1%}")
