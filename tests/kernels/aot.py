"""Compile every shipped configuration of the kernels ahead of time, without a GPU, and write what the machine code uses.

    python aot.py FOLDER [module ...]     FOLDER/aot.json and aot.txt, of replay_kernels and chain_kernels by default

To be run in a process without TRITON_INTERPRET: one process cannot hold both interpreter and compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

MODULES = ("replay_kernels", "chain_kernels")
OTHER_ARCHITECTURES = (80, 100)
"""compiled for the first case of each kernel only: sm_90 is the machine the tiles are chosen for"""


def cases(modules):
    """All cases of those modules that there are."""
    for module in modules:
        if find_spec(f"driftlab.kernels.{module}"):
            yield from import_module(f"driftlab.kernels.{module}").aot_cases()


def compiled(case, architecture):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    unknown = set(case.types) | set(case.constexprs)
    if unknown != set(names):
        raise SystemExit(f"{case.name}: arguments that do not match the kernel's: {sorted(unknown ^ set(names))}")
    signature = {n: "constexpr" if n in case.constexprs else case.types[n] for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in case.aligned}
    source = ASTSource(case.kernel, signature=signature, constexprs=dict(case.constexprs), attrs=attrs)
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(kernel):
    """Registers, spills and instructions, from the machine code itself."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([tools / tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flag in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )

    def count(instruction):
        return len(re.findall(rf"\b{instruction}", sass))

    # spills before and after the loops on tensor cores cost nothing that counts
    lines = sass.splitlines()
    products = [i for i, line in enumerate(lines) if re.search(r"\bH[GM]?MMA\b", line)]
    inner = lines[products[0] : products[-1]] if products else lines
    return {
        "regs": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": count("LDL") + count("STL"),
        "inner_spills": sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in inner),
        "smem": kernel.metadata.shared,
        "wgmma": count("HGMMA"),
        "mma": count("HMMA"),
        "cp_async": count("LDGSTS"),
    }


def main():
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise SystemExit("unset TRITON_INTERPRET: this needs the compiler")
    import triton

    folder = Path(sys.argv[1])
    rows, seen = [], set()
    for case in cases(sys.argv[2:] or MODULES):
        first = case.kernel.__name__ not in seen
        seen.add(case.kernel.__name__)
        for architecture in (90, *(OTHER_ARCHITECTURES if first else ())):
            began = time.monotonic()
            kernel = compiled(case, architecture)
            row = {"name": case.name, "sm": architecture, "warps": case.warps, "stages": case.stages}
            row |= {"wants_wgmma": case.wants_wgmma, "wants_async": case.wants_async}
            if architecture == 90:
                row |= resources(kernel)
            else:
                row |= {"smem": kernel.metadata.shared, "cubin": len(kernel.asm["cubin"])}
            rows.append({**row, "seconds": round(time.monotonic() - began, 2), "triton": triton.__version__})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "aot.json").write_text(json.dumps(rows, indent=1))
    columns = ("sm", "warps", "stages", "regs", "spills", "inner_spills", "smem", "wgmma", "mma", "cp_async", "seconds")
    lines = [f"{'triton ' + triton.__version__:<40}" + "".join(f"{c:>13}" for c in columns)]
    lines += [f"{row['name']:<40}" + "".join(f"{row.get(c, ''):>13}" for c in columns) for row in rows]
    (folder / "aot.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
