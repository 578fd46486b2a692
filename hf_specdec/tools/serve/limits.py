"""Limits of a request's configuration on a server."""

import dataclasses
from dataclasses import dataclass

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig

STEP_BUDGET = 128  # most tokens a step of one request computes, where the server reserves nothing for its method
MEMORY_BOUNDS = ("max_pool_tokens", "max_recycled", "max_keys")  # a lower one would cut what all requests share
OF_THE_SERVER = ("engine", *MEMORY_BOUNDS)  # next to device lists


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Most that a request may ask for.

    Attributes:
        max_body (`int`): bytes of its body.
        max_prompt_tokens, max_tokens (`int`, *optional*): of its prompt, and of its answer.
        request_timeout (`float`, *optional*): seconds that it may take, waiting too.
    """

    max_body: int = 10_000_000
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    request_timeout: float | None = None


def check_request(config: SpecConfig, reserved: SpecConfig | None) -> None:
    """Raise where a request asks for more than the server allows, or sets what is the server's to set.

    Args:
        config: of the request; what it leaves out is as in `reserved`, where that is for the same method.
        reserved: the configuration that the server was started with, if it was given one. It is the maximum of
            requests for the same method.

    Raises:
        ConfigError: names the field under `spec_config`.
    """
    is_reserved = reserved is not None and type(reserved) is type(config)
    server = reserved if is_reserved and reserved is not None else type(config)()
    for field in dataclasses.fields(config):
        own, limit, name = getattr(config, field.name), getattr(server, field.name), f"spec_config.{field.name}"
        if (field.name in OF_THE_SERVER or field.name in config.device_fields.values()) and own != limit:
            raise ConfigError(name, "must be unset in a request: the server sets it", own, "Leave it out.")
    if is_reserved:
        config.check_within(server, "spec_config")
    most = server.step_budget if is_reserved else STEP_BUDGET
    if config.step_budget > most:
        rule = f"must compute at most {most} tokens a step on this server"
        raise ConfigError("spec_config", rule, config.step_budget, "Ask for shorter drafts or fewer branches.")
