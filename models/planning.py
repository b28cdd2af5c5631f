"""The policy of a run, planned for a budget of device memory."""

from __future__ import annotations

import dataclasses

import jaxoff
from models import policy_text
from models.errors import InputError
from models.program import Program


def profile_of(device: str) -> jaxoff.Device:
    """The profile that --device names.

    Raises:
      InputError: if there is none.
    """
    try:
        return jaxoff.Device.of(device)
    except (ValueError, OSError) as error:
        raise InputError(f"--device: {error}") from None


def plan_within(
    device_gb: float, program: Program, device: jaxoff.Device | None = None, *, compiled: bool
) -> tuple[jaxoff.Plan, Program]:
    """The plan for a budget of memory of each device in GB, 10^9 bytes, and the program under its policy.

    Args:
      device_gb: the budget.
      program: under any policy.
      device: what to plan for, as for `jaxoff.plan`.
      compiled: whether the plan is checked by the compiled step, which the program then has.

    Raises:
      InputError: if nothing fits.
    """
    under: dict[str, Program] = {}

    def planned(policy: jaxoff.Policy | jaxoff.FirstLayers) -> Program:
        text = policy_text.render(policy)
        if text not in under:
            options = dataclasses.replace(program.options, policy=text)
            under[text] = type(program)(options, policy_text.parse(text))
        return under[text]

    check = (lambda policy: planned(policy).compiled_step) if compiled else None
    try:
        plan = program.plan(device_gb * 1e9, check, device)
    except ValueError as error:
        raise InputError(f"--device-gb {device_gb:g}: {error}") from None
    return plan, planned(plan.policy)
