"""Names of tensors in files: every prefix gives the same drafter, and no tensor is lost or made two of."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HEADS = (4, 2, 8)
WIDTH = 12


class Raw:
    """Tensors by raw name, as an opened checkpoint has them."""

    label = "somewhere"

    def __init__(self, tensors):
        self.held = tensors

    @property
    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.held.items()}

    def tensor(self, name):
        return self.held[name]


def names_of(tensors, heads=HEADS):
    from driftlab.drafter.formats.names import Heads, canonical_names

    return canonical_names(Raw(tensors).shapes, heads=None if heads is None else Heads(*heads))


def canonical(tensors, heads=HEADS):
    from driftlab.drafter.formats.names import Heads, canonical_tensors

    return canonical_tensors(Raw(tensors), heads=None if heads is None else Heads(*heads))


def refused(tensors, *told, heads=HEADS):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError) as caught:
        canonical(tensors, heads)
    assert [words for words in ("somewhere", *told) if words not in str(caught.value)] == [], str(caught.value)


def equal(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def drafter(layers=1, seed=0):
    """All tensors of a drafter by canonical name; no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    query, kv, dim = HEADS
    shapes = {
        **{"fc.weight": (WIDTH, 3 * WIDTH), "fc_norm.0.weight": (WIDTH,), "fc_norm.1.weight": (WIDTH,)},
        **{"fc_norm.2.weight": (WIDTH,), "input_norm.weight": (3 * WIDTH,), "norm.weight": (WIDTH,)},
        **{"lm_head.weight": (20, WIDTH), "embed_tokens.weight": (61, WIDTH), "layers.0.hidden_norm.weight": (WIDTH,)},
    }
    for layer in range(layers):
        width = 2 * WIDTH if layer == 0 else WIDTH
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                **{"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)},
                **{"self_attn.q_proj.weight": (query * dim, width), "self_attn.q_proj.bias": (query * dim,)},
                **{"self_attn.k_proj.weight": (kv * dim, width), "self_attn.k_proj.bias": (kv * dim,)},
                **{"self_attn.v_proj.weight": (kv * dim, width), "self_attn.v_proj.bias": (kv * dim,)},
                **{"self_attn.o_proj.weight": (WIDTH, query * dim), "mlp.gate_proj.weight": (10, WIDTH)},
                **{"mlp.up_proj.weight": (10, WIDTH), "mlp.down_proj.weight": (WIDTH, 10)},
                **{"mlp.gate_proj.bias": (10,), "mlp.up_proj.bias": (10,)},
            }.items()
        }
    tensors = {name: torch.rand(shape, generator=generator) * 1.5 + 0.5 for name, shape in shapes.items()}
    return {**tensors, "d2t": torch.arange(20), "t2d": torch.arange(61) < 20}


PREFIXES = (
    *("", "model.", "draft_model.", "draft_model.model.", "eagle_module.", "module.", "module.model."),
    *("model.eagle_module.", "module.draft_model.", "_fsdp_wrapped_module.draft_model.", "trainer.state.draft_model."),
    *("_orig_mod.", "module._orig_mod.model.", "language_model.eagle_module."),
)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_same_tensors_under_every_prefix_are_the_same_drafter(prefix, layers):
    """A2. Layer 0 as layers.0, as midlayer and as midlayer.0: all the same, and each later layer stays itself."""
    tensors = drafter(layers)

    def written(first, later):
        def one(name):
            return name.replace("layers.0.", first) if name.startswith("layers.0.") else name.replace("layers.", later)

        return {prefix + one(name): tensor for name, tensor in tensors.items()}

    for first, later in (("layers.0.", "layers."), ("midlayer.", "layers."), ("midlayer.0.", "midlayer.")):
        read = canonical(written(first, later))
        assert equal(read, tensors), (first, later)
        assert {name.split(".")[1] for name in read if name.startswith("layers.")} == set(map(str, range(layers)))


@given(st.dictionaries(st.sampled_from(sorted(drafter(3))), st.sampled_from(PREFIXES), min_size=1))
@settings(max_examples=100, deadline=None)
def test_mixed_prefixes_lose_nothing(prefixes):
    """Whatever prefix each tensor has, each raw name is a canonical tensor, and the right one."""
    tensors = drafter(3)
    read = canonical({prefix + name: tensors[name] for name, prefix in prefixes.items()})
    assert equal(read, {name: tensors[name] for name in prefixes})


@given(
    st.sets(st.text("abm.0123_", min_size=1, max_size=12) | st.from_regex(r"layers\.\d\d?\.[a-z]{1,5}", fullmatch=True))
)
@settings(max_examples=200, deadline=None)
def test_a_name_that_is_not_known_is_kept(raw_names):
    """Every raw name ends somewhere: named, dropped with a reason, or refused as the second name of one tensor."""
    from driftlab import DriftlabError

    tensors = {name: torch.ones(2) for name in raw_names}
    try:
        names, told = names_of(tensors), ""
    except DriftlabError as error:
        names, told = None, str(error)
    if names is None:
        assert "two names of one tensor" in told
        return
    assert set(names.sources.values()) | set(names.dropped) == set(raw_names)
    assert len(names.sources) + len(names.dropped) == len(raw_names)


def test_names_that_mean_something_elsewhere_are_left_alone():
    kept = ["layers.0.self_attn.query.weight", "foo.midlayer.x", "layers.10.a", "mtp.fc.weight", "models.fc.weight"]
    tensors = {name: torch.rand(3) for name in kept}
    assert equal(canonical(tensors), tensors)
    # one model. only: a second one is somebody's name
    assert set(canonical({"model.model.fc.weight": torch.ones(1)})) == {"model.fc.weight"}


def test_draft_vocabulary_maps_keep_their_names_and_values():
    maps = {"d2t": torch.tensor([0, 4, 9]), "t2d": torch.tensor([True, False])}
    for prefix in PREFIXES:
        assert equal(canonical({prefix + name: tensor for name, tensor in maps.items()}), maps)
    other = {"layers.0.d2t": maps["d2t"], "my_d2t": maps["d2t"]}
    assert equal(canonical(other), other)


def test_other_names_of_norms_and_of_the_fusion():
    tensors = {
        name: torch.rand(3) for name in ("aux_norm_low", "aux_norm_mid", "aux_norm_high", "context_proj", "final_norm")
    }
    read = canonical({f"model.{name}.weight": tensor for name, tensor in tensors.items()})
    named = ("fc_norm.0", "fc_norm.1", "fc_norm.2", "fc", "norm")
    assert equal(read, {f"{name}.weight": tensor for name, tensor in zip(named, tensors.values(), strict=True)})
    assert set(canonical({"context_norm.weight": torch.ones(2)})) == {"hidden_norm.weight"}


# ---- fused projections


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("prefix", ["", "model.", "draft_model."])
def test_fused_projections_are_split_by_heads(prefix, layers):
    """A11: 4 query and 2 key-value heads of 8 are rows 0-31, 32-47 and 48-63: not thirds."""
    tensors, fused = drafter(layers), {}
    for name, tensor in tensors.items():
        part = next((p for p in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") if f".{p}." in name), None)
        if part is None:
            fused[prefix + name] = tensor
            continue
        kind = "qkv_proj" if part[1] == "_" else "gate_up_proj"
        fused.setdefault(prefix + name.replace(part, kind), []).append(tensor)
    fused = {name: torch.cat(t) if isinstance(t, list) else t for name, t in fused.items()}
    assert fused[f"{prefix}layers.0.self_attn.qkv_proj.weight"].shape[0] == 64
    assert fused[f"{prefix}layers.0.self_attn.qkv_proj.bias"].shape == (64,)
    read = canonical(fused)
    assert equal(read, tensors)
    assert names_of(fused).shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    q, k, v = (read[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    assert (len(q), len(k), len(v)) == (32, 16, 16)
    assert q.untyped_storage().nbytes() == q.numel() * 4  # a part keeps no hold on the whole


@pytest.mark.parametrize("name", ["fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"])
def test_fused_latent_projections_are_split_at_the_rank_of_the_queries(name):
    q, kv, rank = torch.rand(6, 24), torch.rand(10, 24), torch.rand(6)
    norm = {"model.midlayer.self_attn.q_a_layernorm.weight": rank}
    fused = {f"model.midlayer.self_attn.{name}.weight": torch.cat([q, kv])}
    block = "layers.0.self_attn."
    read = canonical({**fused, **norm}, heads=None)
    assert equal(
        read,
        {
            **{f"{block}q_a_proj.weight": q, f"{block}kv_a_proj_with_mqa.weight": kv},
            f"{block}q_a_layernorm.weight": rank,
        },
    )
    refused(fused, f"midlayer.self_attn.{name}.weight", "q_a_layernorm.weight", "is not in the file")
    refused({**fused, "layers.0.self_attn.q_a_layernorm.weight": torch.ones(16)}, "16 rows", "has 16")


def test_a_fused_projection_that_cannot_be_split_is_named():
    name = "layers.0.self_attn.qkv_proj.weight"
    refused({name: torch.ones(64, 4)}, name, "without the heads", heads=None)
    refused({name: torch.ones(96, 4)}, name, "96 rows", "32 + 16 + 16 = 64", "config.json")
    refused({"layers.0.mlp.gate_up_proj.weight": torch.ones(7, 4)}, "gate_up_proj", "7 rows")


def test_a_part_beside_its_fused_projection_is_refused():
    whole, part = "layers.0.self_attn.qkv_proj.weight", "layers.0.self_attn.k_proj.weight"
    refused({whole: torch.ones(64, 4), part: torch.ones(16, 4)}, whole, part, "two names of one tensor")


# ---- two names of one tensor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.fc.weight", "fc.weight"),
        ("draft_model.d2t", "d2t"),
        ("aux_norm_low.weight", "fc_norm.0.weight"),
        ("midlayer.x.weight", "midlayer.0.x.weight"),
        ("final_norm.weight", "norm.weight"),
        ("context_proj.weight", "fc.weight"),
    ],
)
def test_two_names_of_one_tensor_are_both_named(one, other):
    """Equal values too: which of them an engine reads is not ours to guess."""
    for pair in itertools.permutations((one, other)):
        refused(dict.fromkeys(pair, torch.ones(3)), one, other)


def test_the_norm_of_a_later_layer_has_two_names():
    """SGLang calls it hidden_norm, vLLM input_layernorm; a file for both has it twice."""
    gain, other = torch.rand(WIDTH) + 0.5, torch.rand(WIDTH) + 0.5
    named = {"layers.1.input_layernorm.weight": gain}
    assert equal(canonical({"layers.1.hidden_norm.weight": gain}), named)
    both = {"model.layers.1.hidden_norm.weight": gain.clone(), "layers.1.input_layernorm.weight": gain}
    for order in (list(both), list(reversed(both))):
        tensors = {name: both[name] for name in order}
        assert equal(canonical(tensors), named)
        names = names_of(tensors)
        assert names.twins == {"layers.1.input_layernorm.weight": tuple(sorted(both))}
        refused({**tensors, order[0]: other}, *both, "vLLM", "SGLang")
    refused({**both, "layers.1.input_layernorm.weight": torch.ones(3)}, *both)
    third = {**both, "layers.1.hidden_norm.weight": gain}
    for order in itertools.permutations(third):
        refused({name: third[name] for name in order}, "two names of one tensor")
    # in layer 0 the two are two norms
    first = {"layers.0.hidden_norm.weight": gain, "layers.0.input_layernorm.weight": other}
    assert equal(canonical(first), first)
    ten = {"layers.10.hidden_norm.weight": gain, "layers.1.hidden_norm.weight": other}
    assert equal(canonical(ten), {"layers.10.input_layernorm.weight": gain, "layers.1.input_layernorm.weight": other})


# ---- what is dropped


def test_what_is_dropped_is_said_and_why():
    dropped = {
        **{"layers.0.self_attn.rotary_emb.inv_freq": "rotary", "model.midlayer.rotary_emb.inv_freq": "rotary"},
        **{"rotary_emb.cos_cached": "rotary", "verifier_norm.weight": "target's final norm"},
        "draft_model.verifier_lm_head.weight": "target's head",
    }
    tensors = drafter()
    everything = {**tensors, **{name: torch.ones(4) for name in dropped}}
    assert equal(canonical(everything), tensors)
    names = names_of(everything)
    assert set(names.dropped) == set(dropped)
    assert [name for name, why in dropped.items() if why not in names.dropped[name]] == []
    kept = {"verifier_normal.weight": torch.ones(1), "my_inv_freq": torch.ones(1)}
    assert equal(canonical(kept), kept)
