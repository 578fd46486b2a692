"""Every name of transformers that loading needs and that may move, each with its reason.

    Names                       Why
    `get_keys_to_not_convert`   the layers that transformers leaves alone, which a list of one's own replaces
    `Conv1D`                    GPT-2's linear layer, whose weight is transposed
    `GgufConfig`                new in 5.24, which keeps the weights of a GGUF file packed without it

Tried with transformers 5.23 and 5.24.
"""

from typing import Any

import transformers
from transformers.pytorch_utils import Conv1D as Conv1D
from transformers.quantizers.base import get_keys_to_not_convert as get_keys_to_not_convert


def dequantized_gguf() -> dict[str, Any]:
    """Arguments of `from_pretrained` that dequantise a GGUF file, as transformers 5.23 always does."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
