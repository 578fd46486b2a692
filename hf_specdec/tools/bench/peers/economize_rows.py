"""economize's rows, by `decode`: its `generate` fails under transformers 5.24, which calls the cache `cache`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import economize
import torch
from economize.techniques.draft_model.config import DraftModelConfig
from economize.techniques.hybrid.config import HybridConfig
from economize.techniques.lookup.config import LookupConfig
from transformers import AutoModelForCausalLM

CYCLE_LENGTH = 8  # of its guides' examples 4 to 8; the quicker one on a CPU


class Library:
    """A model to which each call attaches its row's technique; with `is_kept` for all calls of the row."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self._kept: Any = None
        self._row: tuple[str, str] | None = None
        loaded: Any = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=getattr(torch, setup["dtype"]))
        self.model = loaded.to(setup["device"]).eval()

    @contextmanager
    def decoder(self, call: dict[str, Any]) -> Iterator[Callable[[list[torch.Tensor]], list[list[int]]]]:
        """The decoding function of a call's row."""
        options, sampling, selector = {"cycle_length": CYCLE_LENGTH} | call["options"], call["sampling"], None
        if sampling is not None:
            options["verifier"], selector = "rejection", economize.TopPSampler(**sampling, seed=call["seed"])
        row = (call["row"], str(options)) if call.get("is_kept") else None
        if row is None or row != self._row:
            self._detach()
            decoding = economize.DecodeConfig(**options)
            if call["row"] == "eagle3":
                head = economize.read_checkpoint(self.setup["head"])
                self._kept = economize.attach(self.model, head, decoding=decoding, check_teacher=False)
            else:
                self._kept = economize.apply(self.model, self._config(call["row"]), decoding=decoding)
            self._row = row
        wrapped = self._kept
        how = {"selector": selector, "stop": self.setup["eos"]}

        def decode(ids: list[torch.Tensor]) -> list[list[int]]:
            if len(ids) == 1:
                return [wrapped.decode(ids[0], call["max_new_tokens"], **how).tokens.tolist()]
            results = wrapped.decode_batch([row[0] for row in ids], call["max_new_tokens"], **how)
            return [result.tokens.tolist() for result in results]

        try:
            yield decode
        finally:
            if row is None:
                self._detach()

    def _detach(self) -> None:
        if self._kept is not None:
            self._kept.detach()
        self._kept = self._row = None

    def _config(self, row: str) -> Any:
        if row == "lookup":
            return LookupConfig()
        draft = DraftModelConfig(model=self.setup["draft"])
        return draft if row == "draft_model" else HybridConfig(fallback=draft)
