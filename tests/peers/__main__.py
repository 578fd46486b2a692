"""transformers' own generation tests with speculative methods, from a checkout of transformers.

    python tests/peers --transformers path/to/transformers [--families llama whisper] [--methods auto]

Each test runs plainly first; those that pass and call `generate` run again with each method. A call of a method is
compared with a plain call from the same state: tokens, scores, logits, hidden states, caches and random state. A
journal next to the output keeps the outcomes: the same command goes on where it was ended.

The tests need `parameterized` and `datasets`. They run on the transformers that is installed, not on the checkout's.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from report import document, table

HERE = Path(__file__).resolve().parent
METHODS = ("prompt_lookup", "auto", "lookahead", "draft_model")
PYTEST = "-p peer_plugin -q --no-header --no-summary -p no:cacheprovider -o log_cli=0 -W ignore".split()
PYTEST += ["--continue-on-collection-errors"]
SELECTED = "(generate or generation) and not compil"  # compiling takes minutes a test
CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGSEGV}


def main() -> int:
    """Run the tests, print the table, write the document. 1 where a test that passes plainly fails with a method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", type=Path, required=True, help="a checkout of it")
    parser.add_argument("--families", nargs="+", help="folders of tests/models; all of them by default")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--output", type=Path, default=Path("peers.json"))
    parser.add_argument("--seconds", type=int, default=120, help="time of one run of a test")
    parser.add_argument("--select", default=SELECTED, help="pytest's -k")
    options = parser.parse_args()
    journal = options.output.with_suffix(".jsonl").resolve()
    while (
        run(options, journal) in CRASHES
    ):  # the journal has the test as crashed, and the next process goes on after it
        pass
    found = document(journal, options.methods)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return int(any(method["failing"] for method in found["methods"].values()))


def run(options: argparse.Namespace, journal: Path) -> int:
    """One process of pytest in the checkout; its exit status."""
    tests = options.transformers.resolve() / "tests"
    common = tests / "generation/test_utils.py"
    if not common.exists():
        raise SystemExit(f"{common} is missing. An sdist lacks it: name a checkout.")
    families = options.families or sorted(folder.name for folder in (tests / "models").iterdir())
    files = [file for family in families for file in sorted((tests / "models" / family).glob("test_modeling_*.py"))]
    files += [] if options.families else [common]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *PYTEST,
        f"--peer-journal={journal}",
        f"--peer-seconds={options.seconds}",
    ]
    command += [f"--peer-method={method}" for method in options.methods]
    command += ["-k", options.select, *(str(file.relative_to(tests.parent)) for file in files)]
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=tests.parent, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
