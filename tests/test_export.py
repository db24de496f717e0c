"""Exports: read back, a drafter is the same bit for bit, or the engine's format is refused by name."""

import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders import config_of, own_tables, random_batch, target_of
from safetensors.torch import load_file, save_file

FORMATS = ("vllm", "sglang", "speculators", "safeailab")
READ_AS = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators", "safeailab": "SafeAILab"}
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm")
PLAIN = dict.fromkeys(FLAGS, False)
STATES = (2, 4, 5)  # the default ones of 8 layers
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


def target(layers=8, positions=4096, name="owner/target", embed=None, vocab=61, width=32):
    """What an export and a loader ask of a target."""
    made = target_of(vocab, width)
    made.spec = SimpleNamespace(
        **{"name": name, "label": name, "fingerprint": "f" * 64, "num_layers": layers, "max_positions": positions},
        **{"rope_type": "default", "rope_theta": 10000.0, "hidden_size": width, "vocab_size": vocab},
    )
    if embed is not None:
        made.head = type(made.head)(embed=embed, lm_head=made.head.lm_head, norm_weight=made.head.norm_weight)
    return made


def drafter_of(own_embed=True, lm_head="own", lender=None, **overrides):
    """A drafter with gains in [0.5, 2] and large weights; the target's tables where it has none of its own."""
    from driftlab import Drafter

    values = {"aux_layers": STATES, **PLAIN, **overrides}
    config = config_of(own_embed=own_embed, lm_head=lm_head, **values)
    size = config.draft_vocab_size
    ids = None if size == config.vocab_size else [*range(1, size), 60]
    drafter = Drafter(config, None if own_embed and lm_head == "own" else lender or target(), draft_vocab=ids)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0, generator=generator)
            else:
                parameter.mul_(6)
    return drafter.eval()


def export(drafter, folder, form, **options):
    from driftlab.drafter.formats.export import export_drafter

    return export_drafter(drafter, folder, format=form, **{"target": target(), **options})


def check(folder, form):
    from driftlab.drafter.formats.rules import check_folder

    return check_folder(folder, form)


def load(folder, form, lender=None, **given):
    from driftlab import Drafter

    return Drafter.load(folder, target() if lender is None else lender, format=READ_AS[form], **given)


def settings(folder):
    return json.loads((folder / "config.json").read_text())


def tensors(folder):
    return load_file(folder / "model.safetensors")


@torch.no_grad()
def logits(drafter, depths=2):
    """Logits of some rows over some depths of fed text."""
    from driftlab.segments import Starts

    width, aux = drafter.config.target_hidden_size, drafter.config.states_read
    batch = random_batch((9,), (5,), width=width, aux=aux)
    index = torch.arange(5)[None]
    starts = Starts(index, torch.ones_like(index, dtype=torch.bool), torch.full_like(index, 2), ("p:0",))
    state, found = drafter.first(batch.tokens[:, 1:6], batch.aux[:, :5], starts), []
    for depth in range(depths):
        found.append(drafter.logits(state.normed))
        state = drafter.next(state, batch.tokens[:, 2 + depth : 7 + depth])
    return torch.stack(found)


def assert_same(first, second, config=True):
    ours, theirs = first.state_dict(), second.state_dict()
    assert set(ours) <= set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.dtype == theirs[name].dtype
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert torch.equal(first.embed_tokens.weight, second.embed_tokens.weight)
    assert torch.equal(logits(first), logits(second))
    if config:
        assert second.config == first.config


def refused(drafter, folder, form, told, **options):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match=told) as caught:
        export(drafter, folder, form, **options)
    assert not folder.exists()
    return str(caught.value)


# ---- every format and every switch


def told_reasons(form, flags, layers):
    """Names that a refusal must hold, from the engines' abilities; empty: the format can carry it."""
    lacking = {"vllm": (), "sglang": ("norm_before_residual", "qk_norm"), "speculators": (), "safeailab": FLAGS}
    names = [name for name in lacking[form] if flags[name]]
    if form == "speculators" and flags["norm_before_fc"] and flags["fc_norm"]:
        names.append("norm_before_fc and fc_norm")
    if form == "safeailab" and layers > 1:
        names.append("num_hidden_layers")
    return names


def designs(form):
    """Settings of the switches, with layers, vocabulary and embedding, so that each two of all eight meet in every way.

    Half of the 32 settings of the switches, those with an even number on; all of SGLang's, which carries few.
    """
    for values in itertools.product([False, True], repeat=len(FLAGS)):
        if sum(values) % 2 and form != "sglang":
            continue
        fc_norm, norm_output, before_fc, before_residual, qk_norm = values
        layers = 1 + (fc_norm ^ norm_output ^ before_fc)
        draft_vocab = 20 if norm_output ^ before_residual ^ qk_norm else 61
        yield dict(zip(FLAGS, values, strict=True)), layers, draft_vocab, fc_norm ^ before_residual ^ qk_norm


@pytest.mark.parametrize("form", FORMATS)
def test_it_round_trips_or_is_refused_by_name(tmp_path, form):
    """Load, export, load: the same bits (verl-SpeCo#77)."""
    carried = 0
    for number, (flags, layers, draft_vocab, own) in enumerate(designs(form)):
        folder = tmp_path / str(number)
        own = own and form != "sglang"  # see test_sglang_s_embedding
        drafter = drafter_of(own_embed=own, num_hidden_layers=layers, draft_vocab_size=draft_vocab, **flags)
        reasons = told_reasons(form, flags, layers)
        if reasons:
            words = refused(drafter, folder, form, "cannot carry")
            assert all(reason in words for reason in reasons), (words, reasons)
            continue
        assert export(drafter, folder, form).bit_equal
        assert_same(drafter, load(folder, form))
        carried += 1
    assert carried == {"vllm": 16, "sglang": 8, "speculators": 12, "safeailab": 1}[form]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("draft_vocab", [20, 61])
@pytest.mark.parametrize("own", [False, True])
def test_plain_eagle3_round_trips(tmp_path, form, draft_vocab, own):
    drafter = drafter_of(own_embed=own and form != "sglang", draft_vocab_size=draft_vocab)
    export(drafter, tmp_path / "d", form)
    assert_same(drafter, load(tmp_path / "d", form))


@pytest.mark.parametrize("form", ["vllm", "sglang"])
@pytest.mark.parametrize("overrides", [{}, {"fc_norm": True, "norm_output": True, "draft_vocab_size": 20}])
def test_latent_attention(tmp_path, form, overrides):
    from driftlab.drafter.config import LatentConfig
    from driftlab.drafter.rotary import RopeScaling

    yarn = RopeScaling(kind="yarn", factor=8.0, original_max_positions=64, mscale=0.7, mscale_all_dim=0.9)
    for scaling in (None, yarn):
        drafter = drafter_of(
            own_embed=False,
            latent=LatentConfig(**LATENT),
            rope_interleaved=True,
            rope_scaling=scaling,
            num_key_value_heads=4,
            head_dim=10,
            **overrides,
        )
        export(drafter, tmp_path / "d", form)
        assert_same(drafter, load(tmp_path / "d", form), config=False)
        assert settings(tmp_path / "d")["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    for other in ("speculators", "safeailab"):
        refused(drafter, tmp_path / other, other, r"latent \(MLA\)")


@pytest.mark.parametrize(
    ("form", "overrides"),
    [
        ("vllm", {"attention_bias": True, "output_bias": True, "mlp_bias": True, "num_hidden_layers": 2}),
        ("vllm", {"windows": (0, 5), "num_hidden_layers": 2}),
        ("vllm", {"logit_scale": 0.25}),
        ("vllm", {"aux_layers": (1, 6)}),
        ("vllm", {"aux_layers": (0, 3, 5, 8), "fc_norm": True}),
        ("vllm", {"aux_layers": ()}),
        ("vllm", {"head_dim": 12}),
        ("vllm", {"hidden_size": 48, "fc_norm": True, "own_embed": True}),
        ("sglang", {"fc_bias": True}),
        ("sglang", {"aux_layers": (1, 6), "fc_norm": True}),
        ("sglang", {"aux_layers": ()}),
        ("sglang", {"hidden_size": 48, "own_embed": True}),
        ("sglang", {"norm_before_fc": True, "fc_norm": True}),
        ("speculators", {"attention_bias": True, "output_bias": True, "mlp_bias": True}),
        ("speculators", {"windows": (4,), "qk_norm": True}),
        ("speculators", {"aux_layers": (1, 6)}),
        ("safeailab", {"hidden_size": 48, "own_embed": True, "num_attention_heads": 6, "head_dim": 8}),
    ],
)
def test_the_rarer_parts_that_a_format_has(tmp_path, form, overrides):
    drafter = drafter_of(**{"own_embed": False, **overrides})
    export(drafter, tmp_path / "d", form)
    assert_same(drafter, load(tmp_path / "d", form))


@pytest.mark.parametrize(("given", "added"), [("attention_bias", 1), ("output_bias", 3)])
def test_biases_go_together_so_zeros_are_added(tmp_path, given, added):
    drafter = drafter_of(own_embed=False, **{given: True})
    exported = export(drafter, tmp_path / "d", "vllm")
    new = set(tensors(tmp_path / "d")) - set(drafter.state_dict()) - {"lm_head.weight"}
    assert len(new) == added
    assert all(not bool(tensors(tmp_path / "d")[name].any()) for name in new)
    assert any("zeros" in note for note in exported.notes)
    assert_same(drafter, load(tmp_path / "d", "vllm"), config=False)


REFUSALS = [
    ("architecture mtp", {"architecture": "mtp", "aux_layers": ()}, FORMATS),
    ("head_norm off", {"head_norm": False}, FORMATS),
    ("twice_normed", {"twice_normed": True}, FORMATS),
    ("attention_gate", {"attention_gate": True}, FORMATS),
    ("norm_plus_one", {"norm_plus_one": True}, FORMATS),
    ("rotary_dim", {"rotary_dim": 4}, FORMATS),
    ("rope_interleaved", {"rope_interleaved": True}, FORMATS),
    ("logit_scale", {"logit_scale": 0.5}, ("sglang", "speculators", "safeailab")),
    ("fc_bias", {"fc_bias": True}, ("vllm", "speculators", "safeailab")),
    ("attention_bias", {"attention_bias": True}, ("sglang", "safeailab")),
    ("attention_bias and output_bias with qk_norm", {"attention_bias": True, "qk_norm": True}, ("vllm", "speculators")),
    ("mlp_bias", {"mlp_bias": True}, ("sglang", "safeailab")),
    ("mlp_bias", {"mlp_bias": True, "qk_norm": True}, ("vllm", "speculators")),
    ("windows", {"windows": (4,)}, ("sglang", "safeailab")),
    (r"windows \(4, 5\)", {"windows": (4, 5), "num_hidden_layers": 2}, ("vllm", "speculators")),
    (r"aux_layers \(\)", {"aux_layers": ()}, ("speculators",)),
    (r"aux_layers \[1, 4, 5\]", {"aux_layers": (1, 4, 5)}, ("safeailab",)),
    (r"aux_layers \[0, 4\]: .*no id for state 0", {"aux_layers": (0, 4)}, ("sglang",)),
    (r"aux_layers \[2, 8\]: .*after the last", {"aux_layers": (2, 8)}, ("sglang",)),
    ("head_dim 12", {"head_dim": 12}, ("safeailab",)),
    ("num_hidden_layers", {"num_hidden_layers": 2}, ("safeailab",)),
    (
        "target_hidden_size",
        {"hidden_size": 48, "own_embed": True, "num_attention_heads": 6},
        ("speculators",),
    ),
    ("width of all captured states", {"hidden_size": 96, "own_embed": True}, ("sglang", "safeailab")),
    ("hidden_size 32 is the width of all captured states", {"aux_layers": (4,)}, ("sglang", "safeailab")),
]


@pytest.mark.parametrize(("told", "overrides", "forms"), REFUSALS)
def test_what_a_format_cannot_carry_is_refused_by_name(tmp_path, told, overrides, forms):
    drafter = drafter_of(**{"own_embed": False, **overrides})
    for form in forms:
        refused(drafter, tmp_path / "d", form, told)


def test_one_message_holds_every_reason(tmp_path):
    drafter = drafter_of(own_embed=False, qk_norm=True, norm_before_residual=True, logit_scale=2.0)
    words = refused(drafter, tmp_path / "d", "sglang", "SGLang cannot carry")
    assert all(name in words for name in ("qk_norm", "norm_before_residual", "logit_scale"))


def test_what_an_export_must_know_of_the_target(tmp_path):
    drafter = drafter_of()
    refused(drafter, tmp_path / "d", "safeailab", "pass target=", target=None)
    refused(drafter, tmp_path / "d", "speculators", "verifier.*target_name=", target=None)
    refused(drafter, tmp_path / "d", "sglang", "own_embed.*pass target=", target=None)
    exported = export(drafter, tmp_path / "d", "vllm", target=None)
    assert settings(tmp_path / "d")["max_position_embeddings"] == 32768
    assert any("not known" in note for note in exported.notes)
    assert "vllm serve TARGET " in exported.command


# ---- layer ids


@pytest.mark.parametrize(
    ("model_type", "states", "ids"),
    [
        (None, (2, 4, 5), [1, 3, 4]),
        ("llama", (1, 3, 5), [0, 2, 4]),
        ("deepseek_v3", (2, 4, 5), [1, 3, 4]),
        ("kimi_k2", (3, 4, 5), [3, 4, 5]),
        ("gpt_oss", (2, 4, 5), [1, 3, 4]),
        ("gpt_oss", (4, 6, 8), [4, 6, 8]),
    ],
)
def test_sglang_s_counting_depends_on_the_target(tmp_path, model_type, states, ids):
    """sglang#25454, sglang#32334: the rule by which it reads them, written out."""
    drafter = drafter_of(own_embed=False, aux_layers=states)
    export(drafter, tmp_path / "d", "sglang", target_model_type=model_type)
    written = settings(tmp_path / "d")
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
    assert "eagle_aux_hidden_state_layer_ids" not in written
    adds = {"deepseek_v3": ids[0] == 1, "kimi_k2": ids[0] == 1, "gpt_oss": max(ids) != 8}.get(model_type, True)
    assert tuple(i + adds for i in ids) == states


@pytest.mark.parametrize(
    ("form", "states", "model_type"),
    [
        ("vllm", (1, 3, 6), None),
        ("vllm", (1, 3, 4), None),
        ("speculators", (1, 3, 6), None),
        ("sglang", (1, 3, 6), None),
        ("sglang", (2, 3, 6), None),
        ("sglang", (3, 4, 6), "kimi_k2"),
        ("sglang", (4, 6, 8), "gpt_oss"),
        ("safeailab", STATES, None),
    ],
)
def test_an_export_says_itself_for_whom_it_was_written(tmp_path, form, states, model_type):
    """Without format= and without the target's depth: the states are known."""
    from driftlab import Drafter, DriftlabError
    from driftlab.drafter.formats.reading import read_checkpoint

    drafter = drafter_of(own_embed=False, aux_layers=states)
    export(drafter, tmp_path / "d", form, target_model_type=model_type)
    reading = read_checkpoint(tmp_path / "d")
    assert reading.format == READ_AS[form]
    assert "driftlab_export.json" in reading.told
    assert reading.config_for().aux_layers == states
    (row,) = (row for row in reading.conventions if row.name == "aux_layers")
    assert row.source == "read"
    assert_same(drafter, Drafter.load(tmp_path / "d", target()))
    with pytest.raises(DriftlabError, match="the drafter of another target"):
        read_checkpoint(tmp_path / "d", num_layers=12 if form == "safeailab" else 3).config_for()


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators"])
def test_a_file_that_was_changed_after_the_export_is_refused(tmp_path, form):
    from driftlab import DriftlabError
    from driftlab.drafter.formats.reading import read_checkpoint

    export(drafter_of(own_embed=False, aux_layers=(2, 3, 6)), tmp_path / "d", form)
    words = (tmp_path / "d" / "config.json").read_text()
    changed = settings(tmp_path / "d")
    for block in (changed, changed.get("eagle_config", {})):
        if IDS in block:
            block[IDS] = [0, 4, 5]
    (tmp_path / "d" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(DriftlabError, match=r"layer ids \[0, 4, 5\], but driftlab_export\.json says"):
        read_checkpoint(tmp_path / "d")
    states = read_checkpoint(tmp_path / "d", format=READ_AS[form]).config_for().aux_layers
    assert states == ((1, 5, 6) if form == "sglang" else (0, 4, 5))
    (tmp_path / "d" / "config.json").write_text(words)
    (tmp_path / "d" / "driftlab_export.json").unlink()  # and without it, as engines' own files are read
    assert read_checkpoint(tmp_path / "d").config_for().aux_layers == (2, 3, 6)


@pytest.mark.parametrize("model_type", [None, "llama", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss"])
def test_states_that_sglang_never_captures_are_refused(tmp_path, model_type):
    """It captures a state as it enters layer 1 .. N - 1; gpt-oss alone has one after its last layer."""
    for states in ((0, 4, 7), (0, 4, 8)):
        drafter = drafter_of(own_embed=False, aux_layers=states)
        refused(drafter, tmp_path / "d", "sglang", "no id for state 0", target_model_type=model_type)
    for states in ((2, 4, 8), (3, 4, 8)):
        drafter = drafter_of(own_embed=False, aux_layers=states)
        if model_type == "gpt_oss":
            export(drafter, tmp_path / str(states), "sglang", target_model_type=model_type)
        else:
            refused(drafter, tmp_path / "d", "sglang", "after the last of 8", target_model_type=model_type)


@pytest.mark.parametrize("form", FORMATS)
def test_a_target_that_the_drafter_does_not_fit_is_refused(tmp_path, form):
    drafter = drafter_of(own_embed=False)
    shallow = refused(drafter, tmp_path / "d", form, "does not fit the target", target=target(layers=4))
    assert "aux_layers [2, 4, 5] name state 5, but the target has 4 layers" in shallow
    other = target(vocab=99, width=16)
    words = refused(drafter, tmp_path / "d", form, "does not fit the target", target=other)
    assert "it takes states 32 wide (fc.weight [32, 96]), the target's are 16" in words
    assert "its vocabulary has 61 tokens, the target's embedding embed_tokens.weight is [99, 16]" in words
    refused(drafter, tmp_path / "d", form, "its vocabulary has 61", target=target(vocab=62))
    own = drafter_of()  # whoever brings tables of its own reads the target's states and tokens no less
    refused(own, tmp_path / "d", form, "the target's are 16", target=target(width=16))
    exported = export(drafter_of(aux_layers=(2, 4, 8)), tmp_path / "last", "vllm")  # N itself is a state
    assert not any("not given" in note for note in exported.notes)
    blind = export(drafter, tmp_path / "blind", "vllm", target=None)
    assert any("were not compared" in note for note in blind.notes)


def test_another_embedding_than_the_drafter_has_used_is_said(tmp_path):
    drafter = drafter_of(own_embed=False)

    def said(exported):
        return any("differs from the one that the drafter has used" in note for note in exported.notes)

    assert not said(export(drafter, tmp_path / "a", "vllm"))
    assert not said(export(drafter_of(), tmp_path / "b", "vllm", target=target(embed=torch.zeros(61, 32))))
    assert said(export(drafter, tmp_path / "c", "vllm", target=target(embed=torch.zeros(61, 32))))


def test_states_that_sglang_would_misread_are_refused(tmp_path):
    first = drafter_of(own_embed=False, aux_layers=(1, 4, 5))
    refused(first, tmp_path / "d", "sglang", r"begins with 1", target_model_type="deepseek_v2")
    oss = drafter_of(own_embed=False)
    refused(oss, tmp_path / "d", "sglang", "gpt-oss.*pass target=", target_model_type="gpt_oss", target=None)


def test_vllm_s_two_runners_find_the_same_boundaries(tmp_path):
    export(drafter_of(aux_layers=(1, 3, 8)), tmp_path / "v", "vllm")
    written = settings(tmp_path / "v")
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 3, 8]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 8]
    export(drafter_of(aux_layers=(1, 3, 8)), tmp_path / "s", "speculators")
    assert settings(tmp_path / "s")["eagle_aux_hidden_state_layer_ids"] == [1, 3, 8]
    assert "eagle_config" not in settings(tmp_path / "s")


# ---- names and tables


def test_names_of_the_tensors(tmp_path):
    first = {"safeailab": "midlayer."}
    for form in FORMATS:
        export(drafter_of(own_embed=False, draft_vocab_size=20), tmp_path / form, form)
        names = set(tensors(tmp_path / form))
        assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} < names
        assert sum(name.startswith(first.get(form, "layers.0.")) for name in names) == 10
        assert len(names) == 15
        written = tensors(tmp_path / form)
        assert (written["d2t"].dtype, written["t2d"].dtype) == (torch.int64, torch.bool)
        assert written["d2t"].tolist() == [1] * 19 + [41]
        export(drafter_of(own_embed=False), tmp_path / f"{form} full", form)
        assert not {"d2t", "t2d"} & set(tensors(tmp_path / f"{form} full"))


def test_deeper_layers_have_both_names_in_sglang_alone(tmp_path):
    drafter = drafter_of(own_embed=False, num_hidden_layers=3)
    for form in ("vllm", "sglang", "speculators"):
        export(drafter, tmp_path / form, form)
        written = tensors(tmp_path / form)
        for layer in (1, 2):
            twin = written.get(f"layers.{layer}.hidden_norm.weight")
            assert (twin is not None) == (form == "sglang")
            if twin is not None:
                assert torch.equal(twin, drafter.layers[layer].input_layernorm.weight)


def test_sglang_s_embedding(tmp_path):
    """It uses the target's, whatever the file has, unless the widths differ."""
    drafter = drafter_of(draft_vocab_size=20)
    refused(drafter, tmp_path / "d", "sglang", "embedding differs from the target's")
    same = target(embed=drafter.embed_tokens.weight.detach().clone())
    exported = export(drafter, tmp_path / "d", "sglang", target=same)
    assert "embed_tokens.weight" not in tensors(tmp_path / "d")
    assert any("equal to the target's" in note for note in exported.notes)
    again = load(tmp_path / "d", "sglang", same)
    assert torch.equal(logits(again), logits(drafter))
    assert not again.config.own_embed


def test_safeailab_reads_an_embedding_only_with_target_hidden_size(tmp_path):
    export(drafter_of(), tmp_path / "own", "safeailab")
    assert settings(tmp_path / "own")["target_hidden_size"] == 32
    assert "embed_tokens.weight" in tensors(tmp_path / "own")
    export(drafter_of(own_embed=False), tmp_path / "lent", "safeailab")
    assert "target_hidden_size" not in settings(tmp_path / "lent")
    assert "embed_tokens.weight" not in tensors(tmp_path / "lent")
    assert "rope_parameters" not in settings(tmp_path / "own")
    assert "head_dim" not in settings(tmp_path / "own")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("source", ["target", "target_with_norm"])
@pytest.mark.parametrize("size", [20, 61])
def test_a_lent_head_is_written_as_it_is_used(tmp_path, form, source, size):
    lender = target()
    drafter = drafter_of(own_embed=False, lm_head=source, draft_vocab_size=size, lender=lender)
    exported = export(drafter, tmp_path / "d", form, target=lender)
    rows = lender.head.lm_head[[*range(1, 20), 60]] if size == 20 else lender.head.lm_head
    expected = rows * lender.head.norm_weight if source == "target_with_norm" else rows
    assert torch.equal(tensors(tmp_path / "d")["lm_head.weight"], expected)
    again = load(tmp_path / "d", form, lender)
    assert again.config.lm_head == "own"
    assert torch.equal(logits(again), logits(drafter))
    assert any(
        note.startswith("lm_head.weight") and ("gain" in note) == (source != "target") for note in exported.notes
    )


def test_a_narrower_dtype_is_said_to_round(tmp_path):
    drafter = drafter_of(draft_vocab_size=20)
    exported = export(drafter, tmp_path / "d", "vllm", dtype=torch.bfloat16)
    assert not exported.bit_equal
    assert any("not bit-equal" in note for note in exported.notes)
    written = tensors(tmp_path / "d")
    assert torch.equal(written["fc.weight"], drafter.fc.weight.bfloat16())
    assert written["d2t"].dtype == torch.int64
    assert settings(tmp_path / "d")["torch_dtype"] == "bfloat16"
    half = drafter_of(draft_vocab_size=20).to(torch.bfloat16)
    assert export(half, tmp_path / "e", "vllm").bit_equal
    assert tensors(tmp_path / "e")["fc.weight"].dtype == torch.bfloat16
    wide = export(half, tmp_path / "f", "vllm", dtype=torch.float32)
    assert wide.bit_equal
    assert torch.equal(tensors(tmp_path / "f")["fc.weight"], half.fc.weight.float())


def test_values_that_would_become_zero_are_counted_or_refused(tmp_path):
    drafter = drafter_of()
    with torch.no_grad():
        drafter.fc.weight[0, :7] = 1e-9  # the least of float16 is 6e-8
        drafter.norm.weight[3] = -2e-8
    exported = export(drafter, tmp_path / "few", "vllm", dtype=torch.float16)
    (note,) = (note for note in exported.notes if "became zero" in note)
    assert note == "dtype: 8 values too small for float16 became zero, most of them in fc.weight (7)"
    assert not any("zero" in note for note in export(drafter, tmp_path / "bf16", "vllm", dtype=torch.bfloat16).notes)
    with torch.no_grad():
        drafter.fc.weight.mul_(1e-8)
    count = int(drafter.fc.weight.count_nonzero())
    words = rf"fc\.weight: \d+ of {count} values .*too small for float16"
    refused(drafter, tmp_path / "d", "vllm", words, dtype=torch.float16)
    export(drafter, tmp_path / "d", "vllm")
    with torch.no_grad():
        drafter.norm.weight[3] = 1.0
        drafter.fc.weight.zero_()  # zeros of its own are no loss
    assert not any("zero" in n for n in export(drafter, tmp_path / "zero", "vllm", dtype=torch.float16).notes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens 0"),
        ({"num_speculative_tokens": 3.5}, r"num_speculative_tokens 3\.5: .*a whole number"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens True"),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens '3'"),
        ({"dtype": "bfloat16"}, "dtype bfloat16: engines read"),
        ({"target_name": 3}, "target_name 3: give a string"),
        ({"target_model_type": ["llama"]}, r"target_model_type \['llama'\]"),
        ({"form": "trt"}, "format 'trt': choose from"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(tmp_path, options, told):
    from driftlab import DriftlabError
    from driftlab.drafter.formats import export as module

    options = {"form": "speculators", "target": target(), **options}
    form, run = options.pop("form"), module.export_drafter
    run = getattr(run, "__wrapped__", run)  # as it runs for users, whom no type hook stops first
    with pytest.raises(DriftlabError, match=told):
        run(drafter_of(), tmp_path / "d", format=form, **options)
    assert not (tmp_path / "d").exists()


def test_trained_for_is_said_only_where_a_training_or_a_file_says_so(tmp_path):
    from driftlab import Drafter

    def said(drafter, name):
        return [note for note in export(drafter, tmp_path / name, "vllm", target=served).notes if "trained for" in note]

    served = target(name="owner/served")
    served.spec.fingerprint = "e" * 64
    export(drafter_of(own_embed=False), tmp_path / "theirs", "vllm")
    (tmp_path / "theirs" / "driftlab_export.json").unlink()
    foreign = Drafter.load(tmp_path / "theirs", target())
    assert said(foreign, "loaded") == []
    foreign.save(tmp_path / "saved")
    assert said(Drafter.load(tmp_path / "saved", served), "again") == []
    foreign.trained_for = {"label": "owner/first", "fingerprint": "f" * 64}
    assert said(foreign, "trained") == ["trained for owner/first: with other weights it accepts less"]


def test_a_value_that_the_dtype_has_not_is_named(tmp_path):
    drafter = drafter_of()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e6
    refused(drafter, tmp_path / "d", "vllm", r"fc\.weight.*not finite in float16", dtype=torch.float16)
    refused(drafter, tmp_path / "d", "vllm", "engines read float32", dtype=torch.float64)


# ---- rotary settings


def scalings():
    from driftlab.drafter.rotary import RopeScaling

    return {
        "linear": RopeScaling(kind="linear", factor=4.0),
        "llama3": RopeScaling(
            kind="llama3", factor=8.0, original_max_positions=32, low_freq_factor=1.0, high_freq_factor=4.0
        ),
        "yarn": RopeScaling(kind="yarn", factor=4.0, original_max_positions=64, beta_fast=20.0, beta_slow=2.0),
    }


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators"])
def test_rotary_settings_mean_to_transformers_what_they_mean_here(tmp_path, kind, form):
    """speculators#574: both spellings, each read by itself, give the drafter's own frequencies."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from driftlab.drafter.rotary import frequencies

    drafter = drafter_of(own_embed=False, rope_theta=5000.0, rope_scaling=scalings().get(kind))
    export(drafter, tmp_path / "d", form)
    written = settings(tmp_path / "d")
    written = written["transformer_layer_config"] if form == "speculators" else written
    ours = frequencies(8, 5000.0, scalings().get(kind)).float()
    keep = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    for spelling in (("rope_theta", "rope_scaling"), ("rope_parameters",)):
        config = LlamaConfig(**{key: written[key] for key in (*keep, *spelling)})
        rotary = LlamaRotaryEmbedding(config)
        torch.testing.assert_close(rotary.inv_freq, ours, rtol=1e-5, atol=0)
        factor = 1.0 if kind == "default" else scalings()[kind].rotation_factor
        assert rotary.attention_scaling == pytest.approx(factor)
    assert_same(drafter, load(tmp_path / "d", form))


def test_rotary_kinds_that_an_engine_reads_otherwise(tmp_path):
    import dataclasses

    from driftlab.drafter.rotary import RopeScaling

    kinds = scalings() | {"dynamic": RopeScaling(kind="dynamic", factor=2.0, original_max_positions=64)}

    def drafter(scaling, theta=10000.0):
        return drafter_of(own_embed=False, rope_scaling=scaling, rope_theta=theta)

    for form in ("vllm", "sglang", "speculators"):
        refused(drafter(kinds["dynamic"]), tmp_path / "d", form, "rope_scaling dynamic")
    for kind in ("llama3", "yarn"):
        refused(drafter(kinds[kind]), tmp_path / "d", "safeailab", f"rope_scaling {kind}")
    refused(drafter(kinds["linear"], 5000.0), tmp_path / "d", "safeailab", "rope_theta 5000 .*base 10000")
    for kind in ("linear", "dynamic"):
        folder = tmp_path / kind
        export(drafter(kinds[kind]), folder, "safeailab")
        assert settings(folder)["rope_scaling"] == {"type": kind, "factor": kinds[kind].factor}
        assert_same(drafter(kinds[kind]), load(folder, "safeailab"))
    assert settings(tmp_path / "dynamic")["max_position_embeddings"] == 64
    sharp = dataclasses.replace(kinds["yarn"], attention_factor=1.0)
    refused(drafter(sharp), tmp_path / "d", "sglang", "only plain yarn")
    export(drafter(sharp), tmp_path / "sharp", "vllm")
    assert_same(drafter(sharp), load(tmp_path / "sharp", "vllm"))


def test_positions_reach_as_far_as_the_target_s(tmp_path):
    """vllm#49343."""
    export(drafter_of(), tmp_path / "a", "vllm", target=target(positions=131072))
    assert settings(tmp_path / "a")["max_position_embeddings"] == 131072
    scaled = drafter_of(rope_scaling=scalings()["yarn"])
    export(scaled, tmp_path / "b", "vllm", target=target(positions=100))
    assert settings(tmp_path / "b")["max_position_embeddings"] == 256


# ---- the folder


def test_an_export_replaces_an_export_and_nothing_else(tmp_path):
    from driftlab import DriftlabError

    folder = tmp_path / "d"
    export(drafter_of(), folder, "vllm")
    export(drafter_of(own_embed=False), folder, "sglang")
    assert check(folder, "sglang") == []
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "driftlab_export.json",
        "driftlab_export.lock",
        "model.safetensors",
    ]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DriftlabError, match=r"notes\.txt.*choose another folder"):
        export(drafter_of(), folder, "vllm")
    assert check(folder, "sglang") == []
    other = tmp_path / "trained"
    own_tables().save(other)
    before = {p.name: p.read_bytes() for p in other.iterdir()}
    with pytest.raises(DriftlabError, match=r"config\.json, model\.safetensors, which no export wrote"):
        export(drafter_of(), other, "vllm")
    assert {p.name: p.read_bytes() for p in other.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(DriftlabError, match="is a file"):
        export(drafter_of(), tmp_path / "file", "vllm")


def test_a_failure_leaves_the_older_export_or_none(tmp_path, monkeypatch):
    from driftlab import DriftlabError
    from driftlab.drafter.formats import export_folder as module

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    folder = tmp_path / "d"
    export(drafter_of(), folder, "vllm")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full)
        for where in (folder, tmp_path / "new"):
            with pytest.raises(DriftlabError, match="no space left"):
                export(drafter_of(norm_output=True), where, "vllm")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert not (tmp_path / "new" / "config.json").exists()
    with monkeypatch.context() as patch:
        write = module.write_json
        patch.setattr(
            module, "write_json", lambda path, value: (full if path.name == "config.json" else write)(path, value)
        )
        with pytest.raises(OSError, match="No space"):
            export(drafter_of(norm_output=True), folder, "vllm")
    assert not (folder / "config.json").exists()  # new tensors never lie beside old settings
    for where in (folder, tmp_path / "new"):
        export(drafter_of(norm_output=True), where, "vllm")
        assert_same(drafter_of(norm_output=True), load(where, "vllm"))


def test_an_export_has_the_hash_of_its_weights(tmp_path):
    import hashlib

    def marked():
        told = json.loads((tmp_path / "d" / "driftlab_export.json").read_text())["weights"]
        return told, hashlib.sha256((tmp_path / "d" / "model.safetensors").read_bytes()).hexdigest()

    export(drafter_of(), tmp_path / "d", "vllm")
    first = marked()
    assert first[0] == first[1]
    assert (tmp_path / "d" / "model.safetensors").stat().st_size > 0
    export(drafter_of(fc_norm=True), tmp_path / "d", "vllm")
    second = marked()
    assert second[0] == second[1] != first[0]


def test_a_drafter_that_took_the_place_of_an_export_is_not_written_over(tmp_path):
    from driftlab import DriftlabError

    folder = tmp_path / "d"

    def kept(told):
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        with pytest.raises(DriftlabError, match=told):
            export(drafter_of(), folder, "vllm")
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before

    export(drafter_of(), folder, "vllm")
    own_tables().save(tmp_path / "own")
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "own" / file, folder)
    kept("a drafter that was saved there .*driftlab block.*choose another folder")
    own_tables().save(folder)
    kept("choose another folder")
    shutil.rmtree(folder)
    export(drafter_of(), folder, "vllm")
    save_file({"fc.weight": torch.ones(3)}, folder / "model.safetensors")
    kept(r"model\.safetensors is not what .* says was exported")
    (folder / "config.json").unlink()  # the weights alone are somebody's, too
    kept(r"model\.safetensors is not what .* says was exported")
    for text, told in (
        ("[]", "holds a list, not what an export writes"),
        ("3", "holds a int"),
        ("", "cannot be read"),
        ("[" * 100000, "cannot be read"),
        ("{}", "another version of driftlab"),
        ('{"format_version": 1}', None),
    ):
        shutil.rmtree(folder)
        export(drafter_of(), folder, "vllm")
        (folder / "driftlab_export.json").write_text(text)
        kept(told or r"model\.safetensors is not what")


@pytest.mark.parametrize("stop", range(7))
def test_wherever_an_export_was_cut_off_it_can_be_repeated(tmp_path, monkeypatch, stop):
    """Each step of the writing is left out in turn, and all after it, over an older export."""
    import os

    from driftlab import files

    folder, left = tmp_path / "d", [stop]
    export(drafter_of(), folder, "vllm")
    newer = drafter_of(norm_output=True, aux_layers=(1, 4, 6))

    def counted(step):
        def run(*args, **kwargs):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return step(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(files.os, "fsync", counted(files.os.fsync))
        patch.setattr(
            Path,
            "unlink",
            lambda self, missing_ok=False, real=Path.unlink: (
                counted(real)(self, missing_ok=missing_ok)
                if self.name == "config.json"
                else real(self, missing_ok=missing_ok)
            ),
        )
        with pytest.raises(KeyboardInterrupt):
            export(newer, folder, "vllm")
    if (folder / "config.json").exists():
        assert_same(drafter_of(), load(folder, "vllm"))
    export(newer, folder, "vllm")
    assert_same(newer, load(folder, "vllm"))


def test_what_breaks_a_rule_is_never_finished(tmp_path, monkeypatch):
    from driftlab import DriftlabError
    from driftlab.drafter.formats import export as module

    monkeypatch.setattr(module, "_midlayer", lambda name: name)
    with pytest.raises(DriftlabError, match=r"breaks rules of the loader: .*layers\.0"):
        export(drafter_of(own_embed=False), tmp_path / "d", "safeailab")
    assert not (tmp_path / "d" / "config.json").exists()


def test_the_same_drafter_is_the_same_file(tmp_path):
    for name in "ab":
        export(drafter_of(draft_vocab_size=20), tmp_path / name, "speculators")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_command_to_try_it(tmp_path):
    folder = tmp_path / "my drafter"
    vllm = export(drafter_of(), folder, "vllm", num_speculative_tokens=5)
    words = vllm.command.split("--speculative-config ")
    assert words[0] == "vllm serve owner/target "
    assert json.loads(words[1].strip("'")) == {
        **{"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5}
    }
    sglang = export(drafter_of(own_embed=False), folder, "sglang", num_speculative_tokens=5).command
    assert sglang.startswith("python3 -m sglang.launch_server --model-path owner/target ")
    assert "--speculative-algorithm EAGLE3" in sglang
    assert f"--speculative-draft-model-path '{folder}'" in sglang
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in sglang
    speculators = export(drafter_of(), folder, "speculators", num_speculative_tokens=5)
    assert speculators.command == f"vllm serve '{folder}'"
    assert settings(folder)["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert settings(folder)["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    safeailab = export(drafter_of(), folder, "safeailab", target_name="other/name").command
    compile(safeailab, "command", "exec")
    assert "use_eagle3=True" in safeailab
    assert "base_model_path='other/name'" in safeailab
    assert str(folder) in vllm.words()
    assert vllm.command in vllm.words()


# ---- the checker: other people's folders, and every kind of damage


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("vllm", {"num_hidden_layers": 2, "fc_norm": True, "norm_before_fc": True, "draft_vocab_size": 20}),
        ("vllm", {"qk_norm": True}),
        ("sglang", {"num_hidden_layers": 2, "fc_norm": True, "draft_vocab_size": 20, "own_embed": False}),
        ("speculators", {"qk_norm": True, "norm_before_fc": True, "draft_vocab_size": 20}),
        ("safeailab", {"draft_vocab_size": 20}),
    ],
)
def test_every_tensor_that_is_missing_or_misshapen_is_found(tmp_path, form, options):
    folder = tmp_path / "d"
    export(drafter_of(**options), folder, form)
    whole = tensors(folder)
    optional = {"t2d"} if form in ("vllm", "sglang") else set()
    optional |= {"embed_tokens.weight"} if form != "safeailab" else set()
    optional |= {"lm_head.weight"} if form in ("vllm", "speculators") and "draft_vocab_size" not in options else set()
    optional |= {"layers.1.input_layernorm.weight"} if form == "sglang" else set()
    for name, tensor in whole.items():
        save_file({n: t for n, t in whole.items() if n != name}, folder / "model.safetensors")
        found = check(folder, form)
        assert bool(found) == (name not in optional), name
        assert all(name in words for words in found), (name, found)
        if name != "t2d":
            save_file(whole | {name: torch.cat([tensor, tensor[:1]])}, folder / "model.safetensors")
            assert any(name in words for words in check(folder, form)), name


def edit(folder, changed=(), added=(), without=()):
    """Change settings (a dotted name reaches into a block) and tensors; ``without`` removes either."""
    config, weights = settings(folder), tensors(folder)
    for key, value in dict(changed).items():
        *blocks, last = key.split(".")
        block = config
        for name in blocks:
            block = block[name]
        block[last] = value
    for key in without:
        *blocks, last = key.split(".") if key not in weights else [key]
        block = config
        for name in blocks:
            block = block[name]
        block.pop(last, None)
        weights.pop(key, None)
    weights |= dict(added)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


IDS = "eagle_aux_hidden_state_layer_ids"
ONES = torch.ones(32)
MUTATIONS = {
    # setting, changed, added, removed, what must be told
    "vllm": [
        ({"architectures": ["LlamaModel"]}, {}, (), "architectures"),
        ({"fc_norm": False}, {}, (), r"fc_norm\.0\.weight: vLLM has no such tensor and stops"),
        ({"norm_before_fc": False, "eagle_config.norm_before_fc": False}, {}, (), "input_norm.weight: .*in silence"),
        ({IDS: [2, 4, 6]}, {}, (), r"\[2, 4, 6\] at the top level, \[2, 4, 5\] in eagle_config"),
        ({}, {}, (IDS,), "only in eagle_config"),
        ({IDS: [4, 2, 5], f"eagle_config.{IDS}": [4, 2, 5]}, {}, (), "do not ascend"),
        ({IDS: [2, 4], f"eagle_config.{IDS}": [2, 4]}, {}, (), "2 ids, fc takes 3"),
        ({"num_aux_hidden_states": 4}, {}, (), r"fc\.weight: \[32, 96\] in the file, \[32, 128\]"),
        ({"draft_vocab_size": 61}, {}, (), "d2t: vLLM has no such tensor"),
        ({"draft_vocab_size": 70}, {}, (), "draft_vocab_size: 70"),
        ({}, {"model.norm.weight": ONES}, ("norm.weight",), r"model\.norm\.weight: vLLM puts model\. before"),
        ({}, {"layers.0.self_attn.q_norm.weight": torch.ones(8)}, (), "q_norm.weight: vLLM has no such tensor"),
        ({}, {"layers.0.self_attn.q_proj.bias": ONES}, (), "q_proj.bias: vLLM has no such tensor"),
        ({"attention_bias": True}, {}, (), "o_proj.bias: not in the file"),
        ({"mlp_bias": True}, {}, (), "gate_proj.bias: not in the file"),
        ({"eagle_config.use_aux_hidden_state": False}, {}, (), "fc.weight: vLLM leaves it out in silence"),
        ({"hidden_act": "gelu"}, {}, (), "hidden_act"),
        ({"norm_output": "yes"}, {}, (), "norm_output: 'yes'"),
        ({"rope_theta": 5e5}, {}, (), "contradict each other"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}, (), "rope_scaling and rope_parameters differ"),
        ({"rope_parameters.rope_type": "su"}, {}, ("rope_scaling",), "rope: 'su'"),
        ({"rope_parameters.rope_type": "yarn"}, {}, ("rope_scaling",), "yarn without factor"),
        ({}, {}, ("rms_norm_eps",), "rms_norm_eps"),
        ({}, {}, ("max_position_embeddings",), "max_position_embeddings"),
        ({}, {}, ("hidden_size",), "hidden_size: None"),
        ({"num_hidden_layers": 1}, {}, (), r"layers\.1\..*vLLM has no such tensor"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, (), "sliding_window None"),
        ({}, {"midlayer.hidden_norm.weight": ONES}, (), "a second name of layers.0.hidden_norm.weight"),
        ({}, {"d2t": torch.arange(20)}, (), "d2t and t2d name different"),
        ({}, {"d2t": torch.arange(1, 61, 3)}, ("t2d",), "d2t: no offsets"),
        ({}, {"d2t": torch.zeros(20)}, (), "d2t: torch.float32"),
        ({}, {"norm.weight": ONES * float("nan")}, (), "norm.weight: .*not finite"),
        ({}, {"fc.weight": torch.full((32, 96), float("inf"))}, (), "fc.weight: .*not finite"),
        ({}, {"t2d": torch.tensor([*[False] * 64, True])}, (), r"t2d: \[65\], and vocab_size is 61"),
        ({}, {"d2t": torch.tensor([1] * 19 + [2**63 - 1])}, ("t2d",), "d2t: no offsets"),
        ({"num_hidden_layers": 10**9}, {}, (), "num_hidden_layers: 1000000000 is not a whole number in 1"),
        ({"num_hidden_layers": None}, {}, (), "num_hidden_layers: None"),
        ({"norm_before_residual": None}, {}, (), "norm_before_residual: None is not true or false"),
        ({"architectures": 5}, {}, (), "architectures: 5 is not a list of strings"),
        ({"eagle_config": "x"}, {}, (), "eagle_config: 'x' is not an object"),
        ({f"eagle_config.{IDS}": 5}, {}, (), rf"eagle_config\.{IDS}: 5 is not a list"),
        ({"rope_scaling": [5]}, {}, (), r"rope_scaling: \[5\] is not an object"),
        ({"rope_theta": "x"}, {}, (), "rope_theta: 'x' is not a finite number"),
        ({"rms_norm_eps": float("nan")}, {}, (), "rms_norm_eps: nan"),
        ({}, {"norm.weight": torch.ones(32, dtype=torch.int8)}, (), "norm.weight: torch.int8"),
    ],
    "sglang": [
        ({"architectures": ["LlamaForCausalLM"]}, {}, (), "architectures"),
        ({}, {}, ("draft_vocab_size",), "draft_vocab_size: SGLang wants the key"),
        ({"norm_before_residual": True}, {}, (), "norm_before_residual: .*in silence"),
        ({"attention_bias": True}, {}, (), "attention_bias: .*in silence"),
        ({"logit_scale": 0.5}, {}, (), "logit_scale"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, (), "layer_types"),
        ({"tie_word_embeddings": True}, {}, (), "tie_word_embeddings"),
        ({IDS: [2, 4, 5]}, {}, (f"eagle_config.{IDS}",), "at the top level, where SGLang does not look"),
        ({"fc_norm": False}, {}, (), r"fc_norm\.2\.weight: SGLang skips it in silence"),
        ({}, {"layers.0.self_attn.k_norm.weight": torch.ones(8)}, (), "k_norm.weight: SGLang skips it in silence"),
        ({}, {"embed_tokens.weight": torch.zeros(61, 32)}, (), "embed_tokens.weight: .*target's embedding"),
        ({}, {"layers.1.input_layernorm.weight": ONES}, (), "differs from hidden_norm"),
        ({"bias": True}, {}, (), "fc.bias: not in the file"),
        ({"eagle_config.norm_before_fc": True}, {}, (), "input_norm.weight: not in the file"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, ("rope_parameters",), "'dynamic'"),
        ({f"eagle_config.{IDS}": [1, 3]}, {}, (), "2 ids, fc takes 3"),
    ],
    "speculators": [
        ({"speculators_model_type": "eagle"}, {}, (), "speculators_model_type"),
        ({"transformer_layer_config.model_type": "gemma"}, {}, (), "model_type: 'gemma'"),
        ({}, {}, ("transformer_layer_config.model_type",), "speculators takes qwen3 and vLLM llama"),
        ({}, {}, ("norm_before_residual",), "speculators takes it as off, vLLM as on"),
        ({"fc_norm": True}, {}, (), "takes one of the two"),
        ({"target_hidden_size": 64}, {}, (), "target_hidden_size"),
        ({}, {}, ("draft_vocab_size",), "32000"),
        ({"speculators_config.proposal_methods": []}, {}, (), "speculative_tokens"),
        ({"speculators_config.verifier.name_or_path": None}, {}, (), "verifier.name_or_path"),
        ({"speculators_config.default_proposal_method": "tree"}, {}, (), "default_proposal_method"),
        ({}, {}, ("transformer_layer_config",), "transformer_layer_config: not in"),
        ({}, {}, ("t2d",), "needs both, or neither"),
        ({IDS: [2, 4, 5, 6]}, {}, (), r"fc\.weight: \[32, 96\] in the file, \[32, 128\]"),
        ({"transformer_layer_config.attention_bias": True}, {}, (), "attention_bias"),
        ({"transformer_layer_config.hidden_size": "32"}, {}, (), r"transformer_layer_config\.hidden_size: '32'"),
        ({"speculators_config": "x"}, {}, (), "speculators_config: 'x' is not an object"),
        ({"speculators_config.proposal_methods": [3]}, {}, (), r"proposal_methods: \[3\] is not a list of objects"),
        ({"speculators_config.verifier": 3}, {}, (), r"speculators_config\.verifier: 3 is not an object"),
    ],
    "safeailab": [
        ({"norm_output": True}, {}, (), "norm_output: .*in silence"),
        ({}, {"fc_norm.0.weight": ONES}, (), r"fc_norm\.0\.weight: SafeAILab's code skips it"),
        ({"head_dim": 16}, {}, (), "head_dim"),
        ({"num_hidden_layers": 2}, {}, (), "num_hidden_layers"),
        ({}, {}, ("draft_vocab_size",), "draft_vocab_size"),
        ({}, {}, ("embed_tokens.weight",), "embed_tokens.weight: .*does not take the target's"),
        ({"target_hidden_size": 64}, {}, (), r"fc\.weight: \[32, 96\] in the file, \[32, 192\]"),
        ({}, {"layers.0.hidden_norm.weight": ONES}, ("midlayer.hidden_norm.weight",), "calls its layer midlayer"),
        ({}, {}, ("t2d",), "t2d: not in the file"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, {}, (), "'llama3'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 8.0}}, {}, (), "type and factor"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 5e5}, {}, (), "base 10000"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}, ("rope_theta",), "does not read them"),
    ],
}
MUTATED = {
    "vllm": {"num_hidden_layers": 2, "fc_norm": True, "norm_before_fc": True, "draft_vocab_size": 20},
    "sglang": {"num_hidden_layers": 2, "fc_norm": True, "draft_vocab_size": 20, "own_embed": False},
    "speculators": {"qk_norm": True, "norm_before_fc": True, "draft_vocab_size": 20},
    "safeailab": {"draft_vocab_size": 20},
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_damage_is_told(tmp_path, form):
    export(drafter_of(**MUTATED[form]), tmp_path / "whole", form)
    for changed, added, without, told in MUTATIONS[form]:
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        assert check(folder, form) == []
        edit(folder, changed, added, without)
        found = check(folder, form)
        assert any(re.search(told, words) for words in found), (told, found)
        shutil.rmtree(folder)


def test_files_that_cannot_be_read(tmp_path):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match="is not a folder"):
        check(tmp_path / "none", "vllm")
    with pytest.raises(DriftlabError, match="choose from vllm, sglang"):
        check(tmp_path, "trt")
    assert "config.json cannot be read" in check(tmp_path, "vllm")[0]
    (tmp_path / "config.json").write_text("[]")
    assert check(tmp_path, "vllm") == ["config.json is not an object"]
    (tmp_path / "config.json").write_text("{}")
    assert "no file of weights" in check(tmp_path, "vllm")[0]
    (tmp_path / "model.safetensors").write_bytes(b"\x05" * 40)
    assert "cannot be read" in check(tmp_path, "vllm")[0]


def test_weights_that_cannot_be_read_are_findings(tmp_path):
    export(drafter_of(), tmp_path / "d", "vllm")
    whole, folder = tensors(tmp_path / "d"), tmp_path / "d"
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    for held, told in (
        (torch.nn.Linear(2, 2), "reading it would run its code"),
        ([1], "not a dictionary of tensors"),
        ({**whole, "step": 3}, "not a dictionary of tensors"),
        ({**whole, 3: torch.ones(1)}, "a tensor named 3"),
        ({**whole, "norm.weight": torch.ones(32).to_sparse()}, r"norm\.weight is a sparse"),
        ({**whole, "norm.weight": torch.ones(32, device="meta")}, r"norm\.weight is a sparse"),
    ):
        torch.save(held, file)
        (found,) = check(folder, "vllm")
        assert re.search(told, found)
        assert "pytorch_model.bin" in found
    torch.save({**whole, "norm.weight": torch.tensor(1.0)}, file)
    assert any(words.startswith("norm.weight: [] in the file") for words in check(folder, "vllm"))
    torch.save({**whole, "norm.weight": torch.ones(32, dtype=torch.complex64)}, file)
    assert any("norm.weight: torch.complex64" in words for words in check(folder, "vllm"))
    for content, told in ((b"", "cannot be read"), (b"version https://git-lfs.github.com/spec/v1", "LFS pointer")):
        file.write_bytes(content)
        assert told in check(folder, "vllm")[0]
    file.unlink()
    (folder / "model.safetensors").mkdir()
    assert "cannot be read" in check(folder, "vllm")[0]
    (folder / "config.json").write_text("[" * 100000)
    assert "config.json cannot be read" in check(folder, "vllm")[0]
    (folder / "config.json").write_text('{"hidden_size": ' + "1" * 5000 + "}")
    assert "config.json cannot be read" in check(folder, "vllm")[0]


STRANGE = [None, True, False, 0, -1, 3, 2.5, 1e400, float("nan"), 10**30, "", "x", "8", [], [5], ["x"], [None], {}]
STRANGE += [{"x": 1}, [[1]], [{}], [{"x": [1]}], {"rope_type": [1]}, {"type": {}}, [2, "4", 5], [2, 4, 10**30]]


def places(config):
    """Every setting of config.json: its block, and its name."""
    for name, value in config.items():
        yield config, name
        if isinstance(value, dict):
            yield from places(value)
        for item in value if isinstance(value, list) else ():
            yield from places(item) if isinstance(item, dict) else ()


def mutated(weights, generator):
    """One tensor of another shape, dtype or name, or gone."""
    name = generator.choice(sorted(weights))
    tensor = weights.pop(name)
    how = generator.randrange(7)
    if how < 3:
        size = [(), (0,), tuple(tensor.shape) + (1,)][how]
        weights[name] = torch.zeros(size, dtype=tensor.dtype)
    elif how == 3:
        dtypes = (torch.int64, torch.bool, torch.float64, torch.uint8, torch.float8_e4m3fn, torch.int16)
        weights[name] = tensor.to(generator.choice(dtypes))
    elif how == 4:
        weights[generator.choice(["", ".", "layers.", "layers.x.y", "model.", "midlayer.", "fc_norm."]) + name] = tensor
    elif how == 5:
        weights[name] = (tensor.double() * 1e300 * float("inf")).to(tensor.dtype)
    return weights


@pytest.mark.parametrize("form", FORMATS)
def test_whatever_a_folder_holds_the_checker_tells_and_never_raises(tmp_path, form):
    """Seeded mutations of settings and tensors; a setting of a wrong kind is named by its own name."""
    import copy
    import random

    export(drafter_of(**MUTATED[form]), tmp_path / "d", form)
    whole, weights = settings(tmp_path / "d"), tensors(tmp_path / "d")
    generator, told = random.Random(7), 0
    for number in range(75):
        config = copy.deepcopy(whole)
        spots = list(places(config))
        extra = [
            ("eagle_config", config),
            ("rope_scaling", config),
            ("layer_types", config),
            ("num_aux_layers", config),
        ]
        spots += [(block, name) for name, block in extra]
        changed = []
        for block, name in generator.sample(spots, 1 + number % 2):
            block[name] = generator.choice(STRANGE)
            changed.append((name, block[name]))
        (tmp_path / "d" / "config.json").write_text(json.dumps(config))
        file = tmp_path / "d" / "model.safetensors"
        save_file(mutated(dict(weights), generator) if number % 3 == 0 else weights, file)
        found = check(tmp_path / "d", form)
        assert all(isinstance(words, str) and words for words in found), changed
        told += bool(found)
    assert told > 50


@pytest.mark.parametrize("form", FORMATS)
def test_every_setting_that_a_loader_reads_is_told_when_it_is_an_object_of_another_kind(tmp_path, form):
    """An object where a number, a flag, a string or a list is wanted, and a string where an object is."""
    import copy

    export(drafter_of(**MUTATED[form]), tmp_path / "d", form)
    whole = settings(tmp_path / "d")
    unread = {"torch_dtype", "dtype", "use_sliding_window", "embed_requires_grad", "speculators_version"}
    unread |= {"verifier_accept_k", "accept_tolerance", "rope_interleave"}
    for index, (_, name) in enumerate(places(whole)):
        config = copy.deepcopy(whole)
        block, _ = list(places(config))[index]
        is_verifiers = name == "architectures" and block is not config
        block[name] = "x" if isinstance(block[name], dict) or name == "rope_scaling" else {"x": [1]}
        (tmp_path / "d" / "config.json").write_text(json.dumps(config))
        if name not in unread and not is_verifiers:
            assert any(re.match(rf"(.*\.)?{name}: ", words) for words in check(tmp_path / "d", form)), name


def test_safeailab_s_first_choice_is_the_pickle(tmp_path):
    export(drafter_of(), tmp_path / "d", "safeailab")
    torch.save(tensors(tmp_path / "d"), tmp_path / "d" / "pytorch_model.bin")
    assert check(tmp_path / "d", "safeailab") == [
        "pytorch_model.bin is read, and model.safetensors is not: remove the wrong one"
    ]
    (tmp_path / "d" / "model.safetensors").unlink()
    assert check(tmp_path / "d", "safeailab") == []


# ---- numbers of speculators' own code (written by speculators_oracle.py)

ORACLES = Path(__file__).parent / "data" / "oracles"
SPECULATORS = sorted(path.name for path in (ORACLES / "speculators").iterdir() if path.is_dir())


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPECULATORS)
@torch.no_grad()
def test_the_same_numbers_as_speculators(name):
    """Its positions begin at 1 and ours at 0: without effect, for rotary embedding goes by differences."""
    from driftlab import Drafter
    from driftlab.segments import Starts

    folder = ORACLES / "speculators" / name
    drafter, expected = Drafter.load(folder), load_file(folder / "expected.safetensors")
    tokens, (depths, rows, _) = expected["tokens"], expected["logits"].shape
    index = torch.arange(rows)[None]
    starts = Starts(index, torch.ones_like(index, dtype=torch.bool), torch.full_like(index, 2), ("oracle",))
    aux = expected["aux"].view(1, rows, 3, -1)
    close(drafter.fuse(aux)[0], expected["fused"])
    state = drafter.first(tokens[None], aux, starts)
    for depth in range(depths):
        close(drafter.logits(state.normed)[0], expected["logits"][depth])
        close(state.feedback[0], expected["feedback"][depth])
        shifted = torch.cat([tokens[depth + 1 :], tokens.new_zeros(depth + 1)])
        state = drafter.next(state, shifted[None])


def test_the_speculators_cases_tell_the_switches_apart():
    """Each switch changes the numbers, on the same weights: an oracle blind to one would prove nothing."""
    from driftlab.drafter.formats.reading import read_checkpoint

    assert len(SPECULATORS) == 13
    seen = [read_checkpoint(ORACLES / "speculators" / name).config_for() for name in SPECULATORS]
    for switch in (*FLAGS, "attention_bias", "output_bias", "own_embed"):
        values = {getattr(config, switch) for config in seen}
        assert values == ({True} if switch == "own_embed" else {False, True}), switch
    assert {config.num_hidden_layers for config in seen} == {1, 2}
    assert {config.windows for config in seen} >= {(3,)}


@pytest.mark.parametrize("name", SPECULATORS)
def test_what_speculators_writes_and_what_we_write_of_it_keeps_its_rules(tmp_path, name):
    from driftlab import Drafter

    folder = tmp_path / "theirs"
    shutil.copytree(ORACLES / "speculators" / name, folder)
    (folder / "expected.safetensors").unlink()  # vLLM would take it for a part of the weights
    assert check(folder, "speculators") == []
    drafter = Drafter.load(folder)
    export(drafter, tmp_path / "d", "speculators", target=None, target_name="driftlab/random")
    theirs, ours = load_file(folder / "model.safetensors"), tensors(tmp_path / "d")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    written, told = settings(tmp_path / "d"), json.loads((folder / "config.json").read_text())
    same = [*FLAGS[:4], "architectures", IDS, "draft_vocab_size", "speculators_model_type", "tie_word_embeddings"]
    assert {key: written[key] for key in same if key in told} == {key: told[key] for key in same if key in told}
    blocks = written["transformer_layer_config"], told["transformer_layer_config"]
    shared = set(blocks[0]) & set(blocks[1]) - {"max_position_embeddings"}
    assert {key: blocks[0][key] for key in shared} == {key: blocks[1][key] for key in shared}
    assert len(shared) >= 13


def test_other_projects_folders(tmp_path):
    """SafeAILab's keeps its own rules; SGLang would leave out the embedding of TorchSpec's, which is right if it is a copy."""
    assert check(ORACLES / "safeailab", "safeailab") == []
    for name in ("torchspec_f0n1", "torchspec_f1n1"):
        shutil.copytree(ORACLES / name, tmp_path / name, ignore=shutil.ignore_patterns("expected.safetensors"))
        found = check(tmp_path / name, "sglang")
        assert [words.split(":")[0] for words in found] == ["embed_tokens.weight"]
