"""Forms of a mask that kernels need, kept on the mask: all layers of a forward share one, so each is made once.

It lives as long as the mask tensor and is forgotten when the mask is changed in place. Knows nothing about kernels.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from hf_specdec.compat.attention import version_of

ATTRIBUTE = "_hf_specdec_notes"


@dataclass(slots=True)
class _Notes:
    """Notes on a mask as it was at `version`."""

    version: int
    made: dict[Hashable, torch.Tensor] = field(default_factory=dict)


def prepared(mask: torch.Tensor, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Result of `make`, kept on the mask; made anew where a change of the mask could not be seen."""
    notes = _notes_of(mask)
    if notes is None:
        return make()
    if key not in notes.made:
        notes.made[key] = make()
    return notes.made[key]


def additive(mask: torch.Tensor, dtype: torch.dtype, lowest: float | None = None) -> torch.Tensor:
    """A mask to be added to the scores, from one that is added already or from one of booleans (`True` is seen).

    Args:
        lowest (`float`, *optional*, defaults to the least finite number of `dtype`): what hides a key.
    """
    lowest = torch.finfo(dtype).min if lowest is None else lowest
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)
    return mask.clamp(min=lowest).to(dtype)


def _notes_of(mask: torch.Tensor) -> _Notes | None:
    """The mask's notes, new ones if it has changed; `None` where they cannot be kept."""
    if torch.compiler.is_compiling() or (version := version_of(mask)) is None:
        return None
    notes: _Notes | None = getattr(mask, ATTRIBUTE, None)
    if notes is None or notes.version != version:
        notes = _Notes(version)
        setattr(mask, ATTRIBUTE, notes)
    return notes
