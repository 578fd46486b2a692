"""flashspec's rows. Its `generate` takes no attention mask, so batches are of prompts of one length."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
from transformers import AutoModelForCausalLM


class Library:
    """A model for which each call builds the engine of its row; with `is_kept` the row's first call."""

    def __init__(self, setup: dict[str, Any]) -> None:
        logging.disable(logging.CRITICAL)
        self.setup, self.dtype = setup, getattr(torch, setup["dtype"])
        self.device, self._kept = torch.device(setup["device"]), ("", None)
        self.model = self._load(setup["model"])
        self.draft = None if setup["draft"] is None else self._load(setup["draft"])

    def _load(self, folder: str) -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
        return loaded.to(self.device).eval()

    @contextmanager
    def decoder(self, call: dict[str, Any]) -> Iterator[Callable[[list[torch.Tensor]], list[list[int]]]]:
        """The decoding function of a call's row."""
        chosen = call["sampling"] or {"temperature": 0.0}
        sampling = SamplingConfig(**chosen, seed=call["seed"], **call["options"])
        where: dict[str, Any] = {"device": str(self.device), "dtype": self.setup["dtype"], "sampling": sampling}
        if call["row"] == "lookup":
            drafters: list[Any] = [NgramDrafter()]
            config = FlashSpecConfig(drafter_strategy="bandit", bandit=BanditConfig(n_arms=1), **where)
        else:
            named = self.setup["draft"]
            drafters = [
                HuggingFaceDrafter(named, self.device, self.dtype, temperature=sampling.temperature, model=self.draft)
            ]
            config = FlashSpecConfig(**where)
        row = f"{call['row']} {config}" if call.get("is_kept") else ""
        engine: Any = self._kept[1] if row and row == self._kept[0] else None
        if engine is None:
            engine = SpeculativeEngine(config, drafters, TargetModel("", self.device, self.dtype, model=self.model))
            self._kept = row, engine if row else None

        def decode(ids: list[torch.Tensor]) -> list[list[int]]:
            if len({row.shape for row in ids}) > 1:
                raise ValueError("generate takes no attention mask for prompts of different lengths")
            found = engine.generate(torch.cat(ids), call["max_new_tokens"], self.setup["eos"]).output_ids
            return [[token for token in row if token >= 0] for row in found.tolist()]

        yield decode
