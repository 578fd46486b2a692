"""Torch's global generators set to a seed, as by `torch.manual_seed`.

That keeps a stack trace for each kind of device that is not here: a millisecond at the depth of a test.
"""

import torch

__all__ = ["seed"]


def seed(number: int) -> None:
    """Set the generators of the devices that are here."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
