"""The models of `hf-specdec bench`: every `--model` at every `--widen` in every `--dtype`."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from transformers import logging

from hf_specdec.loading import embedded
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model, pick_device
from hf_specdec.tools.bench.widen import read_size
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.models import device_arguments
from hf_specdec.tools.command_errors import note

NATIVE = "native"


@dataclass(frozen=True, slots=True)
class ModelsOptions:
    """Models to measure, and their device."""

    model: Annotated[
        list[str] | None, typer.Option(help="Folder or hub name; repeat for more. Default: the embedded target.")
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            "--assistant-model",
            help="Draft model of the rows draft_model, auto+draft_model and transformers:assistant. Default: the "
            "embedded draft, for the embedded target.",
        ),
    ] = None
    head: Annotated[
        str | None,
        typer.Option(
            help="Draft head of the rows eagle3, dflash and auto+head, widened with its model. Default: the embedded "
            "head, for the embedded target."
        ),
    ] = None
    widen: Annotated[
        list[str] | None,
        typer.Option(
            help="HIDDENxLAYERS: measure each model widened to this size, its function unchanged; native is its own "
            "size. Repeat for more. Default: native."
        ),
    ] = None
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision: auto, fp32, bf16, fp16, fp8, int8, nf4; repeat for more. Default: fp32 for the embedded "
            "target, else auto."
        ),
    ] = None
    draft_dtype: options.AssistantDtype = None
    attn_implementation: options.AttnImplementation = None
    device: Annotated[str | None, typer.Option(help="Where it runs. Default: the accelerator, or cpu.")] = None
    device_map: Annotated[
        str | None, typer.Option(help=f"Where the target goes: {options.DEVICE_MAPS}. Default: --device.")
    ] = None
    max_memory: options.MaxMemory = None
    offload_folder: options.OffloadFolder = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: 1 on a CPU.")] = None

    @property
    def paths(self) -> list[str | None]:
        """Folders and hub names, each once; `None` is the embedded target."""
        return [*dict.fromkeys(self.model or ())] or [None]

    @property
    def sizes(self) -> list[tuple[int, int] | None]:
        """Sizes that models are widened to, each once; `None` is their own size."""
        return list(dict.fromkeys(None if size == NATIVE else read_size(size) for size in self.widen or [NATIVE]))

    @property
    def dtypes(self) -> list[str | None]:
        """Precisions, each once; `None` is the model's own."""
        return [*dict.fromkeys(self.dtype or ())] or [None]

    @property
    def placement(self) -> dict[str, Any] | None:
        """Arguments of `from_pretrained` that place the target; `None` without `--device-map`."""
        return device_arguments(self.device_map, self.max_memory, self.offload_folder) or None

    def pick_device(self) -> torch.device:
        """Pick the device, set the threads, and show no bars while weights are read.

        Raises:
            ConfigError: the device or the attention is none.
        """
        logging.disable_progress_bar()
        where = pick_device(self.device)
        if self.threads is not None or where.type == "cpu":
            torch.set_num_threads(self.threads or 1)
        return where

    def load(self) -> list[LoadedModel]:
        """Every model at every size and precision."""
        sizes, where = self.sizes, self.pick_device()
        return [self._load(*one, where) for one in itertools.product(self.paths, sizes, self.dtypes)]

    def _load(
        self, path: str | None, size: tuple[int, int] | None, dtype: str | None, where: torch.device
    ) -> LoadedModel:
        placement = self.placement
        loaded = load_model(
            path,
            dtype=dtype,
            device=where if placement is None else self.device,
            assistant=self.draft_model,
            assistant_dtype=self.draft_dtype,
            head=embedded.path("head") if path is None and self.head is None else self.head,
            widen_to=size,
            attn_implementation=self.attn_implementation,
            placement=placement,
        )
        if size is not None:
            of = f"{loaded.name}: " if len(self.paths) > 1 else ""
            difference = loaded.facts["widening"]["largest_logit_difference"]
            note(f"{of}widened to {size[0]}x{size[1]}: largest difference of the logits {difference:.1e}", "dim")
        if len(self.dtypes) > 1:
            loaded.facts["precision"] = dtype
        return loaded
