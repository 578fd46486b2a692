"""A model with the options of a call, and a prompt that it continues."""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.common.files import lone_surrogate
from hf_specdec.common.stats import SpecStats
from hf_specdec.compat import attention_implementation, input_device, max_positions
from hf_specdec.errors import ConfigError, counted
from hf_specdec.kernels.quantization.weights import precision_of
from hf_specdec.tools.bench.prompts import default_prompts
from hf_specdec.tools.cli.report import drafts_line, print_json
from hf_specdec.tools.command_errors import note

QUESTION = "What are the benefits of reading books? Answer in a list."
PROMPTS = tuple(prompt.text for prompt in default_prompts() if prompt.task == "continue")[:3]


class Result(NamedTuple):
    """New tokens of one call, its wall-clock time, and its statistics; `None` for transformers' own loops."""

    token_ids: list[int]
    seconds: float
    stats: SpecStats | None


@dataclass(frozen=True, slots=True)
class Job:
    """A model with the options that all its calls share.

    Attributes:
        options (`Mapping[str, Any]`): keyword arguments of `generate`.
        seed (`int | None`): set before each call; `None` leaves the random state as it is.
        is_chat (`bool`): whether a prompt goes through the chat template, as a user's message.
        system (`str | None`): the system's message of a chat.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    is_chat: bool = False
    system: str | None = None

    def with_prompts(self, text: str | None) -> tuple["Job", Sequence[str]]:
        """The prompt, or without one a question to a model with a chat template, Python code to another."""
        if text is not None:
            return self, (text,)
        is_chat = self.is_chat or getattr(self.tokenizer, "chat_template", None) is not None
        return dataclasses.replace(self, is_chat=is_chat), (QUESTION,) if is_chat else PROMPTS

    def show(self, text: str | None, method: Mapping[str, Any], *, as_json: bool) -> None:
        """Continue a prompt: the text on stdout as it comes, or one JSON document; `method` has further arguments."""
        job, (prompt, *_) = self.with_prompts(text)
        if not as_json:
            token_ids, seconds, stats = job.write(prompt, method, is_shown=text is None)
            speed = f"{counted(len(token_ids), 'token')} in {seconds:.2f} s ({len(token_ids) / seconds:.1f} tokens/s)"
            note(speed if stats is None else f"{speed}; {drafts_line(stats)}", "dim")
            return
        result = job.run(job.encode(prompt), **method)
        config, draft = method.get("spec_config"), method.get("assistant_model")
        document = {
            "model": self.model.name_or_path,
            "dtype": precision_of(self.model),
            "device": str(input_device(self.model)),
            "attention": attention_implementation(self.model.config),
            "assistant_model": None if draft is None else draft.name_or_path,
            "assistant_dtype": None if draft is None else precision_of(draft),
            "threads": torch.get_num_threads(),
            "spec_method": method["spec_method"],
            "spec_config": None if config is None else dataclasses.asdict(config),
            "options": {**self.options, "seed": self.seed},
            "chat": job.is_chat,
            "system": self.system,
            "prompt": prompt,
            "text": self.tokenizer.decode(result.token_ids, skip_special_tokens=True),
            "token_ids": result.token_ids,
            "seconds": result.seconds,
            "tokens_per_second": len(result.token_ids) / result.seconds,
            "spec_stats": None if result.stats is None else result.stats.to_dict(),
        }
        print_json(document)

    def write(self, prompt: str, method: Mapping[str, Any], *, is_shown: bool) -> Result:
        """Write the continuation of a prompt to stdout as it comes; `is_shown` puts the prompt on stderr before."""
        inputs = self.encode(prompt)
        if is_shown:
            note(prompt, "dim")
        length, positions = inputs["input_ids"].shape[1], max_positions(self.model.config)
        if positions is not None and length + self.options["max_new_tokens"] > positions:
            wanted = f"{counted(length, 'token')} in the prompt and {self.options['max_new_tokens']} new ones"
            note(f"note: the model has {positions} positions; {wanted} may go beyond them", "yellow")
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        return self.run(inputs, **method, streamer=streamer)

    def run(self, inputs: Mapping[str, torch.Tensor], **kwargs: Any) -> Result:
        """Call `generate` on one prompt."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        started = time.perf_counter()
        output = self.model.generate(**inputs, **self.options, return_dict_in_generate=True, **kwargs)
        token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Result(token_ids, time.perf_counter() - started, getattr(output, "spec_stats", None))

    def encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """Token ids and mask of one prompt, `(1, length)` each."""
        if lone_surrogate(prompt) is not None:
            raise ConfigError("prompt", "must be Unicode text", ascii(prompt[:40]), "Convert it to UTF-8.")
        if self.is_chat:
            if getattr(self.tokenizer, "chat_template", None) is None:
                rule = "must come with a model that has a chat template"
                raise ConfigError("chat", rule, self.tokenizer.name_or_path, "Name one, such as smollm2.")
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = chat_text(self.tokenizer, [*system, {"role": "user", "content": prompt}])
        encoded = self.tokenizer(prompt, add_special_tokens=not self.is_chat, return_tensors="pt")
        if encoded["input_ids"].shape[1] == 0:
            raise ConfigError("prompt", "must hold at least one token", prompt, "Type some text to continue.")
        return {name: encoded[name].to(input_device(self.model)) for name in ("input_ids", "attention_mask")}


def read_prompt(argument: str | None) -> str | None:
    """The prompt from the argument or stdin; `None` where neither says anything."""
    if argument is not None and argument != "-":
        return argument
    if argument == "-" or (sys.stdin is not None and not sys.stdin.isatty()):
        return sys.stdin.read() or (None if argument is None else "")
    return None
