"""A conversation in the terminal: lines of stdin, answers on stdout, the cache kept from turn to turn."""

import sys
from typing import Any

from rich.console import Console
from transformers import DynamicCache, PreTrainedTokenizerBase, TextStreamer

from hf_specdec.api.enable import capability
from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.compat.caches import CACHE, crop_to
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.models import max_positions, takes_cache
from hf_specdec.errors import ConfigError, SpecError, counted
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.cli.report import drafts_line
from hf_specdec.tools.command_errors import note

HELP = "!clear begins anew, !stats says how the last answer came about, !exit or Ctrl-D ends; Ctrl-C ends an answer"


def converse(chat: "Conversation") -> None:
    """Answer lines of stdin until they end; the chat goes on after an error."""
    console = Console(stderr=True)
    note(HELP, "dim")
    while True:
        try:
            match console.input("> " if console.is_terminal else "").strip():
                case "!exit":
                    return
                case "!clear":
                    chat.clear()
                case "!stats":
                    note(chat.describe_last(), "dim")
                case "":
                    pass
                case command if command.startswith("!"):
                    note(f"unknown command {command}; {HELP}", "yellow")
                case message:
                    chat.answer(message)
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
        except (SpecError, ValueError) as error:
            note(f"error: {' '.join(str(error).split())}", "red")


class Conversation:
    """The messages so far, and the cache of the tokens that the model has read; `kwargs` are those of `generate`."""

    def __init__(self, loaded: LoadedModel, kwargs: dict[str, Any], system: str | None = None) -> None:
        self.loaded, self.kwargs = loaded, kwargs
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.messages = list(self._beginning)
        self.stats: Any = None
        self.num_reused = 0  # tokens of the last prompt that were not read again
        self._cache: Any = None
        self._token_ids: list[int] = []  # whose keys and values the cache holds

    def answer(self, message: str) -> None:
        """Write the answer to stdout as it comes; Ctrl-C ends it, and what has been written stays."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        messages = [*self.messages, {"role": "user", "content": message}]
        encoded = tokenizer(chat_text(tokenizer, messages), add_special_tokens=False, return_tensors="pt")
        inputs = {name: encoded[name].to(input_device(model)) for name in ("input_ids", "attention_mask")}
        kwargs = {**self.kwargs, **self._cache_kwargs(inputs["input_ids"][0].tolist())}
        kwargs["max_new_tokens"] = min(kwargs["max_new_tokens"], self._room(inputs["input_ids"].shape[1]))
        streamer, self.stats, self._cache = _Streamer(tokenizer), None, None  # a call that fails leaves no cache
        try:
            output = model.generate(**inputs, **kwargs, streamer=streamer, return_dict_in_generate=True)
            self.stats = getattr(output, "spec_stats", None)
            self._cache, self._token_ids = output.get(CACHE), output.sequences[0].tolist()
        except KeyboardInterrupt:
            if not streamer.has_ended:  # as transformers' own loop leaves it
                streamer.end()
        self.messages = [*messages, {"role": "assistant", "content": streamer.text}]

    def describe_last(self) -> str:
        """Statistics of the last answer, in words."""
        if self.stats is None:
            return "there is no answer with drafts yet"
        return f"{drafts_line(self.stats)}; the cache held {counted(self.num_reused, 'token')} of the prompt"

    def _room(self, length: int) -> int:
        """New tokens that the model has positions for after a prompt."""
        positions = max_positions(self.loaded.model.config) or sys.maxsize
        if length >= positions:
            rule = f"must be shorter than the model's {positions} positions"
            raise ConfigError("chat", rule, counted(length, "token"), "!clear begins anew.")
        return positions - length

    def _cache_kwargs(self, token_ids: list[int]) -> dict[str, Any]:
        """Arguments of `generate` for the cache: the last call's, cut where the texts part, or a new one."""
        model, cache = self.loaded.model, self._cache
        if not takes_cache(model):
            return {}
        length = 0 if cache is None else cache.get_seq_length()
        same = [kept == new for kept, new in zip(self._token_ids[:length], token_ids[:-1], strict=False)]
        common = same.index(False) if False in same else len(same)
        is_kept = common > 0 and capability(model).tier == "tree"
        if not is_kept or not (common == length or crop_to(cache, common)):
            cache, common = DynamicCache(config=model.config), 0
        self.num_reused = common
        return {CACHE: cache, "cache_implementation": None}


class _Streamer(TextStreamer):
    """Writes an answer to stdout as it comes, and keeps it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text, self.has_ended = "", False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See `transformers.TextStreamer`."""
        self.text, self.has_ended = self.text + text, stream_end
        super().on_finalized_text(text, stream_end)
