"""A mixture-of-experts language model in Flax NNX with named activations, and its training program.

In go a `Config` (the numbers of the model) and a policy of `jaxoff` (which residuals stay on the device, are
offloaded or recomputed). `LM` is the model, `Block` a layer of it, `MoE` the layer's experts; `loss_fn` maps
an `LM` and integer tokens (B, S + 1) to a float32 loss and its metrics. `python -m models.train` maps bytes
of text to a folder with losses, checkpoints and a summary, on a single device or over a mesh.

Invariant: the choice of policy changes time and memory and no bit of a loss, gradient or weight. Each 16-bit
value therefore has its rounding pinned, and each sum a fixed order.
"""

from models.config import Config as Config
from models.lm import LM as LM
from models.lm import Block as Block
from models.lm import loss_fn as loss_fn
from models.moe import MoE as MoE

__all__ = ["LM", "Block", "Config", "MoE", "loss_fn"]
