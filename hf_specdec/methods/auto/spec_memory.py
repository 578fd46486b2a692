"""Memory of `auto` from call to call: texts, recycled logits, and how far its sources can be trusted.

Bounded, safe to share between threads, and between models of one tokenizer: it can be saved and loaded. Holds token
ids of texts, so treat a saved file as you treat the texts.

    memory = SpecMemory(max_tokens=1_000_000, max_entries=262_144)
    hf_specdec.enable(model, spec_memory=memory)
    memory.save("memory.safetensors")
    memory = SpecMemory.load("memory.safetensors")
"""

import os
from array import array
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hf_specdec.common.files import check_path, replacing
from hf_specdec.errors import ConfigError, first_line
from hf_specdec.methods.auto.adaptive_weights import GREEDY, SAMPLED, AdaptiveWeights
from hf_specdec.methods.auto.recycled_logits import RecycledLogits, Rows
from hf_specdec.methods.common.config import MAX_KEPT, check_positive
from hf_specdec.methods.common.ngram.pool import BOUNDARY, NgramPool

FORMAT = "hf_specdec memory 3"
REMEDY = "Give a file that SpecMemory.save wrote, or begin with SpecMemory()."
KINDS = ("greedy", "sampled")  # of texts, with what was learned of each
TEXTS = ("texts.old", "texts.young")
LEARNED = ("weights", "seen", "expected", "accepted")  # arrays of `AdaptiveWeights`
MOST = 1000.0  # of a file's weights, log odds, gains and counts; what is learned stays far below


class SpecMemory:
    """Memory of earlier calls.

    Args:
        max_tokens (`int`, *optional*, defaults to 1,000,000): bound of the texts, in tokens; the oldest leave first.
        max_entries (`int`, *optional*, defaults to 262,144): bound of the recycled logits, in entries of 140
            bytes; the oldest leave first.

    Raises:
        ConfigError: a bound below 1.
    """

    def __init__(self, max_tokens: int = 1_000_000, max_entries: int = 262_144) -> None:
        check_positive("max_tokens", max_tokens, "The default is 1000000.", most=MAX_KEPT)
        check_positive("max_entries", max_entries, "The default is 262144.", most=MAX_KEPT)
        self.pool = NgramPool(max_tokens)
        self.recycled = RecycledLogits(max_entries)
        self.greedy, self.sampled = AdaptiveWeights(GREEDY), AdaptiveWeights(SAMPLED)

    @property
    def bounds(self) -> tuple[int, int]:
        """Most tokens of text and most recycled entries."""
        return self.pool.max_tokens, self.recycled.max_entries

    def adaptive_weights(self, is_sampled: bool) -> AdaptiveWeights:
        """State learned from greedy, or from sampled texts."""
        return self.sampled if is_sampled else self.greedy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file; calls that use the memory meanwhile go on.

        The file is written next to `path` and then put in its place, so an older file is whole until then.

        Raises:
            OSError: the folder is missing, or cannot be written to.
        """
        check_path("path", path, "a file to write")
        max_tokens, max_entries = map(str, self.bounds)
        content = save(self._tensors(), {"format": FORMAT, "max_tokens": max_tokens, "max_entries": max_entries})
        with replacing(path) as temporary:
            temporary.write_bytes(content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SpecMemory":
        """Read the memory that `save` wrote: with its bounds, and it drafts what that one would have drafted.

        The texts are indexed anew: one million tokens take about two seconds.

        Raises:
            ConfigError: the file is missing or damaged, or is another kind of file.
        """
        check_path("path", path, "a file that SpecMemory.save wrote")
        try:
            with safe_open(os.fspath(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            memory = cls(int(metadata["max_tokens"]), int(metadata["max_entries"]))
            memory._restore(tensors)
        except (OSError, SafetensorError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            rule = f"must be a whole file of a memory ({reason})"
            raise ConfigError("spec_memory", rule, os.fspath(path), REMEDY) from error
        return memory

    def _tensors(self) -> dict[str, Rows]:
        """All contents by their names in a file."""
        tensors = {
            name: np.array(tokens, dtype=np.int32) for name, tokens in zip(TEXTS, self.pool.generations(), strict=True)
        }
        tensors |= {f"recycled.{name}": rows for name, rows in self.recycled.export().items()}
        for kind in KINDS:
            weights: AdaptiveWeights = getattr(self, kind)
            tensors |= {f"{kind}.{name}": np.array(getattr(weights, name)) for name in LEARNED}
            tensors[f"{kind}.gains"] = np.array(weights.gains, dtype=np.float64)
        return tensors

    def _restore(self, tensors: Mapping[str, Rows]) -> None:
        """Fill this empty memory; a `ValueError` says what is wrong with the tensors of a file."""
        for name, empty in self._tensors().items():
            _check_tensor(name, tensors[name], empty)
        self.pool.restore(*(tensors[name].tolist() for name in TEXTS))
        self.recycled.restore({name: tensors[f"recycled.{name}"] for name in self.recycled.export()})
        for kind in KINDS:
            weights: AdaptiveWeights = getattr(self, kind)
            for name in LEARNED:
                values: array[float] = getattr(weights, name)
                values[:] = array(values.typecode, tensors[f"{kind}.{name}"].tolist())
            weights.gains = tensors[f"{kind}.gains"].tolist()
            for place in range(len(weights.factors)):
                weights.correct(place)


def _check_tensor(name: str, rows: Rows, empty: Rows) -> None:
    """Raise unless a tensor has the type and sizes that an empty memory's has, but for a length, and likely values."""
    length = (empty if name.rpartition(".")[2] in LEARNED else rows).shape[:1]
    if rows.dtype != empty.dtype or rows.ndim != empty.ndim or rows.shape != (*length, *empty.shape[1:]):
        raise ValueError(f"{name} is {rows.dtype} of shape {rows.shape}")
    least, most = (-MOST, MOST) if rows.dtype.kind == "f" else (BOUNDARY, np.inf)
    if not ((rows >= least) & (rows <= most)).all():
        raise ValueError(f"{name} has values out of range")
