"""What the configuration of a request may ask of a server."""

import dataclasses
from typing import Any

from hf_specdec.errors import ConfigError
from hf_specdec.methods.config import SpecConfig

__all__ = ["STEP_BUDGET", "within_limits"]

STEP_BUDGET = 128  # most tokens a step of one request computes, where the server reserves nothing for its method
MEMORY_BOUNDS = ("max_pool_tokens", "max_recycled", "max_keys")
OF_THE_SERVER = ("engine", "costs")  # beside device lists


def within_limits(config: SpecConfig, reserved: SpecConfig | None) -> SpecConfig:
    """A request's configuration, with what is the server's to set as the server has it.

    Args:
        config: as the request has it.
        reserved: the configuration that the server was started with, if it was given one. It is the maximum of
            requests for the same method.

    Raises:
        ConfigError: it exceeds what the server allows, or sets what is the server's to set.
    """
    is_reserved = reserved is not None and type(reserved) is type(config)
    server = reserved if is_reserved and reserved is not None else type(config)()
    taken: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        own, limit, name = getattr(config, field.name), getattr(server, field.name), f"spec_config.{field.name}"
        is_set = own != field.default
        if field.name in OF_THE_SERVER or field.name in config.device_fields.values():
            if is_set and own != limit:
                raise ConfigError(name, "must be unset in a request: the server sets it", own, "Leave it out.")
            taken[field.name] = limit
        elif field.name in MEMORY_BOUNDS:
            if is_set and own > limit:
                raise ConfigError(name, f"must be at most {limit} on this server", own, "Leave it out.")
            taken[field.name] = min(own, limit)
    if is_reserved:
        config.check_within(server, "spec_config")
    most = server.step_budget if is_reserved else STEP_BUDGET
    if config.step_budget > most:
        rule = f"must compute at most {most} tokens a step on this server"
        raise ConfigError("spec_config", rule, config.step_budget, "Ask for shorter drafts or fewer branches.")
    return dataclasses.replace(config, **taken)
