"""What can be wrong with a machine, as opposed to a call (`ContractError`)."""


class DeviceError(RuntimeError):
    """A device op cannot run here: no CuPy, no driver, no GPU, no compiler, or a build that failed."""
