"""What does draft attention on a CPU cost, beside attention that reports nothing and attention that keeps its map?

    python experiments/bench_attention_cpu.py [--tokens 8192] [--repeats 5]

One layer of SmolLM2-135M's shape: 9 query heads, 3 kv heads, head size 64, float32, every row of a random text a start
(the causal map). Contenders: torch's ``scaled_dot_product_attention``; ``attend`` bare, with masses, and with masses and
entropy; and what transformers' "eager" attention does, a softmax over the T x T map, with the map summed by segment afterwards.
Time: all in one process, in turn, the median. Memory: each in a process of its own, the resident peak less that before the
call, when the inputs and the libraries were there. The eager map takes 4 x 9 x T x T bytes and its copies, some 7 GiB at T =
8,192: it has ``--eager-tokens`` of its own, and ``attend`` is measured beside it at that length. The goals are for T = 8,192;
at a few hundred tokens what a call costs whatever its size outweighs the attention.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_common import Worker, peak_mib, row, serve, write

HEADS, KV_HEADS, WIDTH = 9, 3, 64
WORDS = {
    "sdpa": "scaled_dot_product_attention",
    "bare": "attend, no statistics",
    "mass": "attend, masses",
    "entropy": "attend, masses and entropy",
    "eager": "eager attention, its map summed by segment",
    "sdpa train": "scaled_dot_product_attention, forward and backward",
    "train": "attend, forward and backward",
}
LONG, SHORT = ("sdpa", "bare", "mass", "entropy", "sdpa train", "train"), ("eager", "mass")
GOALS = {"mass": (2.0, 1.2), "entropy": (3.0, 1.2)}  # times what scaled_dot_product_attention takes: time, memory
EAGER_GOALS = (5.0, 50.0)  # eager attention against attend with masses: time, memory


def main() -> None:
    """Measure memory, then time, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--eager-tokens", type=int, default=8192, help="length at which the eager map is compared")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_attention_cpu.csv"))
    options = parser.parse_args()
    rows, words = [], []
    for tokens, names in ((options.tokens, LONG), (options.eager_tokens, SHORT)):
        memory = {name: memory_of(name, tokens, options.threads) for name in names}
        seconds = times(names, tokens, options.threads, options.repeats)
        for name in names:
            for values, unit, which in ((seconds, "s", 0), (memory, "MiB", 1)):
                base, goal, ratio = "", None, None
                if names is SHORT and name == "mass":
                    goal, ratio = EAGER_GOALS[which], values["eager"] / values[name]
                    base = "eager"
                elif names is LONG and not name.startswith("sdpa"):
                    base = "sdpa train" if name == "train" else "sdpa"
                    goal, ratio = GOALS.get(name, (None, None))[which], values[name] / values[base]
                met = None if goal is None else ratio >= goal if base == "eager" else ratio <= goal
                sign = ">=" if base == "eager" else "<="
                text = "" if goal is None else f"{sign} {goal:g}x"
                what = f"{'time' if which == 0 else 'peak memory'}, {WORDS[name]}, T = {tokens}"
                note = (
                    ""
                    if not base
                    else f"ratio: {WORDS[base]} / this"
                    if base == "eager"
                    else f"ratio: this / {WORDS[base]}"
                )
                rows.append(
                    row(
                        "attention, CPU",
                        what,
                        values[name],
                        unit,
                        ratio=ratio,
                        goal=text,
                        met=met,
                        note=note,
                        threads=options.threads,
                    )
                )
                if goal is not None:
                    words.append(f"{name} {'time' if which == 0 else 'memory'} {ratio:.2f}x ({text} {base})")
    write(rows, options.out)
    print("; ".join(words))


def memory_of(name: str, tokens: int, threads: int) -> float:
    """Return the MiB that a call takes at its peak, in a process of its own."""
    job = {"name": name, "tokens": tokens, "threads": threads}
    worker = Worker(sys.executable, Path(__file__).resolve(), job)
    try:
        answer = worker.call()
    finally:
        worker.close()
    print(f"{name}, T = {tokens}: {answer['peak_mib'] - answer['baseline_mib']:.1f} MiB", file=sys.stderr)
    return answer["peak_mib"] - answer["baseline_mib"]


def times(names: tuple[str, ...], tokens: int, threads: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of each contender, called in turn after one call to warm up."""
    import torch

    torch.set_num_threads(threads)
    given = inputs(tokens)
    took: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats + 1):
        for name in names if number % 2 == 0 else names[::-1]:
            call = contender(name, given)
            began = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in took.items()}


def inputs(tokens: int) -> dict[str, Any]:
    """The arguments of ``attend``: one sink, a quarter of the text prompt, the rest context."""
    import torch

    generator = torch.Generator().manual_seed(0)
    row = torch.arange(tokens)
    q, k, v = (torch.randn(1, heads, tokens, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    none = k[:, :, :, None, :][:, :, :, :0]
    segments = torch.where(row == 0, 0, torch.where(row < tokens // 4, 1, 2))[None]
    return {
        **{"q": q, "context_k": k, "context_v": v, "own_k": none, "own_v": none},
        **{"rows": row[None], "segments": segments, "scale": WIDTH**-0.5},
    }


def contender(name: str, given: dict[str, Any]) -> Callable[[], Any]:
    """Return the call to be measured."""
    import torch

    from driftlab.attention import Stats, attend

    tensors = [given[key] for key in ("q", "context_k", "context_v")]

    def sdpa(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    def trained(function: Callable[..., torch.Tensor]) -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        function(*leaves).backward(tensors[0])

    if name == "sdpa":
        return lambda: sdpa(*tensors)
    if name == "sdpa train":
        return lambda: trained(sdpa)
    if name == "train":
        return lambda: trained(
            lambda q, k, v: attend(**{**given, "q": q, "context_k": k, "context_v": v}, stats=Stats()).out
        )
    if name == "eager":
        return lambda: eager(given)
    stats = {"bare": Stats(), "mass": Stats(mass=True), "entropy": Stats(mass=True, entropy=True)}[name]
    return lambda: attend(**given, stats=stats)


def eager(given: dict[str, Any]) -> tuple[Any, Any]:
    """Output and masses as from transformers' ``eager_attention_forward``, which returns the map, summed by segment."""
    import torch

    q, k, v = (given[key] for key in ("q", "context_k", "context_v"))
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (k, v))
    tokens = q.shape[2]
    mask = torch.full((tokens, tokens), torch.finfo(q.dtype).min).triu(1)
    weights = torch.matmul(q, k.transpose(2, 3)) * given["scale"]
    weights = weights + mask
    weights = torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.matmul(weights, v).transpose(1, 2).contiguous()
    mass = [weights.masked_fill(given["segments"][:, None, None] != segment, 0).sum(-1) for segment in range(4)]
    return out, torch.stack(mass, -1)


def build(job: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Be a worker that measures memory: the libraries are loaded by the same call on a text long enough to go the same way."""
    import torch

    torch.set_num_threads(job["threads"])
    contender(job["name"], inputs(256))()
    call = contender(job["name"], inputs(job["tokens"]))
    baseline = peak_mib()

    def run() -> dict[str, Any]:
        result = call()
        return {"baseline_mib": baseline, "peak_mib": peak_mib(), "answered": result is not None}

    return run


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        serve(build)
    else:
        main()
