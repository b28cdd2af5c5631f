"""Plans the policy of a run for a budget of device memory."""

from __future__ import annotations

import dataclasses

import jaxoff
from models import policy_text
from models.errors import InputError
from models.program import Program


def profile_of(device: str) -> jaxoff.Device:
    """Reads the profile named by --device.

    Raises:
      InputError: the profile is unknown or unreadable.
    """
    try:
        return jaxoff.Device.of(device)
    except (ValueError, OSError) as error:
        raise InputError(f"--device: {error}") from None


def plan_within(
    device_gb: float, program: Program, device: jaxoff.Device | None = None, *, compiled: bool
) -> tuple[jaxoff.Plan, Program]:
    """Plans a policy for a budget of memory of each device, and makes the program under the policy.

    Args:
      device_gb: budget of each device in GB, 10^9 bytes.
      program: the run's program, under any policy.
      device: profile to plan for, as in `jaxoff.plan`.
      compiled: whether compiled steps check the plan; the returned program then holds its compiled step.

    Raises:
      InputError: no policy fits the budget.
    """
    under: dict[str, Program] = {}

    def program_under(policy: jaxoff.Policy | jaxoff.FirstLayers) -> Program:
        text = policy_text.render(policy)
        if text not in under:
            options = dataclasses.replace(program.options, policy=text)
            under[text] = type(program)(options, policy_text.parse(text))
        return under[text]

    check = (lambda policy: program_under(policy).compiled_step) if compiled else None
    try:
        plan = program.plan(device_gb * 1e9, check, device)
    except ValueError as error:
        raise InputError(f"--device-gb {device_gb:g}: {error}") from None
    return plan, program_under(plan.policy)
