"""MTP heads of every family, under their real names, against transformers' own decoder layer run over a growing list."""

import dataclasses
import json

import pytest
import torch
from builders import random_batch, target_of
from conftest import TinyTokenizer, tiny_model
from safetensors.torch import save_file

VOCAB, WIDTH, DEPTH = 61, 32, 4
MIXED = {"moe_intermediate_size": 20, "num_experts_per_tok": 2, "norm_topk_prob": True}
HYBRID = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
SIGMOID = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    **MIXED,
}
SOFTMAX = {"num_experts": 6, "shared_expert_intermediate_size": 24, **MIXED}
MLA = {
    **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, **SIGMOID},
    "rope_scaling": {
        **{"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 1},
        **{"mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "rope_theta": 10000.0,
}
GLM = {
    **{
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        **SIGMOID,
        "n_group": 1,
        "topk_group": 1,
    },
    **{"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "rope_theta": 1000000.0},
}
QWEN = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, **HYBRID}
KINDS = {
    "deepseek": ("deepseek_v3", "DeepseekV3", MLA, "nextn"),
    "deepseek, queries at once": ("deepseek_v3", "DeepseekV3", {**MLA, "q_lora_rank": None}, "nextn"),
    "glm": ("glm4_moe", "Glm4Moe", GLM, "nextn"),
    "glm, plain attention": ("glm4_moe", "Glm4Moe", {**GLM, "attention_bias": False, "use_qk_norm": False}, "nextn"),
    "qwen3_next": ("qwen3_next", "Qwen3Next", {**QWEN, **SOFTMAX}, "mtp"),
    "qwen3_next, dense": ("qwen3_next", "Qwen3Next", {**QWEN, **SOFTMAX, "mlp_only_layers": [1]}, "mtp"),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5", QWEN, "mtp"),
    "qwen3_5_moe, fused": ("qwen3_5_moe_text", "Qwen3_5Moe", {**QWEN, **SOFTMAX}, "fused"),
    "qwen3_5_moe, transposed": ("qwen3_5_moe_text", "Qwen3_5Moe", {**QWEN, **SOFTMAX}, "transposed"),
    "speculators, qwen3_next": ("qwen3_next", "Qwen3Next", {**QWEN, **SOFTMAX}, "speculators"),
    "speculators, qwen3": ("qwen3", "Qwen3", {"rope_theta": 1e6}, "speculators"),
}
PLUS_ONE = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


def settings_of(kind):
    """config.json of the model, as its publisher writes it."""
    model_type, _, extra, _ = KINDS[kind]
    return {
        **{"model_type": model_type, "hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{
            "vocab_size": VOCAB,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
        },
        **{"max_position_embeddings": 512, "tie_word_embeddings": False},
        **({} if model_type == "deepseek_v3" else {"head_dim": 8}),
        **extra,
    }


class Head(torch.nn.Module):
    """An MTP head around transformers' decoder layer, in its order of things, and nothing of ours."""

    def __init__(self, kind, seed=0):
        import importlib

        import transformers

        super().__init__()
        model_type, family, _, _ = KINDS[kind]
        module = importlib.import_module(
            f"transformers.models.{model_type.removesuffix('_text')}.modeling_{model_type.removesuffix('_text')}"
        )
        config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**settings_of(kind))
        config._attn_implementation = "eager"
        norm = getattr(module, f"{family}RMSNorm")
        index = 0 if family == "Qwen3" else 1  # full attention and, where there are experts, experts
        self.layer = getattr(module, f"{family}DecoderLayer")(config, index)
        rotary = f"{family}TextRotaryEmbedding" if family.startswith("Qwen3_5") else f"{family}RotaryEmbedding"
        self.rotary = getattr(module, rotary)(config)
        self.enorm, self.hnorm, self.norm = (norm(WIDTH, eps=config.rms_norm_eps) for _ in range(3))
        self.proj = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.embed, self.head = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self._spread(seed, family in PLUS_ONE)

    def _spread(self, seed, plus_one):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
                if "e_score_correction" in name or name.endswith("bias"):
                    tensor.normal_(0, 0.2, generator=generator)
                elif name.startswith("rotary"):
                    continue
                elif tensor.ndim == 1:
                    tensor.uniform_(0.5, 2.0, generator=generator).sub_(1.0 if plus_one else 0.0)
                else:
                    tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)

    def norms_and_projection(self):
        return {
            "enorm": self.enorm.weight,
            "hnorm": self.hnorm.weight,
            "proj": self.proj.weight,
            "norm": self.norm.weight,
        }

    @torch.no_grad()
    def chain(self, tokens, states, row, depth, *, post_norm=True, zero_first=False):
        """The chain from ``row``: a growing list of (embedding, state), of which every depth runs the whole."""
        embedded, hidden = self.embed(tokens[1 : row + 2]).clone(), states[: row + 1]
        if zero_first:
            embedded[0] = 0
        steps = []
        for _ in range(depth):
            z = self.proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))[None]
            places = torch.arange(len(embedded))[None]
            mask = torch.full((len(embedded),) * 2, -torch.inf).triu(1)[None, None]
            out = self.layer(z, attention_mask=mask, position_embeddings=self.rotary(z, places), position_ids=places)
            out = (out[0] if isinstance(out, tuple) else out)[0, -1]
            normed = self.norm(out)
            logits = self.head(normed)
            feedback = normed if post_norm else out
            steps.append((int(logits.argmax()), logits, feedback))
            embedded = torch.cat([embedded, self.embed(logits.argmax()[None])])
            hidden = torch.cat([hidden, feedback[None]])
        return steps


def written(head, kind, *, tables=True, layer=2, module=0):
    """The head's tensors under the names of its family."""
    layout = KINDS[kind][3]
    inner = {name: tensor.clone() for name, tensor in head.layer.state_dict().items()}
    if layout not in ("fused", "transposed") and "mlp.experts.gate_up_proj" in inner:
        both, down = inner.pop("mlp.experts.gate_up_proj"), inner.pop("mlp.experts.down_proj")
        for index in range(len(both)):
            gate, up = both[index].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[index]}
            inner |= {f"mlp.experts.{index}.{name}.weight": w.clone() for name, w in parts.items()}
    if layout == "transposed":
        for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            inner[name] = inner[name].transpose(1, 2).contiguous()
    own = {name: tensor.detach().clone() for name, tensor in head.norms_and_projection().items()}
    lent = {
        "embed_tokens.weight": head.embed.weight.detach().clone(),
        "lm_head.weight": head.head.weight.detach().clone(),
    }
    if layout == "nextn":
        prefix = f"model.layers.{layer + module}."
        outer = {"enorm": own["enorm"], "hnorm": own["hnorm"], "eh_proj": own["proj"], "shared_head.norm": own["norm"]}
        if tables:
            outer |= {"embed_tokens": lent["embed_tokens.weight"], "shared_head.head": lent["lm_head.weight"]}
        return {prefix + name: t for name, t in inner.items()} | {
            f"{prefix}{name}.weight": t for name, t in outer.items()
        }
    if layout == "speculators":
        prefix = f"mtp_layers.{module}."
        outer = {
            **{"token_layernorm": own["enorm"], "hidden_layernorm": own["hnorm"], "input_proj": own["proj"]},
            "final_layernorm": own["norm"],
        }
        named = {prefix + name: t for name, t in inner.items()} | {f"{prefix}{n}.weight": t for n, t in outer.items()}
    else:
        outer = {
            **{
                "mtp.pre_fc_norm_embedding": own["enorm"],
                "mtp.pre_fc_norm_hidden": own["hnorm"],
                "mtp.fc": own["proj"],
            },
            "mtp.norm": own["norm"],
        }
        named = {f"mtp.layers.{module}.{name}": t for name, t in inner.items()}
        named |= {f"{name}.weight": t for name, t in outer.items()}
    return named | (lent if tables else {})


def save_to(folder, kind, tensors, **settings):
    """A folder with config.json as the family has it: Qwen3.5 nests the decoder's, speculators too."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**settings_of(kind), **settings}
    if KINDS[kind][3] == "speculators":
        values = {
            **{"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1},
            **{"transformer_layer_config": values, "speculators_config": {"algorithm": "mtp"}},
        }
    elif KINDS[kind][1].startswith("Qwen3_5"):
        rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta"), "mrope_section": [1, 0, 0]}
        values["rope_parameters"] = {
            **rope,
            "partial_rotary_factor": values.pop("partial_rotary_factor"),
            "mrope_interleaved": True,
        }
        values |= {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
        values = {"model_type": values["model_type"].removesuffix("_text"), "text_config": values}
    else:
        values.setdefault("num_nextn_predict_layers", 1)
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read(folder, **given):
    from driftlab.drafter.formats.reading import read_checkpoint

    return read_checkpoint(folder, **given)


def batch_of(seed=3):
    batch = random_batch((14, 9), (6, 1), width=WIDTH)
    generator = torch.Generator().manual_seed(seed)
    last = 3 * torch.randn(2, 14, WIDTH, generator=generator)
    return dataclasses.replace(batch, last_hidden=last, aux_layers=(1, 3, 5))


def close(ours, expected):
    """To 1e-5 of the largest number."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


def check_against(head, drafter, *, post_norm=True, zero_first=False):
    """Tokens, logits and feedback of chains at four depths."""
    from driftlab import chain
    from driftlab.draft import unroll

    batch = batch_of()
    with torch.no_grad():
        states = [state for state, _ in unroll(drafter, batch, DEPTH, feed="own")]
    seen = set()
    for i in (0, 4, 7):
        rows = states[0].starts.rows[:, i]
        tokens = chain(drafter, batch, rows, DEPTH)
        for b, row in enumerate(rows.tolist()):
            steps = head.chain(
                batch.tokens[b], batch.last_hidden[b], row, DEPTH, post_norm=post_norm, zero_first=zero_first
            )
            assert [step[0] for step in steps] == tokens[b].tolist()
            for state, (token, logits, feedback) in zip(states, steps, strict=True):
                close(drafter.logits(state.normed[b, i]), logits)
                close(state.feedback[b, i], feedback)
                seen.add(token)
    assert len(seen) > 3


def same_tables(head):
    """A target whose tables are those of the head, for heads that have none of their own."""
    target = target_of()
    target.head = dataclasses.replace(target.head, embed=head.embed.weight.detach(), lm_head=head.head.weight.detach())
    return target


# ---- every family, four depths


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_what_the_models_own_layer_does(kind, tmp_path):
    head = Head(kind)
    drafter = read(save_to(tmp_path / "m", kind, written(head, kind))).build()
    assert drafter.config.architecture == "mtp"
    assert drafter.config.own_embed
    assert drafter.config.lm_head == "own"
    check_against(head, drafter)


@pytest.mark.parametrize("kind", ["deepseek", "qwen3_next", "qwen3_5", "speculators, qwen3"])
def test_embedding_and_head_are_the_targets_where_the_file_has_none(kind, tmp_path):
    from driftlab import DriftlabError

    head = Head(kind)
    reading = read(save_to(tmp_path / "m", kind, written(head, kind, tables=False)))
    drafter = reading.build(same_tables(head))
    check_against(head, drafter)
    assert any(note.startswith("own_embed: off") for note in drafter.notes)
    assert any(note.startswith("lm_head: target") for note in drafter.notes)
    with pytest.raises(DriftlabError, match="pass target="):
        reading.build()


@pytest.mark.parametrize("kind", ["deepseek", "glm"])
def test_the_switches_in_which_engines_differ(kind, tmp_path):
    """GLM's feedback in vLLM is taken before the norm; vLLM zeroes the embedding of row 0 for both."""
    head = Head(kind)
    reading = read(save_to(tmp_path / "m", kind, written(head, kind)))
    sources = {row.name: (row.value, row.source) for row in reading.conventions}
    assert sources["norm_output"] == (True, "assumed")
    assert sources["zero_first_embedding"] == (False, "assumed")
    assert any("vLLM puts zeros" in note for note in reading.notes)
    assert any("norm_output=False" in note for note in reading.notes) == (kind == "glm")
    vllm = read(reading.path, norm_output=False, zero_first_embedding=True)
    assert {row.name: row.source for row in vllm.conventions}["norm_output"] == "given"
    check_against(head, vllm.build(), post_norm=False, zero_first=True)
    with pytest.raises(AssertionError):
        check_against(head, reading.build(), post_norm=False)
    with pytest.raises(AssertionError):
        check_against(head, reading.build(), zero_first=True)


def test_deepseeks_layer_is_transformers_own_mtp_layer(tmp_path):
    """Its MtpLayer is a second reference, for depth 1: order of the concatenation, norms, where the stream starts."""
    from transformers.modeling_layers import MtpLayer
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

    head = Head("deepseek")
    drafter = read(save_to(tmp_path / "m", "deepseek", written(head, "deepseek"))).build()
    layer = MtpLayer(head.layer.self_attn.config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, 1)
    own = head.norms_and_projection()
    layer.load_state_dict(
        {
            **{"enorm.weight": own["enorm"], "hnorm.weight": own["hnorm"], "eh_proj.weight": own["proj"]},
            **{"post_norm.weight": own["norm"]},
            **{f"mtp_block.{name}": tensor for name, tensor in head.layer.state_dict().items()},
        }
    )
    batch = batch_of()
    tokens, states = batch.tokens[:1], batch.last_hidden[:1, :-1]
    embedded, places = head.embed(tokens[:, 1:]), torch.arange(13)[None]
    mask = torch.full((13, 13), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        normed = layer(embedded, states, head.rotary(states, places), mask, places, None)
        logits = drafter(tokens, batch.last_hidden[:1, :, None])
        close(logits, head.head(normed))


# ---- where a head stands


def test_in_a_sharded_target_only_its_own_tensors_are_read(tmp_path):
    """The other shards are not even there."""
    head, kind = Head("deepseek"), "deepseek"
    folder = save_to(tmp_path / "m", kind, written(head, kind, tables=False))
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    names = written(head, kind, tables=False)
    absent = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight")
    where = dict.fromkeys(absent, "model-00001-of-00002.safetensors")
    where |= dict.fromkeys(names, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    reading = read(folder)
    assert set(reading.tensors) == set(reading.shapes)
    check_against(head, reading.build(same_tables(head)))


def test_in_a_whole_target_tables_beside_the_head_are_the_targets(tmp_path):
    """Only in a folder that holds the head alone are they the head's."""
    head, kind = Head("qwen3_next"), "qwen3_next"
    others = {"model.layers.0.mlp.gate_proj.weight": torch.zeros(4, 4), "model.norm.weight": torch.zeros(WIDTH)}
    tables = {
        "model.embed_tokens.weight": torch.full((VOCAB, WIDTH), 7.0),
        "lm_head.weight": torch.full((VOCAB, WIDTH), 7.0),
    }
    tensors = written(head, kind, tables=False) | others | tables
    drafter = read(save_to(tmp_path / "m", kind, tensors)).build(same_tables(head))
    assert not drafter.config.own_embed
    check_against(head, drafter)


def test_copies_of_the_targets_tables_may_be_left_unread(tmp_path):
    head, kind = Head("deepseek"), "deepseek"
    reading = read(save_to(tmp_path / "m", kind, written(head, kind)), own_embed=False, lm_head="target")
    assert "embed_tokens.weight" not in reading.tensors
    check_against(head, reading.build(same_tables(head)))
    assert any("model.layers.2.shared_head.head.weight is not read" in note for note in reading.notes)


@pytest.mark.parametrize("layout", ["nextn", "mtp"])
def test_of_several_modules_one_is_read_and_it_is_said(layout, tmp_path):
    from driftlab import DriftlabError

    kind = "deepseek" if layout == "nextn" else "qwen3_5"
    heads = [Head(kind, seed=0), Head(kind, seed=1)]
    if layout == "mtp":  # which share everything but the layer
        for name in ("enorm", "hnorm", "proj", "norm", "embed", "head"):
            setattr(heads[1], name, getattr(heads[0], name))
    tensors = {name: t for i, head in enumerate(heads) for name, t in written(head, kind, module=i).items()}
    folder = save_to(tmp_path / "m", kind, tensors, num_nextn_predict_layers=2)
    first, second = read(folder), read(folder, module=1)
    assert any("module: 0 of 2" in note for note in first.notes)
    assert any("module: 1 of 2" in note for note in second.notes)
    check_against(heads[0], first.build())
    check_against(heads[1], second.build())
    with pytest.raises(AssertionError):
        check_against(heads[1], first.build())
    with pytest.raises(DriftlabError, match=r"module=2: there are 2 MTP modules, 0\.\.1"):
        read(folder, module=2)


def test_a_head_in_a_folder_of_its_own_may_be_layer_0(tmp_path):
    """SGLang's NextN folders count from 0; the tables stand at the top."""
    head, kind = Head("deepseek"), "deepseek"
    tensors = written(head, kind, tables=False, layer=0)
    tensors |= {"model.embed_tokens.weight": head.embed.weight.detach(), "lm_head.weight": head.head.weight.detach()}
    drafter = read(save_to(tmp_path / "m", kind, tensors, num_hidden_layers=1)).build()
    check_against(head, drafter)


def test_fused_projections_and_other_prefixes_are_the_same_head(tmp_path):
    head, kind = Head("qwen3_5"), "qwen3_5"
    tensors = {f"model.language_model.{name}": t for name, t in written(head, kind, tables=False).items()}
    prefix = "model.language_model.mtp.layers.0.mlp."
    gate, up = tensors.pop(f"{prefix}gate_proj.weight"), tensors.pop(f"{prefix}up_proj.weight")
    tensors[f"{prefix}gate_up_proj.weight"] = torch.cat([gate, up])
    tensors["model.language_model.mtp.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
    check_against(head, read(save_to(tmp_path / "m", kind, tensors)).build(same_tables(head)))


def test_blocks_of_fp8_are_multiplied_out_and_their_scales_belong_to_the_head(tmp_path):
    head, kind = Head("deepseek"), "deepseek"
    tensors, scale = written(head, kind), torch.tensor([[0.5]])
    name = "model.layers.2.self_attn.o_proj.weight"
    with torch.no_grad():
        eighth = (head.layer.self_attn.o_proj.weight / 0.5).to(torch.float8_e4m3fn)
        head.layer.self_attn.o_proj.weight.copy_(eighth.float() * 0.5)
    tensors |= {name: eighth, f"{name}_scale_inv": scale}
    block = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    reading = read(save_to(tmp_path / "m", kind, tensors, quantization_config=block))
    check_against(head, reading.build())
    assert any("fp8" in note for note in reading.notes)


# ---- what is told


def test_conventions_say_where_they_come_from(tmp_path):
    kind = "glm"
    reading = read(save_to(tmp_path / "m", kind, written(Head(kind), kind)))
    rows = {row.name: row for row in reading.conventions}
    assert reading.format == "GLM-4 MoE NextN"
    assert "model.layers.2." in reading.told
    assert "glm4_moe" in reading.told
    assert (rows["rotary_dim"].value, rows["rotary_dim"].source) == (4, "read")
    assert (rows["qk_norm"].value, rows["qk_norm"].source) == (True, "tensors")
    assert rows["experts"].value.scoring == "sigmoid"
    assert rows["rope_theta"].value == 1e6
    assert rows["aux_layers"].value == ()
    assert all(row.why for row in reading.conventions)
    config = reading.config_for(None)
    assert {row.name: row.value for row in reading.conventions} == {name: getattr(config, name) for name in rows}


@pytest.mark.parametrize(("kind", "turned"), [("glm", 4), ("qwen3_next", 2)])
def test_the_share_of_a_head_that_is_turned_is_the_types_where_it_is_not_said(kind, turned, tmp_path):
    head = Head(kind)
    folder = save_to(tmp_path / "m", kind, written(head, kind))
    values = json.loads((folder / "config.json").read_text())
    del values["partial_rotary_factor"]
    (folder / "config.json").write_text(json.dumps(values))
    reading = read(folder)
    row = next(row for row in reading.conventions if row.name == "rotary_dim")
    assert (row.value, row.source) == (turned, "assumed")
    check_against(head, reading.build())


def test_a_reading_turns_with_what_is_given(tmp_path):
    """The doctor's way."""
    head, kind = Head("glm"), "glm"
    reading = read(save_to(tmp_path / "m", kind, written(head, kind)))
    check_against(head, reading.with_given(norm_output=False).build(), post_norm=False)
    assert "norm_output" in reading.words()


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "changed", "match"),
    [
        ("deepseek", {"model_type": "deepseek_v32"}, "model_type 'deepseek_v32'"),
        ("deepseek", {"model_type": "qwen3_next"}, "are not what model_type 'qwen3_next' has"),
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("deepseek", {"attention_bias": True}, "attention_bias"),
        ("deepseek", {"n_routed_experts": 16}, "16 experts, mlp.gate.weight has 8 rows"),
        ("deepseek", {"q_lora_rank": None}, "q_lora_rank=None"),
        ("deepseek", {"routed_scaling_factor": None}, "routed_scaling_factor is None"),
        ("deepseek", {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ("deepseek", {"rms_norm_eps": None}, "rms_norm_eps is None"),
        ("deepseek", {"norm_topk_prob": "false"}, "norm_topk_prob is 'false', not true or false"),
        ("deepseek", {"rope_interleave": "x"}, "rope_interleave is 'x', not true or false"),
        ("deepseek", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1', not a whole number"),
        ("deepseek", {"n_routed_experts": "8"}, "n_routed_experts is '8', not a whole number"),
        ("deepseek", {"q_lora_rank": "16"}, "q_lora_rank is '16', not a whole number"),
        ("deepseek", {"num_experts_per_tok": 9}, "a token takes 9, and 4 are open to it"),
        ("deepseek", {"n_group": 3}, "8 in 3 groups"),
        ("deepseek", {"topk_group": 5}, "a token takes 5 groups, and there are 4"),
        ("deepseek", {"n_group": "4"}, "n_group is '4', not a whole number"),
        ("deepseek", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("deepseek", {"routed_scaling_factor": float("inf")}, "scale is inf, not a number"),
        ("glm", {"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 turns 0 of the 8"),
        ("glm", {"layer_types": 5}, "layer_types is 5, not a list"),
        ("glm", {"use_qk_norm": "no"}, "use_qk_norm is 'no', not true or false"),
        ("glm", {"use_qk_norm": False}, "use_qk_norm=False.* among the tensors"),
        ("glm, plain attention", {"use_qk_norm": True}, "use_qk_norm=True.* missing"),
        ("glm, plain attention", {"attention_bias": True}, "attention_bias=True.* missing"),
        ("glm", {"layer_types": ["sliding_attention"]}, "sliding windows"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "embed_tokens.weight is missing"),
        ("qwen3_next", {"residual_multiplier": 0.5}, "residual_multiplier is 0.5"),
        ("speculators, qwen3", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("speculators, qwen3", {"model_type": "gemma2"}, "model_type 'gemma2'"),
    ],
)
def test_settings_that_are_not_supported_or_contradict_the_tensors_are_named(kind, changed, match, tmp_path):
    from driftlab import DriftlabError

    folder = save_to(tmp_path / "m", kind, written(Head(kind), kind, tables=False))
    values = json.loads((folder / "config.json").read_text())
    inner = next((values[key] for key in ("transformer_layer_config", "text_config") if key in values), values)
    inner.update(changed)
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(DriftlabError, match=match):
        read(folder)


@pytest.mark.parametrize("kind", ["deepseek", "qwen3_next", "speculators, qwen3"])
def test_a_head_without_its_projection_is_called_so(kind, tmp_path):
    from driftlab import DriftlabError

    tensors = written(Head(kind), kind, tables=False)
    kept = {
        n: t for n, t in tensors.items() if not n.endswith((".eh_proj.weight", "mtp.fc.weight", ".input_proj.weight"))
    }
    assert len(kept) == len(tensors) - 1
    with pytest.raises(DriftlabError, match="a tensor of an MTP head, but its projection"):
        read(save_to(tmp_path / "m", kind, kept))


def test_another_module_has_other_weights_though_the_first_was_read(tmp_path):
    heads = [Head("deepseek", seed=0), Head("deepseek", seed=1)]
    tensors = {name: t for i, head in enumerate(heads) for name, t in written(head, "deepseek", module=i).items()}
    reading = read(save_to(tmp_path / "m", "deepseek", tensors, num_nextn_predict_layers=2))
    for module in (0, 1, 0):  # and each time after the other's were read
        reading = reading.with_given(module=module)
        assert torch.equal(reading.tensors["layers.0.eh_proj.weight"], heads[module].proj.weight)
    lent = reading.with_given(own_embed=False)
    assert "embed_tokens.weight" not in lent.tensors
    assert torch.equal(lent.with_given(own_embed=True).tensors["embed_tokens.weight"], heads[0].embed.weight)


def test_mimo_has_speculators_names_and_another_order(tmp_path):
    from driftlab import DriftlabError

    kind = "speculators, qwen3"
    folder = save_to(tmp_path / "m", kind, written(Head(kind), kind))
    (folder / "config.json").write_text(json.dumps({**settings_of(kind), "model_type": "mimo"}))
    with pytest.raises(DriftlabError, match="MiMo"):
        read(folder)


@pytest.mark.parametrize(
    ("kind", "name", "match"),
    [
        ("deepseek", "model.layers.2.enorm.weight", "layers.0.enorm.weight"),
        ("deepseek", "model.layers.2.mlp.gate.e_score_correction_bias", "e_score_correction_bias"),
        ("deepseek", "model.layers.2.mlp.experts.3.up_proj.weight", "experts.3.up_proj.weight"),
        ("deepseek", "model.layers.2.shared_head.norm.weight", "norm.weight"),
        ("glm", "model.layers.2.self_attn.k_norm.weight", "k_norm.weight"),
        ("qwen3_next", "mtp.layers.0.self_attn.q_norm.weight", "q_norm.weight is missing"),
        ("qwen3_next", "mtp.norm.weight", "norm.weight"),
        ("qwen3_5", "mtp.layers.0.mlp.gate_proj.weight", "gate_proj.weight is missing"),
    ],
)
def test_a_missing_tensor_is_named(kind, name, match, tmp_path):
    from driftlab import DriftlabError

    tensors = written(Head(kind), kind)
    del tensors[name]
    with pytest.raises(DriftlabError, match=match):
        read(save_to(tmp_path / "m", kind, tensors)).build()


@pytest.mark.parametrize("kind", ["deepseek", "qwen3_next"])
def test_a_head_without_its_shared_expert_is_not_loaded_as_one_that_has_none(kind, tmp_path):
    from driftlab import DriftlabError

    tensors = {name: t for name, t in written(Head(kind), kind).items() if ".shared_expert" not in name}
    with pytest.raises(DriftlabError, match="shared_experts.gate_proj.weight is missing"):
        read(save_to(tmp_path / "m", kind, tensors)).build()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deepseek", "model.layers.2.self_attn.indexer.weight"),
        ("deepseek", "model.norm.weight"),
        ("qwen3_next", "mtp.hidden_gain.weight"),
        ("qwen3_next", "mtp.layers.0.self_attn.sinks"),
        ("speculators, qwen3", "mtp_layers.0.alpha"),
    ],
)
def test_an_unused_tensor_is_named(kind, name, tmp_path):
    from driftlab import DriftlabError

    tensors = written(Head(kind), kind) | {name: torch.ones(4)}
    with pytest.raises(
        DriftlabError, match=name.rpartition(".layers.")[2].partition(".")[2] if "layers." in name else name
    ):
        read(save_to(tmp_path / "m", kind, tensors)).build()


def test_names_alone_tell_an_mtp_head():
    from driftlab import DriftlabError
    from driftlab.drafter.formats.mtp import looks_like_mtp

    assert looks_like_mtp(["model.embed_tokens.weight", "model.layers.61.eh_proj.weight"])
    assert looks_like_mtp({"mtp.fc.weight": (1, 2), "mtp.layers.0.mlp.gate.weight": (1, 1)})
    assert looks_like_mtp(["mtp_layers.0.input_proj.weight"])
    assert not looks_like_mtp(["fc.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"])
    assert not looks_like_mtp(["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
    with pytest.raises(DriftlabError, match="under several names"):
        looks_like_mtp(["mtp.fc.weight", "mtp.layers.0.x", "mtp_layers.0.input_proj.weight"])


# ---- probes, replay and the live loop


@pytest.mark.parametrize("kind", ["deepseek", "glm", "qwen3_next"])
def test_probes_run_on_heads_and_masses_sum_to_one(kind, tmp_path):
    from driftlab import AttentionMass, StateNorm, all_starts

    drafter = read(save_to(tmp_path / "m", kind, written(Head(kind), kind))).build()
    with AttentionMass(drafter) as mass, StateNorm(drafter) as norm:
        all_starts(drafter, batch_of(), DEPTH, feed="own")
    frame = mass.frame()
    parts = frame[frame.quantity.isin(["mass_sink", "mass_prompt", "mass_context", "mass_self"])]
    sums = parts.groupby(["prompt", "layer", "head", "depth"]).value.sum()
    assert len(sums) == 2 * 1 * 4 * DEPTH
    assert float((sums - 1).abs().max()) < 1e-5
    own = frame[frame.quantity == "mass_self"].groupby("depth").value.mean()
    assert own[1] == 0
    assert (own[2:] > 0).all()
    assert norm.frame().value.notna().all()


def test_live_is_the_replay_for_a_head_of_a_deepseek_target(tmp_path):
    """Loaded from its target's files and trained a little, so that drafts are accepted and rejected."""
    from driftlab import Target, TrainConfig, accept, all_starts, simulate, speculate, train

    target = Target(tiny_model("DeepseekV3", layers=3), TinyTokenizer(), name="DeepseekV3", aux_layers=(1,))
    trajectory = target.record(["hello world", "q"], max_new_tokens=24, template=False, out=tmp_path / "r")
    kind = "deepseek"
    head = Head(kind)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(0.4)
    drafter = read(save_to(tmp_path / "m", kind, written(head, kind, tables=False))).build(trajectory)
    config = TrainConfig(ttt=3, lr=1e-2, batch_size=2, epochs=15.0, save_every=0)
    drafter = train(drafter, trajectory, config, out=tmp_path / "d").eval()
    simulation = simulate(accept(all_starts(drafter, trajectory, 3), trajectory))
    for i, entry in enumerate(trajectory.entries):
        tokens = trajectory.tokens(i)
        live = speculate(target, drafter, tokens[: entry.prompt_length].tolist(), depth=3, max_new_tokens=24)
        assert live.tokens == tuple(tokens[entry.prompt_length :].tolist())
        assert live.rounds == simulation.rounds[i]
    assert len({r.accepted for rounds in simulation.rounds for r in rounds}) > 2


def test_a_head_saved_by_driftlab_is_the_same_head(tmp_path):
    from driftlab import Drafter

    head, kind = Head("qwen3_next"), "qwen3_next"
    drafter = read(save_to(tmp_path / "m", kind, written(head, kind))).build()
    drafter.save(tmp_path / "own")
    again = Drafter.load(tmp_path / "own")
    assert again.config == drafter.config
    check_against(head, again)
