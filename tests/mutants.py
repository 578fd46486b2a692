"""Breaks the engine on purpose, one fault at a time in a copy of the repository, and says which test sees it first.

    python -m tests.mutants                    every fault, with the tests that `make test` runs
    python -m tests.mutants --wide             with every cell of the widest tests, as in `make test-all`
    python -m tests.mutants stop draws         the faults whose names hold one of these words
    python -m tests.mutants --record FILE      go on where FILE ends, and add a line to it for each fault

A fault that no test sees, or that no longer applies, makes the exit status 1. The tests nearest to a fault run first.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from tests.faults import MUTANTS, NEAREST, OTHERS, Mutant

__all__ = ["first_failure", "main"]
ROOT = Path(__file__).parents[1]
COPIED = ("hf_specdec", "tests", "docs", "demos", "pyproject.toml")
UNSEEN, WIDTH = "NOT SEEN", 50


def first_failure(mutant: Mutant, *, wide: bool) -> str | None:
    """The first test that fails with the fault, or `None`.

    Raises:
        ValueError: the text to replace is not in the file exactly once, or the test fails without the fault too.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        file = folder / "hf_specdec" / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times")
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        for paths in (*NEAREST[mutant.file], *OTHERS):
            output = _pytest_in(folder, [f"tests/{path}" for path in paths.split()], wide=wide)
            failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
            if failed or " passed" not in output:
                test = failed[1] if failed else output[-600:]
                file.write_text(text, encoding="utf-8")
                if failed and " passed" not in _pytest_in(folder, [test], wide=wide):
                    raise ValueError(f"{test} fails without the fault too")
                return test
    return None


def _pytest_in(folder: Path, paths: list[str], *, wide: bool) -> str:
    """What pytest says there. A process of its own runs it, in which torch and transformers are imported already."""
    words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no", *paths]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins' modules that are imported already
    words += ["-m", "not slow and not gpu and not extras and not browser"] if wide else []
    output = folder / "output"
    process = os.fork()
    if process == 0:
        os.chdir(folder)
        for module in [name for name in sys.modules if name.partition(".")[0] in ("tests", "hf_specdec")]:
            del sys.modules[module]
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ROOT).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(folder)
        sys.dont_write_bytecode = True
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = 1
        try:
            status = int(pytest.main(words))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.waitpid(process, 0)
    return output.read_text(encoding="utf-8")


def main() -> int:
    """Try the faults, print a line for each; 1 where one was not seen."""
    parser = argparse.ArgumentParser(description="Break the engine on purpose and see which tests notice.")
    parser.add_argument("words", nargs="*", help="only faults whose names hold one of these")
    parser.add_argument("--wide", action="store_true", help="run every cell of the widest tests")
    parser.add_argument("--record", type=Path, help="a file of the faults tried so far, which are not tried again")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.words or any(word in one.name for word in options.words)]
    known = options.record.read_text(encoding="utf-8") if options.record and options.record.exists() else ""
    tried = {line[:WIDTH].rstrip(): line for line in known.splitlines()}
    import transformers.generation.utils  # noqa: F401  # once for all faults

    for mutant in chosen:
        if mutant.name not in tried:
            tried[mutant.name] = _line(mutant, wide=options.wide)
            if options.record:
                with options.record.open("a", encoding="utf-8") as file:
                    file.write(tried[mutant.name] + "\n")
        print(tried[mutant.name], flush=True)
    seen = sum(UNSEEN not in tried[mutant.name] for mutant in chosen)
    print(f"{seen} of {len(chosen)} faults seen")
    return int(seen < len(chosen))


def _line(mutant: Mutant, *, wide: bool) -> str:
    start = time.perf_counter()
    try:
        verdict = first_failure(mutant, wide=wide) or UNSEEN
    except ValueError as error:
        verdict = f"{UNSEEN}: {error}"
    return f"{mutant.name:{WIDTH}}{time.perf_counter() - start:5.0f} s  {verdict}"


if __name__ == "__main__":
    sys.exit(main())
