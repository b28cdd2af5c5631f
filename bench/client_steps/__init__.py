"""Whole train steps as users of JAX write them, without a line of jaxoff in the model.

Each builder returns a `ClientStep`: a function of donated state and a batch, and structs of its arguments.
Names are JAX's `checkpoint_name`, policies are JAX's or of jaxoff's registry, optimizers are optax's.
`PROGRAMS` has a program for each style; `PROGRAMS["vit"].build(sizes, attention="xla")` builds its step.
"""

from bench.client_steps.decoder import build_decoder
from bench.client_steps.programs import NAMES, PROGRAMS, TINY, Program
from bench.client_steps.step import ClientStep, Sizes, offload, save
