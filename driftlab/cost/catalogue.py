"""Shapes of public models and data of public machines, with the document that each is from.

Model shapes are those of the models' own config.json; the tests hold their totals to the published ones. Peaks are dense.
"""

from __future__ import annotations

from dataclasses import replace

from driftlab.cost.hardware import Hardware
from driftlab.cost.shapes import Experts, Gqa, Mla, ModelShape, UnknownAttention

MXFP4 = 4.25 / 8
"""Bytes per weight: 4 bits and an 8-bit scale for 32 (gpt-oss model card: 4.25 bits)."""
NVFP4 = 4.5 / 8
"""Bytes per weight: 4 bits and an 8-bit scale for 16."""

_LLAMA_8B = Gqa(heads=32, kv_heads=8, head_dim=128)

#: Llama 3.1 model card: 8.03e9 parameters
LLAMA31_8B = ModelShape("Llama-3.1-8B", 32, 4096, 128256, _LLAMA_8B, ffn=14336)

#: Qwen3 technical report (arXiv 2505.09388): 8.2e9 parameters
QWEN3_8B = ModelShape("Qwen3-8B", 36, 4096, 151936, _LLAMA_8B, ffn=12288)

#: SmolLM2 model card: 135e6 parameters, embedding tied to the head
SMOLLM2_135M = ModelShape("SmolLM2-135M", 30, 576, 49152, Gqa(9, 3, 64), ffn=1536, tied=True)

#: gpt-oss model card (arXiv 2508.10925): 116.83e9 parameters, 5.13e9 active; every other layer sees 128 tokens
GPT_OSS_120B = ModelShape(
    "gpt-oss-120b",
    layers=36,
    hidden=2880,
    vocab=201088,
    attention=Gqa(heads=64, kv_heads=8, head_dim=64, bias=True),
    experts=Experts(count=128, active=4, width=2880, bias=True),
    window=128,
    windowed_layers=18,
    bytes_experts=MXFP4,
)

#: the same card: 20.91e9 parameters, 3.61e9 active
GPT_OSS_20B = replace(
    GPT_OSS_120B,
    name="gpt-oss-20b",
    layers=24,
    windowed_layers=12,
    experts=Experts(count=32, active=4, width=2880, bias=True),
)

#: DeepSeek-V3 technical report (arXiv 2412.19437): 671e9 parameters, 37e9 active; FP8 weights
DEEPSEEK_V3 = ModelShape(
    "DeepSeek-V3",
    layers=61,
    hidden=7168,
    vocab=129280,
    attention=Mla(heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    ffn=18432,
    experts=Experts(count=256, active=8, width=2048, shared=1),
    dense_layers=3,
    bytes_experts=1.0,
    bytes_attention=1.0,
    bytes_dense=1.0,
)

#: Kimi K2 model card: 1e12 parameters, 32e9 active; K2.5, K2.6 and K2.7 keep the shape. Routed experts in NVFP4, the rest
#: in bfloat16
KIMI_K2_NVFP4 = ModelShape(
    "Kimi-K2-NVFP4",
    layers=61,
    hidden=7168,
    vocab=163840,
    attention=Mla(heads=64, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    ffn=18432,
    experts=Experts(count=384, active=8, width=2048, shared=1),
    dense_layers=1,
    bytes_experts=NVFP4,
)

#: the same model with routed experts in MXFP4
KIMI_K2_MXFP4 = replace(KIMI_K2_NVFP4, name="Kimi-K2-MXFP4", bytes_experts=MXFP4)

#: DeepSeek-V4-Flash: 43 layers, 256 routed experts of which 6 are active and one shared (NeMo AutoModel documentation), 284e9
#: parameters and 13e9 active (model card), FP4 experts and FP8 rest. Widths 4096 and 2048 are inferred: with them the routed
#: experts hold 277e9 of the 284e9. Its attention (compressed and sparse) is not described here: the weights a layer are what
#: is left of the 284e9.
DEEPSEEK_V4_FLASH = ModelShape(
    "DeepSeek-V4-Flash",
    layers=43,
    hidden=4096,
    vocab=129280,
    attention=UnknownAttention(weights=110_000_000),
    experts=Experts(count=256, active=6, width=2048, shared=1),
    bytes_experts=MXFP4,
    bytes_attention=1.0,
    bytes_dense=1.0,
)

#: NVIDIA H100 and H200 data sheets (SXM); link: NVLink 4, 900 GB/s both ways
H100 = Hardware("H100 SXM", 3.35e12, {"bf16": 989e12, "fp8": 1979e12}, 450e9, "NVIDIA H100 data sheet")
H200 = Hardware("H200 SXM", 4.8e12, {"bf16": 989e12, "fp8": 1979e12}, 450e9, "NVIDIA H200 data sheet")

#: NVIDIA Blackwell architecture brief: HGX B200 at 1000 W and GB200 at 1200 W; link: NVLink 5, 1.8 TB/s both ways
B200 = Hardware(
    "B200",
    8e12,
    {"bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12},
    900e9,
    "NVIDIA Blackwell architecture brief (HGX B200)",
)
GB200 = Hardware(
    "GB200",
    8e12,
    {"bf16": 2500e12, "fp8": 5000e12, "fp4": 10000e12},
    900e9,
    "NVIDIA Blackwell architecture brief (GB200)",
)
#: NVIDIA HGX B300 data sheet
B300 = Hardware("B300", 8e12, {"bf16": 2250e12, "fp8": 4500e12, "fp4": 14000e12}, 900e9, "NVIDIA HGX B300 data sheet")

#: AMD Instinct MI355X data sheet; link: Infinity Fabric, 1075 GB/s both ways
MI355X = Hardware(
    "MI355X", 8e12, {"bf16": 2500e12, "fp8": 5000e12, "fp4": 10000e12}, 537e9, "AMD Instinct MI355X data sheet"
)
