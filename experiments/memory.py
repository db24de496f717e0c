"""Memory of a long recording and a long replay: does it grow with the tokens?

    python experiments/memory.py [--tokens 1000000] [--new-tokens 240] [--depth 8] [--folder runs/memory] [--only PHASE]

A random target of four narrow layers records so many tokens, and a random drafter is drafted, judged and simulated over all
of them: arg-max chains, then chains drawn by chance, then one epoch of training. The process' anonymous memory (RssAnon: what
it holds itself, without the pages of mapped files, which the system takes back) is read every 20 ms. Printed, a phase a line:
what is held when it begins, then by how much the largest value so far is above that after 10, 50 and 100 % of the phase's
work, and after all that follows it (judging, simulating). Flat means that the middle three are alike; the last number is the
growth from 10 to 100 % over the tokens between.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torture_base as base_files

from driftlab import VARIANTS, Drafter, Target, TrainConfig, Trajectory, accept, all_starts, simulate, train

MIB = 2**20
SHARES = (0.1, 0.5, 1.0)


def anonymous() -> int:
    """Bytes of this process that no file stands behind."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Watch:
    """The largest anonymous memory by share of the work done. A context; ``progress`` is the callback to hand on."""

    def __init__(self) -> None:
        self.share, self.peaks, self._ended = 0.0, [0, 0, 0, 0], threading.Event()

    def progress(self, what: str, done: int, total: int) -> None:
        """How far the work is."""
        self.share = done / total
        self._look()

    def _look(self) -> None:
        now, place = anonymous(), next((i for i, share in enumerate(SHARES) if self.share < share), 3)
        self.peaks[place] = max(self.peaks[place], now)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self._look()

    def __enter__(self) -> Watch:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before = anonymous()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._began = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.monotonic() - self._began
        self._ended.set()
        self._thread.join()
        self._look()

    def line(self, name: str, tokens: int) -> str:
        """What was seen."""
        above = [max(self.peaks[: i + 1]) - self.before for i in range(4)]
        growth = (above[2] - above[0]) / (0.9 * tokens)
        told = "  ".join(f"{value / MIB:8.1f}" for value in (self.before, *above))
        return f"{name:<22}{told}  {growth:9.1f}  {self.seconds:7.0f} s"


def target(positions: int) -> Target:
    """The target of torture.py, for longer texts, and with no token that ends them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "eos_token_id": None},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": positions, "bos_token_id": 1},
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(8) if parameter.ndim > 1 else parameter.uniform_(0.5, 2.0)
    return Target(model, base_files.tiny_tokenizer(), name="tiny", aux_layers=(1, 2, 3))


def phases(
    made: Target, prompts: list[str], options: argparse.Namespace
) -> dict[str, Callable[[Callable[..., None]], object]]:
    """Every phase by name: a function of the progress callback."""
    out = options.folder / "run"

    def opened() -> tuple[Drafter, Trajectory]:
        held = Trajectory.open(out)
        return Drafter(VARIANTS["eagle31"].for_target(held), held), held

    def replay(progress: Callable[..., None]) -> None:
        drafter, held = opened()
        print(f"  tau {simulate(accept(all_starts(drafter, held, options.depth, progress=progress), held)).tau:.4f}")

    def sampled(progress: Callable[..., None]) -> None:
        drafter, held = opened()
        draft = all_starts(drafter, held, options.depth, temperatures=(1.0,), top=8, progress=progress)
        print(f"  tau {simulate(accept(draft, held, rule='rejection')).tau:.4f}")

    def training(progress: Callable[..., None]) -> None:
        drafter, held = opened()
        shutil.rmtree(options.folder / "drafter", ignore_errors=True)
        how = TrainConfig(ttt=2, batch_size=16, epochs=1.0, save_every=0)
        train(drafter, held, how, out=options.folder / "drafter", progress=progress)

    return {
        "record": lambda progress: made.record(
            prompts,
            max_new_tokens=options.new_tokens,
            temperature=1.0,
            template=False,
            piece_size=64,
            out=out,
            progress=progress,
        ),
        "replay": replay,
        "sampled replay": sampled,
        "training": training,
    }


def main() -> None:
    """Do the phases, and print a line for each."""
    options = parse()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    letters = "abcdefghijklmnopqrstuvwxyz "
    length = options.new_tokens + 13
    count = -(-options.tokens // length)
    prompts = ["".join(letters[(i // 27**k) % 27] for k in range(4)) + "a prompt" for i in range(count)]
    made = target(options.new_tokens + 16)
    if not options.only:
        shutil.rmtree(options.folder, ignore_errors=True)
    print(f"{count} sequences of {length} tokens, {count * length:,} in all, K = {options.depth}")
    print(f"{'MiB':<22}{'before':>8}  {'10 %':>8}  {'50 %':>8}  {'100 %':>8}  {'after':>8}  {'B a token':>9}")
    for name, phase in phases(made, prompts, options).items():
        if options.only in ("", name):
            with Watch() as watch:
                phase(watch.progress)
            print(watch.line(name, count * length), flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--new-tokens", type=int, default=240)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/memory"))
    parser.add_argument("--only", default="", help="this phase alone, of what an earlier run has recorded")
    return parser.parse_args()


if __name__ == "__main__":
    main()
