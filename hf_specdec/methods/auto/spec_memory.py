"""Memory of `auto` from call to call: texts, recycled logits, and how far its sources can be trusted.

Bounded, safe to share between threads, and between models of one tokenizer: it can be saved and loaded. Holds token
ids of texts, so treat a saved file as you treat the texts.

    memory = SpecMemory(max_tokens=1_000_000, max_entries=262_144)
    hf_specdec.enable(model, spec_memory=memory)
    memory.save("memory.safetensors")
    memory = SpecMemory.load("memory.safetensors")
"""

import copy
import os

from hf_specdec.errors import ConfigError
from hf_specdec.methods.auto.adaptive_weights import GREEDY, SAMPLED, AdaptiveWeights
from hf_specdec.methods.auto.memory_file import MemoryFile
from hf_specdec.methods.auto.recycled_logits import RecycledLogits
from hf_specdec.methods.common.config import MAX_KEPT, check_positive
from hf_specdec.methods.common.ngram.pool import NgramPool


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
        _check_bounds(max_tokens, max_entries)
        self.pool = NgramPool(max_tokens)
        self.recycled = RecycledLogits(max_entries)
        self.greedy, self.sampled = AdaptiveWeights(GREEDY), AdaptiveWeights(SAMPLED)

    @property
    def bounds(self) -> tuple[int, int]:
        """Most tokens of text and most recycled entries."""
        return self.pool.max_tokens, self.recycled.max_entries

    def resize(self, max_tokens: int, max_entries: int) -> None:
        """Change the bounds; where less fits than there is, what is newest stays.

        Raises:
            ConfigError: a bound below 1; nothing is changed.
        """
        _check_bounds(max_tokens, max_entries)
        if max_tokens != self.pool.max_tokens:
            self.pool.resize(max_tokens)
        if max_entries != self.recycled.max_entries:
            self.recycled.resize(max_entries)

    def adaptive_weights(self, is_sampled: bool) -> AdaptiveWeights:
        """State learned from greedy, or from sampled texts.

        Raises:
            ConfigError: `is_sampled` is neither True nor False.
        """
        if not isinstance(is_sampled, bool):
            remedy = "Write True for sampled texts, False for greedy ones."
            raise ConfigError("is_sampled", "must be True or False", is_sampled, remedy)
        return self.sampled if is_sampled else self.greedy

    def merge(self, other: "SpecMemory") -> None:
        """Take over what another memory of the same tokenizer holds and this one does not.

        Its texts count as the newest; of what was learned about the sources, the one that saw more stays.

        Raises:
            ConfigError: `other` is no `SpecMemory`.
        """
        if not isinstance(other, SpecMemory):
            remedy = "Files are read by SpecMemory.load(path)."
            raise ConfigError("other", "must be a SpecMemory", type(other).__name__, remedy)
        known = set(self.pool.texts())
        for text in other.pool.texts():
            if text not in known:
                self.pool.add(text)
        self.recycled.merge(other.recycled)
        for is_sampled in (False, True):
            theirs = other.adaptive_weights(is_sampled)
            if sum(theirs.seen) > sum(self.adaptive_weights(is_sampled).seen):
                setattr(self, "sampled" if is_sampled else "greedy", copy.deepcopy(theirs))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file; calls that use the memory meanwhile go on.

        The file is written next to `path` and then put in its place, so an older file is whole until then.

        Raises:
            OSError: the folder is missing, or cannot be written to.
        """
        file = MemoryFile.of_bounds(*self.bounds)
        file.put(self.pool, self.recycled, {"greedy": self.greedy, "sampled": self.sampled})
        file.write(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SpecMemory":
        """Read the memory that `save` wrote: with its bounds, and it drafts what that one would have drafted.

        The texts are indexed anew: one million tokens take about two seconds.

        Raises:
            ConfigError: the file is missing or damaged, or is another kind of file.
        """
        file = MemoryFile.read(path)
        with file.checked():
            memory = cls(*file.bounds)
            file.fill(memory.pool, memory.recycled, {"greedy": memory.greedy, "sampled": memory.sampled})
        return memory


def _check_bounds(max_tokens: int, max_entries: int) -> None:
    check_positive("max_tokens", max_tokens, "The default is 1000000.", most=MAX_KEPT)
    check_positive("max_entries", max_entries, "The default is 262144.", most=MAX_KEPT)
