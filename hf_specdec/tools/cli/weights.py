"""The weights of a model as facts for people: sizes in megabytes, layers of one kind in one line."""

import re
from typing import Any

from hf_specdec.errors import counted
from hf_specdec.kernels.quantization.report import LoadedWeights


def weights_facts(found: LoadedWeights) -> dict[str, Any]:
    """Names and values for a table."""
    facts: dict[str, Any] = {
        "precision": found.precision,
        "parameters": _size(found.parameter_bytes),
        "buffers": _size(found.buffer_bytes),
    }
    for group in found.layers:
        facts[f"{group.kind}, {group.dtype}"] = f"{counted(group.count, 'layer')}, {_size(group.bytes)}"
    for reason in dict.fromkeys(found.left.values()):
        names = [re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name, own in found.left.items() if own == reason]
        facts[f"left: {', '.join(dict.fromkeys(names))}"] = reason
    if found.fp8_backend is not None:
        facts["fp8 backend"] = found.fp8_backend
    if found.error is not None:
        error = found.error
        facts["logit error"] = (
            f"at most {error.max_abs:.3g}, mean KL {error.mean_kl:.3g} nats, the same likeliest token at "
            f"{error.same_argmax:.1%} of {error.num_tokens} positions, against the checkpoint's own precision"
        )
    return facts


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes} bytes"
