"""RMSNorm of a few tokens by the compiled core: in fp32 where that is faster, in bf16 and fp16 always.

Torch computes it in eight operations, each of which takes longer to begin than to compute a few tokens. The core rounds
as they do; only the sum of squares is added up in another order.
"""

import torch

from hf_specdec.common.replaced import here
from hf_specdec.compat.modules import LlamaRMSNorm, is_rms_norm
from hf_specdec.kernels import cpu
from hf_specdec.kernels.own_forward import WeightForward, is_readable

LANES = 8  # numbers that the core computes at once; a token has a multiple of them
MOST_NUMBERS = 1 << 18  # of all tokens in fp32: the core computes them in one thread


class NormForward(WeightForward):
    """The forward of a norm that `can_replace` has named."""

    __slots__ = ("epsilon", "size")

    def __init__(self, module: LlamaRMSNorm) -> None:
        super().__init__(module)
        self.epsilon, (self.size,) = module.variance_epsilon, self.shape

    @staticmethod
    def can_replace(module: torch.nn.Module) -> bool:
        """Returns whether the core can compute this norm, by what does not change while a call runs."""
        if not is_rms_norm(module):
            return False
        weight = module.weight
        is_known = is_readable(weight) and weight.dim() == 1
        return is_known and weight.numel() % LANES == 0 and isinstance(module.variance_epsilon, float)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As the module's class has it."""
        count = hidden_states.numel()
        if not count or not self.fits(hidden_states, self.size):
            return self.torchs(hidden_states)
        if self.dtype != torch.float32 or here.recorder is not None:
            return self._norm(hidden_states)
        if count > MOST_NUMBERS:
            return self.torchs(hidden_states)
        trial = cpu.trial("rms_norm", (count // self.size - 1).bit_length(), self.size)
        return trial(lambda: self._norm(hidden_states), lambda: self.torchs(hidden_states), count)

    def _norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm by the core."""
        tokens = hidden_states.contiguous()
        out = torch.empty_like(tokens)
        cpu.core.rms_norm(
            tokens.data_ptr(),
            self.weight.data_ptr(),
            out.data_ptr(),
            tokens.numel() // self.size,
            self.size,
            self.epsilon,
            cpu.KINDS[self.dtype],
        )
        if (open_recorder := here.recorder) is not None:
            open_recorder.core("norm", (tokens, self.weight, out), {"epsilon": self.epsilon})
        return out
