"""Write small EAGLE-3 drafters in the layout of vllm-project/speculators, and what its own code computes with them.

Run by hand, inside an environment that has speculators 0.9.0 and a torch for CPUs (not this project's):

    python -m venv speculators-venv
    speculators-venv/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    speculators-venv/bin/pip install "transformers==5.19.0" pydantic pydantic-settings safetensors datasets loguru rich \
        typer httpx openai aiohttp click psutil protobuf
    speculators-venv/bin/pip install speculators==0.9.0 hs-connectors==0.9.0 --no-deps
    speculators-venv/bin/python tests/speculators_oracle.py

(``--no-deps``: it asks for torchvision and torchaudio, which these drafters do not need.)

Each folder of tests/data/oracles/speculators/ is what ``Eagle3DraftModel.save_pretrained`` writes, and expected.safetensors:
``aux [row 3*H]``, ``tokens [row]`` (row t holds the token after t), ``fused [row H]``, and over the depths of its own
``forward`` (teacher forcing; tokens shifted on and zero-padded on the right) ``logits [depth row Vd]`` and
``feedback [depth row H]``, the state that enters layer 0 at the next depth. Gains lie in [0.5, 2]; float32; eager attention.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

OUT = Path(__file__).parent / "data" / "oracles" / "speculators"
ROWS, DEPTHS, VOCAB, DRAFT_VOCAB, WIDTH = 10, 4, 97, 48, 16
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
CASES: dict[str, dict] = {
    **{
        f"llama_f{f}n{n}r{r}": {"fc_norm": bool(f), "norm_output": bool(n), "norm_before_residual": bool(r)}
        for f in (0, 1)
        for n in (0, 1)
        for r in (0, 1)
    },
    "llama_before_fc": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    "qwen3_f1n1r0": {"block": "qwen3", "fc_norm": True, "norm_output": True, "norm_before_residual": False},
    "qwen3_before_fc": {"block": "qwen3", "norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    "qwen3_two_layers_llama3": {
        **{"block": "qwen3", "layers": 2, "rope": LLAMA3, "draft_vocab": VOCAB},
        **{"fc_norm": False, "norm_output": True, "norm_before_residual": True},
    },
    "llama_bias_window": {  # one depth: deeper, it counts the window from the row, where engines count from the position
        **{"window": 3, "bias": True, "depths": 1},
        **{"fc_norm": True, "norm_output": False, "norm_before_residual": True},
    },
}


def config_of(
    *,
    block: str = "llama",
    layers: int = 1,
    rope: dict | None = None,
    window: int = 0,
    bias: bool = False,
    draft_vocab: int = DRAFT_VOCAB,
    **flags: bool,
) -> Eagle3SpeculatorConfig:
    """Return the configuration of a case; eager attention takes any length, its flexible one multiples of 128."""
    shapes = {
        **{
            "hidden_size": WIDTH,
            "intermediate_size": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        **{"num_hidden_layers": layers, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 128},
        **{"rope_parameters": rope or {"rope_type": "default", "rope_theta": 5000.0}, "attention_bias": bias},
    }
    if window:
        shapes |= {"layer_types": ["sliding_attention"] * layers, "sliding_window": window, "use_sliding_window": True}
    layer = AutoConfig.for_model(block, **shapes)
    layer._attn_implementation = "eager"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="driftlab/random", architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )


@torch.no_grad()
def model_of(config: Eagle3SpeculatorConfig, generator: torch.Generator) -> Eagle3DraftModel:
    """Return a drafter with random weights, and every second id of the first ones as its draft vocabulary."""
    model = Eagle3DraftModel(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.8 / parameter.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        else:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 1.5 + 0.5)
    if config.draft_vocab_size < VOCAB:
        ids = torch.arange(0, 2 * config.draft_vocab_size, 2)
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[ids] = True
        model.load_vocab_mappings(t2d, ids - torch.arange(config.draft_vocab_size))
    return model


@torch.no_grad()
def expected(model: Eagle3DraftModel, depths: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Run the model's own unrolled forward and keep what its head gave and what entered its first layer."""
    scales = torch.tensor([1.0, 4.0, 20.0]).repeat_interleave(WIDTH)
    aux = torch.randn(1, ROWS, 3 * WIDTH, generator=generator) * scales
    tokens = torch.randint(1, VOCAB, (1, ROWS), generator=generator)
    logits, entering = [], []
    hooks = [
        model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0].clone())),
        model.layers[0].register_forward_pre_hook(lambda module, args: entering.append(args[0][0, :, WIDTH:].clone())),
    ]
    model(hidden_states=aux, input_ids=tokens, document_ids=torch.zeros_like(tokens), ttt_steps=depths + 1)
    for hook in hooks:
        hook.remove()
    return {
        **{"aux": aux[0].clone(), "tokens": tokens[0].clone(), "fused": entering[0]},
        **{"logits": torch.stack(logits[:depths]), "feedback": torch.stack(entering[1 : depths + 1])},
    }


def main() -> None:
    """Write every case."""
    if importlib.metadata.version("speculators") != "0.9.0":
        sys.exit("these vectors are those of speculators 0.9.0: install that version")
    for seed, (name, case) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(seed)
        depths = case.get("depths", DEPTHS)
        model = model_of(config_of(**{k: v for k, v in case.items() if k != "depths"}), generator)
        folder = OUT / name
        model.save_pretrained(folder)
        (folder / "config.py").unlink(missing_ok=True)  # a copy of its own source
        values = expected(model, depths, generator)
        save_file({key: value.contiguous() for key, value in values.items()}, folder / "expected.safetensors")
        print(name, json.dumps({key: list(value.shape) for key, value in values.items()}))


if __name__ == "__main__":
    main()
