"""dejavuu's rows, by trees: its chains fail under transformers 5.23 and later, whose caches do not crop to a length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dejavuu.core.engine import generate
from dejavuu.core.sampling import Sampler
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter
from loguru import logger

BUDGET, WIDTH = 8, 2  # its defaults


class Library:
    """A model, and the drafters that a row with `history=True` keeps for as long as settings and seed stay."""

    def __init__(self, setup: dict[str, Any]) -> None:
        logger.remove()
        self.setup = setup
        self.backend = HFBackend(setup["model"], setup["device"], setup["dtype"], "sdpa")
        self.model = self.backend._model  # noqa: SLF001  # its only handle
        self._kept: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def decoder(self, call: dict[str, Any]) -> Iterator[Callable[[list[torch.Tensor]], list[list[int]]]]:
        """The decoding function of a call's row."""
        options, sampling = dict(call["options"]), call["sampling"]
        round_ = sampling, call["seed"], call["is_watched"]
        drafter = make_drafter(call["row"])
        if options.pop("history", False):
            if self._kept.get(call["row"], (None,))[0] != round_:
                self._kept[call["row"]] = round_, drafter
            drafter = self._kept[call["row"]][1]
        sampler = None if sampling is None else Sampler(**sampling, seed=call["seed"])
        how = {"budget": BUDGET, "width": WIDTH, "eos": self.setup["eos"][0], "tree": True, "sampler": sampler}

        def decode(ids: list[torch.Tensor]) -> list[list[int]]:
            if len(ids) > 1:
                raise ValueError("generate takes one prompt")
            prompt = ids[0][0].tolist()
            return [generate(self.backend, prompt, call["max_new_tokens"], drafter, **how | options).tokens]

        yield decode
