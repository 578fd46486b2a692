"""Common part of all kinds of drafts while they are trained."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_specdec.errors import ConfigError
from hf_specdec.tools.train.config import Training

AnyTraining = TypeVar("AnyTraining", bound=Training)
Draft = TypeVar("Draft", bound=nn.Module)


class Student(ABC, Generic[AnyTraining, Draft]):
    """A draft of one kind: made for a target, rolled out over its texts, saved and described.

    Args:
        head: a head that is trained on, of `head_class`.

    Attributes:
        layer_ids: hidden states of the target that the draft reads.

    Raises:
        ConfigError: a setting does not fit the target, or `head` is for another one.
        UnsupportedModelError: no draft of this kind goes with the target.
    """

    config_class: ClassVar[type[Training]]
    head_class: ClassVar[type[nn.Module] | None] = None
    head_kind: ClassVar[str] = "None"  # in words
    of_shape: ClassVar[tuple[str, ...]] = ()  # settings of the shape, which a head that is trained on has already
    layer_ids: tuple[int, ...] = ()

    def __init__(self, target: PreTrainedModel, tokenizer: Any, config: AnyTraining, head: Any) -> None:
        self.target, self.tokenizer, self.config, self.head = target, tokenizer, config, head

    @classmethod
    def check_head(cls, head: Any, config: Training) -> None:
        """Check a head that is trained on, if one is given.

        Raises:
            ConfigError: it is of another kind, or a setting would change its shape.
        """
        if head is None:
            return
        if cls.head_class is None or not isinstance(head, cls.head_class):
            remedy = "Load it with hf_specdec.AutoDraftHead, or leave it out for a new one."
            raise ConfigError("head", f"must be {cls.head_kind}", type(head).__name__, remedy)
        for name in cls.of_shape:
            if (value := getattr(config, name)) is not None:
                remedy = "A new head can have any shape."
                raise ConfigError(name, "must be None where a head is trained on", value, remedy)

    @abstractmethod
    def draft(self, work: Path, shards: Sequence[int]) -> Draft:
        """The draft before its first step, in fp32; the tokens of a new EAGLE-3 head are those of these shards."""

    @abstractmethod
    def rollout(self, draft: Draft) -> nn.Module:
        """A module of `(batch) -> Outcome` around it."""

    @abstractmethod
    def save(self, draft: Draft, out: str | os.PathLike[str]) -> None:
        """Write it in the target's precision."""

    @abstractmethod
    def card(self, draft: Draft) -> dict[str, str]:
        """Fields of its model card: `library`, `tags`, `title`, `what`, `use` and `how`."""

    def width(self, draft: Any) -> int:
        """Its hidden_size, which the learning rate goes by."""
        return int(draft.hidden_size)

    def output(self, draft: Any) -> nn.Module | None:
        """The module that gives its logits, if it has one of its own."""
        found: nn.Module | None = draft.lm_head
        return found
