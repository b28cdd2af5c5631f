"""A mixture-of-experts language model in Flax NNX whose activations bear names."""

from models.config import Config as Config
from models.lm import LM as LM
from models.lm import Block as Block
from models.lm import loss_fn as loss_fn
from models.moe import MoE as MoE

__all__ = ["LM", "Block", "Config", "MoE", "loss_fn"]
