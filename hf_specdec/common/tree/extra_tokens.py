"""Tokens that a forward computes next to a draft tree. Knows nothing about trees, models or caches."""

from dataclasses import dataclass

import torch

from hf_specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExtraTokens:
    """Tokens whose logits a drafter wants without drafting them, such as lookahead's window: E of them.

    They stand behind the tree's nodes in the forward, see the text before the root, and never enter the text.

    Attributes:
        tokens (`tuple[int, ...]`): token id of each.
        depths (`tuple[int, ...]`): position id = position of the root + depth.
        visible (`Tensor`): `(E, 1 + E)` bool, on the CPU: entry (i, 0) says that token i sees the root, entry
            (i, 1 + j) that it sees extra token j. Each sees itself.

    Raises:
        ConfigError: the fields do not go together.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    visible: torch.Tensor

    def __post_init__(self) -> None:
        for name, values in (("tokens", self.tokens), ("depths", self.depths)):
            if not isinstance(values, tuple) or len(values) != len(self.tokens):
                rule = "must be a tuple with an entry for each extra token"
                raise ConfigError(f"extra.{name}", rule, values, "Write tuple(values).")
        seen, shape = self.visible, (len(self.tokens), 1 + len(self.tokens))
        is_tensor = isinstance(seen, torch.Tensor)
        if not is_tensor or (seen.shape, seen.dtype, seen.device.type) != (shape, torch.bool, "cpu"):
            shown = f"{seen.dtype} of shape {tuple(seen.shape)} on {seen.device}" if is_tensor else seen
            remedy = "Its first column is the root's, the others are those of the extra tokens."
            raise ConfigError("extra.visible", f"must be a bool tensor of shape {shape} on the CPU", shown, remedy)

    def __len__(self) -> int:
        """Number of tokens E."""
        return len(self.tokens)
