"""The output of a long job: a line a prompt, appended as results finish, complete after any interruption.

Knows nothing about models. A job that is started again finds what is done and goes on; the finished file is sorted by
prompt, so an interrupted job and an uninterrupted one leave the same file. A file that holds anything but lines of
this job is never touched.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hf_specdec.common.files import check_output, lock, lock_out_processes, replacing
from hf_specdec.errors import ConfigError

FIELD = "--out"
FIRST_BYTES = b'{"index": '  # of every line
BEGINNING = re.compile(rb'\{"index": \d+, "(prompt|line)": ')
LINE_BREAKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}  # of readers that split by more than \n
OWN_LINES = "must be a new file, or one of the same job (model, prompts, method and options)"


def check_job_output(path: Path, prompts_file: Path) -> None:
    """Refuse an output that no job of any settings wrote, before anything is loaded."""
    if path.exists() and path.samefile(prompts_file):
        raise ConfigError(FIELD, "must not be the file of prompts", str(path), "Choose another file.")
    try:
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = f"Choose another folder: {error.filename}: {error.strerror}."
        raise ConfigError(FIELD, "must lie in a folder that can be made", str(path), remedy) from error
    check_output(FIELD, path)
    JobFile(path, None).done()


class JobFile:
    """A `.jsonl` file that several processes append to.

    Args:
        path: the file; it need not exist.
        settings: everything but the prompts that decides the results, JSON values. A file of another job is refused.
            `None` accepts any job's, for looking only.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None) -> None:
        self.path = Path(os.path.realpath(path))
        text = json.dumps(settings, sort_keys=True, default=str)
        self.job = None if settings is None else hashlib.sha256(text.encode()).hexdigest()[:16]

    @contextlib.contextmanager
    def held(self) -> Iterator[Self]:
        """Keep other commands off the file; one process of a job does this for all.

        Raises:
            ConfigError: another command writes to it, or it cannot be written.
        """
        check_output(FIELD, self.path)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                lock(descriptor)
            except BlockingIOError as error:
                remedy = "Wait until it has ended, or choose another file."
                raise ConfigError(FIELD, "must not be written by another command", str(self.path), remedy) from error
            if not self.path.exists() or not os.path.samestat(os.fstat(descriptor), self.path.stat()):
                remedy = "Start the command again."
                raise ConfigError(FIELD, "must not be replaced while the job begins", str(self.path), remedy)
            yield self
        finally:
            os.close(descriptor)

    def recover(self) -> set[int]:
        """Drop the beginning of a line at the end, left by an interruption; returns the numbers of what is done.

        Raises:
            ConfigError: the file belongs to another job, or is none of a job.
        """
        done = self.done()
        with self._appending() as descriptor:
            _drop_unfinished(descriptor)
        return done

    def done(self, prompts: Sequence[Mapping[str, str]] | None = None, *, retries_failed: bool = False) -> set[int]:
        """The numbers of the prompts that are done; with `retries_failed`, of those that did not fail.

        Args:
            prompts: of the job, in their order: `{"prompt": text}`, or `{"line": text}` of a line that is none. One
                that failed and is another now is not done.

        Raises:
            ConfigError: the file belongs to another job: one of its texts follows another prompt.
        """
        done, known = set(), None if prompts is None else dict(enumerate(prompts))
        for index, line in self._lines().items():
            has_failed = "error" in line
            if known is not None and _asked(line) != known.get(index):
                if not has_failed:
                    raise self._foreign(f"Its text {index} follows another prompt")
            elif not (retries_failed and has_failed):
                done.add(index)
        return done

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one result; lines of several processes never mix.

        Raises:
            OSError: the line could not be written whole; nothing of it stays.
        """
        text = _encoded({**line, "job": self.job})
        with self._appending() as descriptor:
            end = _drop_unfinished(descriptor)
            try:
                written = os.write(descriptor, text)
            except OSError as error:
                raise OSError(f"{str(self.path)!r} could not take another line: {error.strerror}") from error
            if written < len(text):
                os.ftruncate(descriptor, end)
                raise OSError(f"{str(self.path)!r} took {written} of {len(text)} bytes of a line: no room is left")

    def finish(self, num_prompts: int) -> list[dict[str, Any]]:
        """Sort the file by prompt; returns its lines."""
        found = {index: line for index, line in self._lines().items() if index < num_prompts}
        if missing := set(range(num_prompts)) - set(found):
            rule, remedy = f"must hold a line for each prompt, {num_prompts} in all", "Start the command again."
            raise ConfigError(FIELD, rule, f"without {len(missing)} of them", remedy)
        lines = [found[index] for index in sorted(found)]
        content = b"".join(map(_encoded, lines))
        if content != self.path.read_bytes():
            with replacing(self.path) as temporary:
                temporary.write_bytes(content)
        return lines

    @contextlib.contextmanager
    def _appending(self) -> Iterator[int]:
        """The file to append to, by one process of the job at a time."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            lock_out_processes(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def _lines(self) -> dict[int, dict[str, Any]]:
        """Lines by prompt number; of several for one prompt the first that did not fail, else the last."""
        if not self.path.exists():
            return {}
        *whole, unfinished = self.path.read_bytes().split(b"\n")
        found: dict[int, dict[str, Any]] = {}
        for number, text in enumerate(whole, 1):
            line = self._line(text, number)
            if "error" in found.get(line["index"], {"error": None}):
                found[line["index"]] = line
        if unfinished and not _is_cut_off(unfinished, is_only=not found):
            raise self._foreign(f"Line {len(whole) + 1} is none of it")
        return found

    def _line(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError):
            line = None
        is_line = isinstance(line, dict) and isinstance(line.get("index"), int) and isinstance(line.get("job"), str)
        if not is_line or self.job not in (None, line["job"]):
            raise self._foreign(f"Line {number} is none of it")
        return dict(line)

    def _foreign(self, reason: str) -> ConfigError:
        remedy = f"{reason}. Choose another file, or remove this one to start anew."
        return ConfigError(FIELD, OWN_LINES, str(self.path), remedy)


def _asked(line: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt that a line answers."""
    return {name: line[name] for name in ("prompt", "line") if name in line}


def _is_cut_off(text: bytes, *, is_only: bool) -> bool:
    """Tell the beginning of a line of a job, cut off before its end.

    Args:
        is_only: there is no whole line before it: then it must begin as only such lines do, and be no whole line.
    """
    if not is_only:
        return FIRST_BYTES.startswith(text[: len(FIRST_BYTES)])
    try:
        json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return BEGINNING.match(text) is not None
    return False


def _encoded(line: Mapping[str, Any]) -> bytes:
    """One line: readable characters as they are; half a surrogate pair, which UTF-8 cannot hold, escaped."""
    try:
        text = json.dumps(line, ensure_ascii=False).translate(LINE_BREAKS).encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(line).encode("ascii")
    return text + b"\n"


def _drop_unfinished(descriptor: int) -> int:
    """Cut off what follows the last line break, left by a process that was killed; returns the file's end."""
    end = os.fstat(descriptor).st_size
    if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n":
        return end
    kept = os.pread(descriptor, end, 0).rfind(b"\n") + 1
    os.ftruncate(descriptor, kept)
    return kept
