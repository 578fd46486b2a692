"""The toy head: configuration, network, files and entry."""

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from hf_specdec.methods.common.draft_head import PairHead
from hf_specdec.methods.common.entry import HeadKind, Method, Source
from hf_specdec.methods.common.head_files import HeadFiles, write_head
from hf_specdec.methods.draft_model.config import HeadConfig
from hf_specdec.methods.draft_model.method import drafter_of

CACHED = (1, 2, 2)  # heads, key size, value size: it attends to nothing, and every head has a cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShiftConfig(HeadConfig):
    """A head that draws no line between tokens and states."""


class ShiftHead(PairHead):
    methods = ("shift_head", "auto")
    has_window = False

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens, self.num_layers = None, 1
        self.hidden_size = self.target_hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.lm_head = torch.nn.Linear(hidden_size, vocab_size, bias=False)

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers,)

    def cache_shapes(self, stage: int) -> Mapping[int, tuple[int, int, int]]:
        return {0: CACHED}

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Any,
        key_positions: torch.Tensor | None = None,
        stage: int = 0,
    ) -> torch.Tensor:
        heads, size, _ = CACHED
        empty = states.new_zeros((len(states), heads, states.shape[1], size))
        cache.update(empty, empty, 0)
        return embeddings + states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(states)


def is_config(values: Mapping[str, Any]) -> bool:
    return values.get("toy") == "shift"


def load_head(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **hub: Any) -> ShiftHead:
    files = HeadFiles(path, hub)
    values = files.values()
    head = ShiftHead(values["hidden_size"], values["vocab_size"])
    files.fill(head, files.weights(), dtype=dtype)
    return head


def save_head(head: ShiftHead, folder: str | os.PathLike[str]) -> None:
    values = {"toy": "shift", "hidden_size": head.hidden_size, "vocab_size": head.vocab_size}
    write_head(folder, head, values, head.state_dict())


METHOD = Method(
    name="shift_head",
    config_class=ShiftConfig,
    config_arguments=("shift_config",),
    summary="drafts with a toy head",
    make=partial(drafter_of, "shift_head"),
    needs_draft_head=True,
    takes_draft_head=True,
    head=HeadKind(is_config=is_config, load=load_head),
    sources=(Source("shift_head", "shift head", "written by a toy"),),
)
