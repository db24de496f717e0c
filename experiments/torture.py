"""What survives kill -9, a full disk, a folder that cannot be written, two processes on one cache, and files that are broken.

    python experiments/torture.py [--kills 50] [--mutations 2000] [--workers 1] [--seed 0] [--only NAME] [--folder runs/torture]

Kills: a recording, a training and an ablation run in processes that are killed after a random while and begun again until they
end; every file of the result is compared bit for bit with that of an undisturbed run. Mutations: see ``torture_files``; readers
run in child processes, which are ended after ``LIMIT`` seconds. The last line is

    kills survived N/N, mutated files M/M clear, hangs 0, wrong 0

and the exit status 1 unless it reads so. Every other outcome is printed with the number that makes
the case again (--case).
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torture_base as base_files
from torture_files import SECRET, SUBJECTS, Subject, digest, mutate

LIMIT = 60.0
"""seconds after which a reader hangs; a whole file takes a fraction of one"""
ALLOWANCE = 64 * 2**20
"""bytes that a reader may take beside twice the file's: of a first import, of an error's words"""
GOOD = ("clear", "right", "said")
_FORK = multiprocessing.get_context("fork")


def main() -> int:
    """Build, kill, break, and say what survived."""
    options = parse()
    root = base_files.fresh(options.folder)
    os.environ["TORTURE_CANARY"] = str(root / "canary")
    os.environ["DRIFTLAB_CACHE"] = str(root / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    base_files.build(root / "base")
    survived = kills(root, options.kills, random.Random(options.seed)) if options.kills else 0
    troubles = disks(root) if options.kills else []
    cases = [options.case] if options.case is not None else range(options.mutations)
    found = mutations(root, list(cases), options)
    clear = sum(found[outcome] for outcome in GOOD)
    wrong = sum(found[outcome] for outcome in ("wrong", "memory", "crash", "code")) + len(troubles)
    print(f"outcomes: {dict(sorted(found.items()))}")
    print(
        f"kills survived {survived}/{options.kills}, mutated files {clear}/{len(cases)} clear, hangs {found['hang']}, "
        f"wrong {wrong}"
    )
    return int(survived < options.kills or clear < len(cases) or wrong > 0)


# ---------------------------------------------------------------------------------------------- kills


def forked(job: Callable[[], None]) -> int:
    """Start a process that does the job; its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        sys.stdout.flush()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        job()
        status = 0
    except BaseException as error:  # the child must not go on in the parent's code
        Path(os.environ["TORTURE_CANARY"] + ".error").write_text("".join(traceback.format_exception(error)))
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a process; its exit status, negative if it was killed."""
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def kills(root: Path, wanted: int, chance: random.Random, jobs: Sequence[str] = tuple(base_files.JOBS)) -> int:
    """Kill so many times; return how many kills belong to runs that ended with the undisturbed bits."""
    whole, took = {}, {}
    for name in jobs:
        job = base_files.JOBS[name]
        out, begun = base_files.fresh(root / "whole" / name), time.monotonic()
        if ended(forked(lambda job=job, out=out: job(root / "base", out))):
            raise RuntimeError(f"{name}: {last_words()}")
        whole[name], took[name] = base_files.result(out), time.monotonic() - begun
        print(f"undisturbed {name}: {took[name]:.1f} s, {len(whole[name])} files", flush=True)
    done = survived = 0
    while done < wanted:
        for name in jobs:
            job = base_files.JOBS[name]
            if done >= wanted:
                break
            out, here = base_files.fresh(root / "killed"), 0
            while True:
                child = forked(lambda job=job, out=out: job(root / "base", out))
                if done + here < wanted and _killed(child, chance.uniform(0, 0.5 * took[name])):
                    here += 1
                    continue
                break
            status = ended(child) if done + here >= wanted else _last_status
            same = status == 0 and base_files.result(out) == whole[name]
            if not same:
                print(f"{name}, killed {here} times: status {status}, {differing(out, whole[name])}", flush=True)
            done, survived = done + here, survived + here * same
            print(f"{name}: killed {here} times, the same bits: {same}", flush=True)
    return survived


_last_status = 0


def _killed(child: int, seconds: float) -> bool:
    """Kill a process after a while; False if it has ended by then, with its status in ``_last_status``."""
    global _last_status
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            _last_status = os.waitstatus_to_exitcode(status)
            return False
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def differing(out: Path, whole: dict[str, bytes]) -> str:
    """Names of files that are missing, new or other."""
    here = base_files.result(out)
    return str(sorted(name for name in whole.keys() | here.keys() if whole.get(name) != here.get(name))[:6])


# ---------------------------------------------------------------------------------------------- disks


def disks(root: Path, jobs: Sequence[str] = tuple(base_files.JOBS), limits: Sequence[int] = (500, 20_000)) -> list[str]:
    """A disk that is full at several places, a folder that cannot be written, two processes at once; return what went wrong."""
    from driftlab.errors import DriftlabError

    troubles = []

    def refused(job: Callable[[Path, Path], None], out: Path, before: Callable[[], None]) -> None:
        before()
        try:
            job(root / "base", out)
        except DriftlabError as error:
            if "cannot write" in str(error) or "no space left" in str(error) or "cannot make" in str(error):
                return
            raise

    for name in jobs:
        job = base_files.JOBS[name]
        whole = base_files.result(root / "whole" / name)
        for limit in limits:
            out = base_files.fresh(root / "full")

            def full(limit: int = limit) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

            status = ended(forked(lambda job=job, out=out, full=full: refused(job, out, full)))
            again = ended(forked(lambda job=job, out=out: job(root / "base", out)))
            same = base_files.result(out) == whole
            if status or again or not same:
                troubles.append(
                    f"{name}, files of {limit} bytes at most: {status}, {again}, same {same}: {last_words()}"
                )
        out = base_files.fresh(root / "read-only")
        out.chmod(0o555)
        if ended(forked(lambda job=job, out=out: refused(job, out, bound_by_permissions))):
            troubles.append(f"{name}, a folder that cannot be written: {last_words()}")
        elif any(out.iterdir()):
            troubles.append(f"{name}: a folder that cannot be written was written")
        out.chmod(0o755)
        out = base_files.fresh(root / "both")
        both = [forked(lambda job=job, out=out: job(root / "base", out)) for _ in range(2)]
        if [ended(child) for child in both] != [0, 0] or base_files.result(out) != whole:
            troubles.append(f"{name}, two processes at once: {differing(out, whole)}")
        print(f"{name}: full disk, read-only folder, two processes: {troubles or 'as they should be'}", flush=True)
    return troubles


def last_words() -> str:
    """Of the last job that failed."""
    told = Path(os.environ["TORTURE_CANARY"] + ".error")
    return told.read_text().strip().splitlines()[-1] if told.exists() else ""


def bound_by_permissions() -> None:
    """Let root too be refused what a folder's permissions refuse: without the capability to pass over them."""
    capabilities, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    system = ctypes.CDLL(None)
    system.capget(capabilities, data)
    data[0] &= ~(1 << 1)  # CAP_DAC_OVERRIDE
    system.capset(capabilities, data)


# ---------------------------------------------------------------------------------------------- mutations


@dataclass
class Reader:
    """A child process that reads one broken folder after the other."""

    process: Any
    pipe: Any
    case: int = -1
    since: float = 0.0

    @classmethod
    def start(cls) -> Reader:
        """Fork one."""
        here, there = _FORK.Pipe()
        process = _FORK.Process(target=serve, args=(there,), daemon=True)
        process.start()
        there.close()
        return cls(process, here)


def serve(pipe: Any) -> None:
    """Read folders until the pipe ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    warnings.simplefilter("ignore")
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + 4 * 2**30, resource.RLIM_INFINITY))
    while True:
        try:
            name, folder, right = pipe.recv()
        except EOFError:
            return
        pipe.send(outcome(SUBJECTS[name], Path(folder), right))


def outcome(subject: Subject, folder: Path, right: str) -> tuple[str, str]:
    """Read a folder: what came of it, and words on it."""
    from driftlab.errors import DriftlabError

    file = folder / subject.file
    size = file.stat().st_size if file.is_file() else 0
    before = _reset_peak()
    try:
        value = subject.read(folder)
        result = ("right", "") if digest(value) == right else ("other", "")
        if result[0] == "other":
            said = subject.said is not None and subject.said(folder, value)
            result = ("said", "") if said else ("wrong", "other values than before, without a word")
        if SECRET in repr(value):
            result = ("wrong", "what lies outside of the folder was read")
    except DriftlabError as error:
        result = ("clear", str(error)[:300])
        if SECRET in str(error) or not str(error).strip():
            result = ("wrong", f"the message gives it away, or says nothing: {error}")
    except MemoryError:
        result = ("memory", "more than 4 GiB asked for")
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        mine = [f for f in traceback.extract_tb(error.__traceback__) if "/driftlab/" in f.filename]
        at = (
            f"{Path(mine[-1].filename).name}:{mine[-1].lineno}"
            if mine
            else f"{Path(where.filename).name}:{where.lineno}"
        )
        result = ("wrong", f"{type(error).__name__} at {at}: {str(error)[:200]}")
    grown = _peak() - before
    if grown > 2 * size + ALLOWANCE:
        result = ("memory", f"{grown / 2**20:.0f} MiB for a file of {size} bytes; {result}")
    return result


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def broken(root: Path, case: int, only: str, seed: int) -> tuple[Subject, Path]:
    """Make the folder of a case."""
    chance = random.Random(f"{seed} {case}")
    names = sorted(name for name in SUBJECTS if name.startswith(only))
    subject = SUBJECTS[names[case % len(names)]]
    kind = subject.name.split("/")[0]
    beside = root / "cases" / f"{case}"  # the recording lies beside, as where it was made
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(root / "base" / kind, beside / kind)
    if kind != "recording" and kind in ("own", "foreign", "bin", "oldbin", "sharded", "state"):
        (beside / "recording").symlink_to(root / "base" / "recording")
    shutil.copy(root / "base" / "outside.safetensors", beside)
    file = beside / kind / subject.file
    raw = file.read_bytes()
    if chance.random() < 0.04 and kind not in ("prompts", "csv", "parquet", "gguf") and not kind.startswith("log"):
        _replace(file, chance)
    else:
        changed = raw
        while changed == raw:
            changed = mutate(raw, file.name, chance)
        file.write_bytes(changed)
    return subject, beside / kind


def _replace(file: Path, chance: random.Random) -> None:
    """Something else in the file's place."""
    file.unlink()
    way = chance.randrange(5)
    if way == 0:
        os.mkfifo(file)
    elif way == 1:
        file.mkdir()
    else:
        place = {2: "../outside.safetensors", 3: "/dev/zero", 4: file.name}[way]
        file.symlink_to("../" * (len(file.relative_to(file.parents[1]).parts) - 2) + place if way == 2 else place)


def mutations(root: Path, cases: list[int], options: argparse.Namespace) -> collections.Counter[str]:
    """Break and read; count the outcomes, print those that should not be."""
    found: collections.Counter[str] = collections.Counter()
    kinds = sorted({name.split("/")[0] for name in SUBJECTS if name.startswith(options.only)}) if cases else []
    right = {}
    for name in sorted(SUBJECTS):
        if name.split("/")[0] in kinds:
            right[name] = digest(SUBJECTS[name].read(root / "base" / name.split("/")[0]))
            shutil.rmtree(root / "base" / "gguf" / "out", ignore_errors=True)
    waiting, by_name = list(reversed(cases)), collections.Counter()
    readers = [Reader.start() for _ in range(options.workers)] if cases else []
    subjects: dict[int, Subject] = {}
    while waiting or any(reader.case >= 0 for reader in readers):
        for i, reader in enumerate(readers):
            if reader.case < 0 and waiting:
                case = waiting.pop()
                subject, folder = broken(root, case, options.only, options.seed)
                subjects[case] = subject
                reader.case, reader.since = case, time.monotonic()
                reader.pipe.send((subject.name, str(folder), right[subject.name]))
            if reader.case < 0:
                continue
            result = _answer(reader)
            if result is None:
                continue
            if Path(os.environ["TORTURE_CANARY"]).exists():
                result = ("code", "the file's code was run")
                Path(os.environ["TORTURE_CANARY"]).unlink()
            name = subjects[reader.case].name
            found[result[0]] += 1
            by_name[name, result[0]] += 1
            if result[0] not in GOOD or options.verbose:
                print(f"case {reader.case} {name}: {result[0]}: {result[1]}", flush=True)
            if result[0] in GOOD:
                shutil.rmtree(root / "cases" / f"{reader.case}", ignore_errors=True)
            reader.case = -1
            if result[0] in ("hang", "crash"):
                readers[i] = Reader.start()
        time.sleep(0.001)
    for name in sorted({name for name, _ in by_name}):
        print(f"  {name}: " + ", ".join(f"{kind} {n}" for (of, kind), n in sorted(by_name.items()) if of == name))
    return found


def _answer(reader: Reader) -> tuple[str, str] | None:
    """What a reader has said; a hang or a crash if it will not; None while it is at work."""
    try:
        if reader.pipe.poll():
            return reader.pipe.recv()
    except (EOFError, OSError):
        reader.process.join(5)
        return "crash", f"the interpreter ended with {reader.process.exitcode}"
    if time.monotonic() - reader.since > LIMIT:
        reader.process.kill()
        return "hang", f"more than {LIMIT:g} s"
    return None


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="subjects whose name begins so")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/torture"))
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
