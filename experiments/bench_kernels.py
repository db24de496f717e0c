"""The Triton kernels on a GPU: first right, then how fast, as shares of what the machine itself can copy and multiply.

    python experiments/bench_kernels.py [--out FOLDER]     one CUDA device, under 8 minutes
    python experiments/bench_kernels.py --dry-run          tiny shapes on a CPU in Triton's interpreter: does the script run?

Sections, each written to ``kernels.json`` as soon as it is done, so that a stop loses only the one that runs:

    tests     tests/kernels, compiled
    machine   bytes copied per second (2 GB), bf16 products per second
    replay    attention of 4,096 starts at T = 4k, 32k, 128k, probes on and off; its entropy against
              lse - scale q . attn(q, K, V=K), which needs no T x T map
    backward  gradients by recomputation, forward + backward, Triton forward against plain torch
    step      one draft step at batch 1 of a Llama-3.1-8B-size drafter with random weights: its bytes (weights once,
              748.7 MB, and keys) at the copy rate, over its time: first bar 65 %, goal 85 %
    chain     K = 1..8 tokens in one CUDA graph, against eager torch and torch.compile with CUDA graphs; tokens must be equal
    demo      rows of ``driftlab demo`` on CUDA against those on a CPU, where the default target is in the cache

A dry run measures no time or rate that means anything, and prints none; it prints how far the answers are off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from driftlab import Drafter, DrafterConfig
from driftlab.attention import Stats, attend
from driftlab.draft import Chain, DraftState, greedy_tokens
from driftlab.drafter.blocks import LayerKV
from driftlab.files import write_json
from driftlab.fused import FusedChain

SEED = 0


def main() -> None:
    """Run the sections that are wanted, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench_kernels"))
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU; start with TRITON_INTERPRET=1")
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    args = parser.parse_args()
    if args.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit(
            "a dry run needs the interpreter: TRITON_INTERPRET=1 python experiments/bench_kernels.py --dry-run"
        )
    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is seen: there is nothing to measure; --dry-run tries the script")
    result: dict[str, Any] = {"dry_run": args.dry_run, "versions": versions()}
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        began = time.perf_counter()
        try:
            result[name] = SECTIONS[name](args.dry_run, result)
        except Exception as error:  # the sections after it are measured all the same
            result[name] = [{"what": name, "failed": f"{type(error).__name__}: {error}"}]
        for row in result[name]:
            print(
                f"{name:9} " + "  ".join(f"{key} {shown(key, value, args.dry_run)}" for key, value in row.items()),
                flush=True,
            )
        result.setdefault("seconds", {})[name] = round(time.perf_counter() - began, 1)
        write_json(args.out / "kernels.json", result)
    failed = [name for name in args.only if any("failed" in row for row in result[name])]
    print(
        f"{len(args.only) - len(failed)} of {len(args.only)} sections ran"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    sys.exit(bool(failed))


def shown(name: str, value: Any, dry_run: bool) -> str:
    """A time or a rate measured in a dry run means nothing; an error does."""
    if isinstance(value, float):
        return "-" if dry_run and not name.endswith(("error", "difference")) else f"{value:.4g}"
    return str(value)


def versions() -> dict[str, str]:
    """What ran, on what."""
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": torch.__version__, "triton": triton.__version__, "device": device}


def seconds(run: Callable[[], object], dry_run: bool, repeats: int = 20) -> float:
    """Median time of a call, by CUDA events after a warm-up."""
    if dry_run:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def place(dry_run: bool) -> tuple[torch.device, torch.dtype]:
    """Where, and in what."""
    return (torch.device("cpu"), torch.float32) if dry_run else (torch.device("cuda"), torch.bfloat16)


def peak(run: Callable[[], object], dry_run: bool) -> float | None:
    """MB above what is allocated already; None without a GPU."""
    if dry_run:
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def tests(dry_run: bool, _: dict[str, Any]) -> list[dict[str, Any]]:
    """tests/kernels in a process of its own, without the interpreter."""
    folder = Path(__file__).parent.parent / "tests" / "kernels"
    wanted = ["--collect-only"] if dry_run else []
    environment = {key: value for key, value in os.environ.items() if dry_run or key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *wanted, str(folder)],
        **{"env": environment, "capture_output": True, "text": True, "check": False},
    )
    last = (run.stdout.strip().splitlines() or ["no output"])[-1]
    row: dict[str, Any] = {"what": "tests/kernels", "said": last}
    return [row if run.returncode == 0 else {**row, "failed": run.stdout[-3000:]}]


def machine(dry_run: bool, _: dict[str, Any]) -> list[dict[str, Any]]:
    """Copy rate (read and written bytes) and bf16 matmul rate."""
    device, dtype = place(dry_run)
    source = torch.ones(2**12 if dry_run else 10**9, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    copy = 2 * len(source) / seconds(lambda: sink.copy_(source), dry_run) / 1e9
    n = 32 if dry_run else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    rate = 2 * n**3 / seconds(lambda: a @ b, dry_run) / 1e12
    return [{"what": "copy", "gb_per_s": copy}, {"what": "matmul bf16", "tflop_per_s": rate}]


def attention_case(tokens: int, starts: int, dry_run: bool, own: int = 3) -> dict[str, Any]:
    """Random queries of a 32/8-head layer of head size 128, starts spread evenly over the text."""
    device, dtype = place(dry_run)
    heads, kv_heads, width = (4, 2, 16) if dry_run else (32, 8, 128)
    generator = torch.Generator(device=device).manual_seed(SEED)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    rows = torch.linspace(0, tokens - 1, starts, device=device).long()[None]
    place_of = torch.arange(tokens, device=device)
    segments = torch.where(place_of < tokens // 4, 1, 2)
    segments[0] = 0
    return {
        **{"q": random(1, heads, starts, width), "context_k": random(1, kv_heads, tokens, width)},
        **{"context_v": random(1, kv_heads, tokens, width), "own_k": random(1, kv_heads, starts, own, width)},
        **{"own_v": random(1, kv_heads, starts, own, width), "rows": rows, "segments": segments[None]},
        "scale": width**-0.5,
    }


def replay(dry_run: bool, _: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay attention at three lengths; milliseconds, TFLOP/s, memory, and the error of its entropy."""
    rows, probes = [], Stats(mass=True, entropy=True)
    for tokens in (16, 24, 40) if dry_run else (4096, 32768, 131072):
        case = attention_case(tokens, 8 if dry_run else 4096, dry_run)
        heads, starts, width = case["q"].shape[1:]
        flop = 4 * heads * width * float((case["rows"] + 1).sum() + starts * case["own_k"].shape[3])
        times = {}
        for name, stats in (("off", Stats()), ("on", probes)):

            def run(stats: Stats = stats, case: dict[str, Any] = case) -> Any:
                return attend(**case, stats=stats, backend="triton")

            times[name] = seconds(run, dry_run, 10)
            row = {"T": tokens, "starts": starts, "probes": name, "ms": times[name] * 1e3}
            rows.append({**row, "tflop_per_s": flop / times[name] / 1e12, "peak_mb": peak(run, dry_run)})
        answer = attend(**case, stats=probes, backend="triton")
        keys = {**case, "context_v": case["context_k"], "own_v": case["own_k"]}
        mean_key = attend(**keys, backend="triton").out.float()
        identity = answer.lse - case["scale"] * (case["q"].float() * mean_key).sum(-1)
        rows.append(
            {
                **{"T": tokens, "what": "probes cost", "ratio": times["on"] / times["off"]},
                **{"mass_sum_error": float((answer.mass.sum(-1) - 1).abs().max())},
                **{"entropy_error": float((answer.entropy - identity).abs().max())},
            }
        )
    return rows


def backward(dry_run: bool, _: dict[str, Any]) -> list[dict[str, Any]]:
    """Forward + backward of attention in training, both backends side by side."""
    case = attention_case(24 if dry_run else 4096, 8 if dry_run else 2048, dry_run)
    names = ("q", "context_k", "context_v", "own_k", "own_v")
    rows, grads = [], {}
    for backend in ("torch", "triton"):

        def run(backend: str = backend) -> list[torch.Tensor]:
            leaves = {name: case[name].detach().requires_grad_() for name in names}
            out = attend(**{**case, **leaves}, backend=backend).out
            return list(torch.autograd.grad(out.float().square().sum(), list(leaves.values())))

        rows.append({"backend": backend, "ms": seconds(run, dry_run, 5) * 1e3, "peak_mb": peak(run, dry_run)})
        grads[backend] = run()
    pairs = zip(grads["torch"], grads["triton"], strict=True)
    error = max(float((a - b).float().norm() / a.float().norm().clamp(min=1e-9)) for a, b in pairs)
    return [*rows, {"what": "gradients", "relative_difference": error}]


def drafter_of_size(dry_run: bool) -> Drafter:
    """A Llama-3.1-8B-size EAGLE 3.1 drafter with random weights."""
    device, dtype = place(dry_run)
    shapes: dict[str, Any] = {
        **{"hidden_size": 4096, "target_hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "draft_vocab_size": 32000},
    }
    if dry_run:
        shapes = {
            **{"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "draft_vocab_size": 40},
        }
    config = DrafterConfig(
        **shapes,
        **{"aux_layers": (2, 16, 29), "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "own_embed": True},
        **{"fc_norm": True, "norm_output": True},
    )
    drafter = Drafter(config, draft_vocab=range(config.draft_vocab_size))
    return drafter.to(device, dtype).eval().requires_grad_(False)


def prefilled(drafter: Drafter, context: int) -> DraftState:
    """The state at depth 1 after ``context`` rows of random states."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, drafter.config.vocab_size, (1, context), generator=generator).to(drafter.device)
    aux = torch.randn(1, context, 3, drafter.config.target_hidden_size, generator=generator)
    chain = Chain(drafter, prompt_lengths=[context // 2])
    chain.extend(tokens, aux.to(drafter.device, drafter.dtype))
    return chain.take()


def step_bytes(drafter: Drafter, context: int) -> float:
    """What a draft step at batch 1 must read: q, k, v, o, gate, up, down, head once, and the keys and values."""
    layer = drafter.layers[0]
    matrices = [*layer.self_attn.parameters(), *layer.mlp.parameters(), drafter.lm_head.weight]
    config = drafter.config
    keys = 2 * context * config.num_key_value_heads * config.head_dim
    return float(sum(m.numel() * m.element_size() for m in matrices) + keys * drafter.lm_head.weight.element_size())


def eager(drafter: Drafter, first: DraftState, depth: int) -> torch.Tensor:
    """The same chain by the modules, without kernels."""
    with torch.no_grad(), drafter.using("torch"):
        state = replace(first, kv=[LayerKV(kv.k, kv.v) for kv in first.kv])  # its own keys grow in place
        tokens = [greedy_tokens(drafter, state.normed)]
        while len(tokens) < depth:
            state = drafter.next(state, tokens[-1])
            tokens.append(greedy_tokens(drafter, state.normed))
        return torch.cat(tokens, 1)


def step(dry_run: bool, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One draft step, from the difference of chains of 8 and of 4 tokens."""
    drafter, context = drafter_of_size(dry_run), 24 if dry_run else 2048
    state = prefilled(drafter, context)
    depths, times = (2, 3) if dry_run else (4, 8), []
    for depth in depths:
        fused = FusedChain(drafter)
        times.append(seconds(lambda k=depth, f=fused: f.draft(state, k), dry_run))
    each = (times[1] - times[0]) / (depths[1] - depths[0])
    read = step_bytes(drafter, context)
    copy = next((row["gb_per_s"] for row in result.get("machine", []) if row.get("what") == "copy"), None)
    share = None if copy is None else read / each / 1e9 / copy
    return [{"what": "draft step", "context": context, "us": each * 1e6, "mb": read / 1e6, "share_of_copy": share}]


def chains(dry_run: bool, _: dict[str, Any]) -> list[dict[str, Any]]:
    """K tokens: kernels in one graph, eager torch, torch.compile with CUDA graphs."""
    drafter, context, rows = drafter_of_size(dry_run), 24 if dry_run else 2048, []
    state = prefilled(drafter, context)
    compiled = None if dry_run else torch.compile(eager, mode="reduce-overhead")
    for depth in (1, 3) if dry_run else range(1, 9):
        fused = FusedChain(drafter)
        tokens = fused.draft(state, depth)
        row: dict[str, Any] = {"K": depth, "equal": bool(torch.equal(tokens, eager(drafter, state, depth)))}
        row["graph_us"] = seconds(lambda k=depth, f=fused: f.draft(state, k), dry_run) * 1e6
        row["eager_us"] = seconds(lambda k=depth: eager(drafter, state, k), dry_run) * 1e6
        if compiled is not None and depth in (1, 4, 8):  # each depth is compiled anew
            row["compiled_us"] = seconds(lambda k=depth: compiled(drafter, state, k), dry_run) * 1e6
        row["peak_mb"] = peak(lambda k=depth, f=fused: f.draft(state, k), dry_run)
        rows.append(row)
    return rows


def demo(dry_run: bool, _: dict[str, Any]) -> list[dict[str, Any]]:
    """Largest difference between the rows of the demo on CUDA and on a CPU."""
    if dry_run:
        return [{"what": "demo", "note": "not part of a dry run"}]
    import tempfile

    import pandas as pd

    with tempfile.TemporaryDirectory() as folder:
        frames = []
        for device in ("cuda", "cpu"):
            out = Path(folder) / device
            run = subprocess.run(
                [sys.executable, "-m", "driftlab", "demo", "--out", str(out), "--device", device],
                **{"capture_output": True, "text": True, "check": False},
            )
            if run.returncode:
                why = (run.stderr.strip().splitlines() or ["no message"])[-1]
                return [{"what": "demo", "note": f"not compared: driftlab demo on {device} ended with {why}"}]
            frames.append(pd.read_parquet(out / "rows.parquet"))
    keys = ["drafter", "prompt", "layer", "head", "depth", "quantity", "window", "feed"]
    both = frames[0].merge(frames[1], on=keys, suffixes=("_cuda", "_cpu"))
    rows = []
    for quantity, part in both.groupby("quantity"):
        difference = (part["value_cuda"] - part["value_cpu"]).abs().max()
        rows.append({"what": quantity, "rows": len(part), "largest_difference": float(difference)})
    return rows


SECTIONS: dict[str, Callable[[bool, dict[str, Any]], list[dict[str, Any]]]] = {
    **{"tests": tests, "machine": machine, "replay": replay, "backward": backward},
    **{"step": step, "chain": chains, "demo": demo},
}


if __name__ == "__main__":
    main()
