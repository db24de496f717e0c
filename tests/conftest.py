"""Shared fixtures. The import hook checks every jaxtyping annotation of the package in every test.

The package is imported inside fixtures and tests only after the hook is installed here.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # two threads make each small product of Triton's interpreter slow

import pytest  # noqa: E402
import torch  # noqa: E402  (does not import triton)
from jaxtyping import install_import_hook  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

_HERE = Path(__file__).parents[1] / "driftlab"
# Triton compiles the source of its functions: those of *_kernels.py cannot be wrapped
_CHECKED = [
    f"driftlab.{path.relative_to(_HERE).with_suffix('').as_posix().replace('/', '.')}"
    for path in _HERE.rglob("*.py")
    if path.stem not in ("__init__", "__main__") and not path.stem.endswith("_kernels")
]
_HOOK = install_import_hook(_CHECKED, "beartype.beartype")
_HOOK.__enter__()

# tiny tensors: threads of one operation would only wait for each other
torch.set_num_threads(1)

#: the files that take longest, longest first: whole files are dealt to the test processes, and the last should be short ones
LONGEST = (
    *("test_sampled_replay", "test_fused", "test_aot", "test_doctor", "test_training", "test_ablate", "test_targets"),
    *("test_speculation", "test_cli_probe", "test_continuous", "test_demo", "test_trees", "test_chain", "test_record"),
    *(
        "test_replay",
        "test_interventions",
        "test_export",
        "test_blocked",
        "test_interventions_attention",
        "test_probes",
    ),
)


def pytest_collection_modifyitems(items):
    """Run the longest files first."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


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


#: what a family's config takes beside the shapes that all have
FAMILIES = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 8},
    "Gemma": {"head_dim": 8},
    "Gemma3": {"head_dim": 8, "sliding_window": 8},
    "GptOss": {
        **{"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "DeepseekV3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
        **{"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    },
}


def tiny_model(family: str, layers: int = 7, seed: int = 0, scale: float = 10.0, **overrides):
    """A random model of a family, scaled like :func:`tiny_llama` and more, so that its greedy texts hardly repeat."""
    import transformers

    torch.manual_seed(seed)
    values = {
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": 0},
    }
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config(**{**values, **FAMILIES[family], **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(scale)
        elif not name.endswith("bias"):
            parameter.uniform_(0.5, 2.0)
    return model


def tiny_fast_tokenizer():
    """A tokenizer that can be saved: one token a letter or space, BOS first, no chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {letter: 3 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": BOS, "</s>": EOS, **letters}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


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


@pytest.fixture(scope="session")
def train_tiny(tmp_path_factory):
    """Return a function that trains a drafter of a variant on a recording until it has learnt most of it by heart."""
    from driftlab import VARIANTS, Drafter, TrainConfig, train

    def train_one(trajectory, variant: str = "eagle3", epochs: float = 35.0):
        drafter = Drafter(VARIANTS[variant].for_target(trajectory), trajectory)
        config = TrainConfig(ttt=3, lr=6e-3, batch_size=4, epochs=epochs, save_every=0)
        return train(drafter, trajectory, config, out=tmp_path_factory.mktemp("drafter") / variant).eval()

    return train_one


@pytest.fixture(scope="session")
def varied_target():
    """A 7-layer random Llama whose greedy texts hardly repeat: one row too many or too few is another token."""
    from driftlab import Target

    model = tiny_model("Llama")
    model.lm_head.weight.mul_(3)  # a distribution sharp enough to be learnt in seconds
    return Target(model, TinyTokenizer(), name="varied", aux_layers=(1, 3, 5))


@pytest.fixture(scope="session")
def varied_trajectory(varied_target, tmp_path_factory):
    """Four recorded sequences, as in ``tiny_trajectory``, with a dozen different tokens each."""
    prompts = ["hello world", "abc", "q", "another longer prompt here"]
    out = tmp_path_factory.mktemp("recording") / "varied"
    return varied_target.record(prompts, max_new_tokens=24, template=False, out=out)


@pytest.fixture(scope="session")
def trained(train_tiny, varied_trajectory):
    """The four variants, trained on the varied recording, by name."""
    from driftlab import VARIANTS

    return {variant: train_tiny(varied_trajectory, variant) for variant in VARIANTS}
