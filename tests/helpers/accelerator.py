"""The CPU as an accelerator: inputs are copied there, and what is read is brought by a transfer."""

import pytest

from hf_specdec.common import transfer
from hf_specdec.engine.sampling import noise_ahead, sampler
from hf_specdec.forward.target import compiled_forward
from hf_specdec.methods.common import node_logits

__all__ = ["emulate"]


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no device be the host's own."""
    for module in (transfer, compiled_forward, node_logits, noise_ahead, sampler):
        monkeypatch.setattr(module, "is_host", lambda device: False)
