"""Shared fixtures. The import hook checks every jaxtyping annotation of the package in every test.

The package is imported inside fixtures and tests only after the hook is installed here.
"""

from __future__ import annotations

import pytest
from jaxtyping import install_import_hook

_HOOK = install_import_hook("driftlab", "beartype.beartype")
_HOOK.__enter__()

import torch  # noqa: E402

VOCAB, EOS, BOS = 61, 2, 1


class TinyTokenizer:
    """One token a character; adds BOS (id 1); has no chat template."""

    chat_template = None
    bos_token_id, eos_token_id = BOS, EOS

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [3 + ord(character) % (VOCAB - 3) for character in text]
        return {"input_ids": [BOS, *ids] if add_special_tokens else ids}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def tiny_llama(layers: int = 7, seed: int = 0, scale: float = 4.0, **overrides):
    """A random Llama whose texts vary: weights scaled up so that the greedy choice is not one token for ever."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    values = {
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"eos_token_id": EOS, "bos_token_id": BOS},
    }
    model = LlamaForCausalLM(LlamaConfig(**{**values, **overrides})).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(scale)
        else:
            parameter.uniform_(0.5, 2.0)
    return model


@pytest.fixture(scope="session")
def tiny_target():
    """A 7-layer random Llama as a target that captures states 1, 3 and 5."""
    from driftlab import Target

    return Target(tiny_llama(), TinyTokenizer(), name="tiny", aux_layers=(1, 3, 5))


@pytest.fixture(scope="session")
def tiny_trajectory(tiny_target, tmp_path_factory):
    """Four recorded sequences of different prompt lengths, 24 greedy tokens each at most."""
    prompts = ["hello world", "abc", "q", "another longer prompt here"]
    out = tmp_path_factory.mktemp("recording") / "tiny"
    return tiny_target.record(prompts, max_new_tokens=24, template=False, out=out)


@pytest.fixture
def make_drafter(tiny_trajectory):
    """Return a function that builds a drafter of a variant for the tiny target, with gains far from one."""
    from driftlab import VARIANTS, Drafter

    def make(variant: str = "eagle3", *, seed: int = 0, draft_vocab=None, target=None, scale: float = 6.0, **overrides):
        target = target or tiny_trajectory
        size = VOCAB if draft_vocab is None else len(draft_vocab)
        config = VARIANTS[variant].for_target(target, draft_vocab_size=size, **overrides)
        drafter = Drafter(config, target, draft_vocab=draft_vocab, seed=seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.ndim == 1:
                    parameter.uniform_(0.5, 2.0, generator=generator)
                else:
                    parameter.mul_(scale)
        return drafter.eval()

    return make
