"""xformers' memory-efficient attention as a kernel. The only room that imports xformers, at its first use."""

import importlib.util
import logging
from typing import Any

import torch

from hf_specdec.errors import MissingExtraError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ALIGNMENT_BYTES = 16  # of a head: 8 half or 4 single precision numbers


def check_installed() -> None:
    """Raise where xformers is not installed.

    Raises:
        MissingExtraError: with the line that installs it.
    """
    if importlib.util.find_spec("xformers") is None:
        raise MissingExtraError("xformers", "xformers", 'attn_implementation="xformers"')


class XformersKernel:
    """xformers picks the operator: FlashAttention without a bias, CUTLASS with one."""

    def __init__(self) -> None:
        self._fmha: Any = None

    def reason_against(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
        """Reason that is known without asking xformers, which composes a long message each time."""
        if query.device.type != "cuda":
            return f"xformers has no kernel for {query.device.type}"
        if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
            return f"xformers has no kernel for {query.dtype}".replace("torch.", "")
        step = ALIGNMENT_BYTES // query.dtype.itemsize
        for size in (query.shape[-1], value.shape[-1]):
            if size % step:
                return f"xformers' kernels need head dimensions that are multiples of {step}, not {size}"
        return None

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`. CUTLASS pads the log-sum-exp to a multiple of 32 queries."""
        if self._fmha is None:
            self._fmha = _import()
        output, lse = self._fmha.memory_efficient_attention_forward_requires_grad(
            query, key, value, attn_bias=bias, scale=scale
        )
        return output, lse[..., : query.shape[1]]


def _import() -> Any:
    """`xformers.ops.fmha`, ready for the torch that is here.

    Its wheel is built for one CUDA version. On another torch its own binary does not load, and every operator then
    refuses because xformers "wasn't built with CUDA". Those used here are torch's own
    (`aten::_flash_attention_forward`, `aten::_efficient_attention_forward`) and need nothing of that binary, so the
    refusal is lifted and the import's warning about it left out.
    """
    check_installed()
    logger = logging.getLogger("xformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha import common
    finally:
        logger.setLevel(before)
    if torch.version.cuda is not None:
        setattr(common, "_built_with_cuda", True)  # noqa: B010
    return fmha
