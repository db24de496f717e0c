"""Perturbations: exact texts by hand, one change at a time, what cannot be done, and how recordings are kept apart."""

from __future__ import annotations

import re

import pytest
from conftest import tiny_llama
from hypothesis import given
from hypothesis import strategies as st

from driftlab import Target
from driftlab.errors import DriftlabError
from driftlab.perturbations import BOS_GRID, PARTS, STANDARD, Perturbation, applicable, moved, spans, token_diff
from driftlab.perturbations.texts import EXCHANGES, LANGUAGES, REPLY, SYSTEMS
from driftlab.prompts import Message, Prompt, encode

#: a BOS of its own, a default system prompt, a switch; roles as given
TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}[system]be kind;{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n"
    "{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}{% endif %}"
)
#: the first role marker is the BOS token itself, as SmolLM2's
MARKED = (
    "{% for m in messages %}{{ bos_token }}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant:{% endif %}"
)
BOS = 256
PROMPTS = [
    Prompt("one", (Message("user", "how are you"),)),
    Prompt("two", (Message("system", "own rule"), Message("user", "what  is\nthis"))),
    Prompt("three", (Message("user", "a"), Message("assistant", "b"), Message("user", "c d"))),
]


def byte_tokenizer(template=TEMPLATE, adds_bos=True, bos="<s>"):
    """One token a byte; ids 256 and 257 are BOS and EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **({"bos_token": bos} if bos else {}))
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def text_of(key, tokenizer, prompts=PROMPTS, which=0):
    return tokenizer.decode(Perturbation.parse(key).apply(prompts, tokenizer)[which].ids)


# ---- exact texts, written out by hand


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("chat", "<s>[system]be kind;[user]how are you;[assistant]\n"),
        ("none", "<s>how are you"),
        ("bos=off", "[system]be kind;[user]how are you;[assistant]\n"),
        ("bos=on", "<s>[system]be kind;[user]how are you;[assistant]\n"),
        ("none+bos=off", "how are you"),
        ("none+bos=on", "<s>how are you"),
        ("system=empty", "<s>[system];[user]how are you;[assistant]\n"),
        ("system=long", f"<s>[system]{SYSTEMS['long']};[user]how are you;[assistant]\n"),
        ("system=default", "<s>[system]be kind;[user]how are you;[assistant]\n"),
        ("whitespace=trailing", "<s>[system]be kind;[user]how are you ;[assistant]\n"),
        ("whitespace=leading", "<s>[system]be kind;[user]\nhow are you;[assistant]\n"),
        ("whitespace=double", "<s>[system]be kind;[user]how  are  you;[assistant]\n"),
        ("whitespace=end", "<s>[system]be kind;[user]how are you;[assistant]"),
        ("roles=human", "<s>[system]be kind;[human]how are you;[ai]\n"),
        ("roles=capital", "<s>[system]be kind;[User]how are you;[Assistant]\n"),
        ("language=de", f"<s>[system]be kind;[user]{LANGUAGES['de']}\n\nhow are you;[assistant]\n"),
        ("thinking=off", "<s>[system]be kind;[user]how are you;[assistant]\n(no thoughts)"),
        ("thinking=on", "<s>[system]be kind;[user]how are you;[assistant]\n"),
        (
            "turns=1",
            f"<s>[system]be kind;[user]{EXCHANGES[0][0]};[assistant]{EXCHANGES[0][1]};[user]how are you;[assistant]\n",
        ),
        ("format=chatml", "<s><|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\n"),
        (
            "format=llama3",
            "<s><|start_header_id|>user<|end_header_id|>\n\nhow are you<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("format=gemma", "<s><start_of_turn>user\nhow are you<end_of_turn>\n<start_of_turn>model\n"),
        ("format=mistral", "<s>[INST] how are you [/INST]"),
        ("format=mistral+bos=off", "[INST] how are you [/INST]"),
    ],
)
def test_texts(key, expected, tokenizer):
    assert text_of(key, tokenizer) == expected


def test_a_dialogue_and_its_own_system_message(tokenizer):
    assert text_of("system=default", tokenizer, which=1) == "<s>[system]be kind;[user]what  is\nthis;[assistant]\n"
    assert text_of("format=mistral", tokenizer, which=1) == "<s>[INST] own rule\n\nwhat  is\nthis [/INST]"
    gemma = "<s><start_of_turn>user\nown rule\n\nwhat  is\nthis<end_of_turn>\n<start_of_turn>model\n"
    assert text_of("format=gemma", tokenizer, which=1) == gemma
    # an EOS in the answer's place is the tokenizer's own token
    assert text_of("format=mistral", tokenizer, which=2) == "<s>[INST] a [/INST] b</s>[INST] c d [/INST]"
    turns = text_of("turns=1", tokenizer, which=2)
    assert turns == f"<s>[system]be kind;[user]a;[assistant]b;[user]{EXCHANGES[0][0]};[assistant]{EXCHANGES[0][1]};" + (
        "[user]c d;[assistant]\n"
    )
    assert text_of("roles=human", tokenizer, which=2) == "<s>[system]be kind;[human]a;[ai]b;[human]c d;[ai]\n"


def test_chat_and_none_are_what_encode_gives(tokenizer):
    for key, template in (("chat", True), ("none", False)):
        found = Perturbation.parse(key).encode(PROMPTS, tokenizer)
        assert found == [encode(prompt, tokenizer, template=template) for prompt in PROMPTS]


def test_more_exchanges_than_there_are_begin_again(tokenizer):
    text = text_of(f"turns={len(EXCHANGES) + 1}", tokenizer)
    assert text.count(EXCHANGES[0][0]) == 2
    assert text.count(EXCHANGES[1][0]) == 1


# ---- BOS


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_bos_grid_is_four_cells_whoever_adds_it(adds_bos):
    tokenizer = byte_tokenizer(adds_bos=adds_bos)
    texts = [text_of(key, tokenizer) for key in BOS_GRID]
    chat = "[system]be kind;[user]how are you;[assistant]\n"
    assert texts == [f"<s>{chat}", chat, "<s>how are you", "how are you"]


def test_a_bos_that_marks_roles_stays():
    tokenizer = byte_tokenizer(MARKED, adds_bos=False)
    plain = "<s>user:how are you;<s>assistant:"
    assert [text_of(key, tokenizer) for key in BOS_GRID] == [f"<s>{plain}", plain, "<s>how are you", "how are you"]


def test_a_foreign_format_keeps_the_bos_there_was():
    # the template writes the BOS, the tokenizer does not
    assert text_of("format=chatml", byte_tokenizer(adds_bos=False)).startswith("<s><|im_start|>")
    bare = byte_tokenizer(TEMPLATE.replace("{{ bos_token }}", ""), adds_bos=False)
    assert text_of("format=chatml", bare).startswith("<|im_start|>")
    # the first token of a template is its marker, and no BOS to be kept
    assert text_of("format=chatml", byte_tokenizer(MARKED, adds_bos=False)).startswith("<|im_start|>")


def test_no_bos_token_at_all():
    tokenizer = byte_tokenizer(TEMPLATE.replace("{{ bos_token }}", ""), adds_bos=False, bos=None)
    assert text_of("bos=off", tokenizer) == text_of("chat", tokenizer)
    with pytest.raises(DriftlabError, match="no BOS token"):
        text_of("bos=on", tokenizer)


# ---- lengths


def many(count=12):
    words = ["stone", "river", "cloud", "lamp", "paper", "window"]
    content = [" ".join(words[(i * k) % 6] for k in range(1, 15)) + f" {i}?" for i in range(count)]
    return [Prompt(str(i), (Message("user", text),)) for i, text in enumerate(content)]


@pytest.mark.parametrize("limit", [200, 500])
def test_text_before_the_question_up_to_a_length(limit, tokenizer):
    prompts = many()
    found = Perturbation.parse(f"before={limit}").apply(prompts, tokenizer)
    for i, one in enumerate(found):
        # one token a byte: the longest word and a space are missing at most
        assert limit - 7 <= one.prompt_length <= limit
        text = tokenizer.decode(one.ids)
        begin, end = "<s>[system]be kind;[user]", f"\n\n{prompts[i].messages[0].content};[assistant]\n"
        assert text.startswith(begin)
        assert text.endswith(end)
        filler = text.removeprefix(begin).removesuffix(end)
        others = "\n\n".join(prompts[(i + k) % 12].messages[0].content for k in range(1, 12))
        assert others.startswith(filler)
        assert prompts[i].messages[0].content not in filler


def test_a_long_conversation(tokenizer):
    prompts = many(40)
    one = Perturbation.parse("dialogue=1500").apply([prompts[3], *prompts[4:], *prompts[:3]], tokenizer)[0]
    text = tokenizer.decode(one.ids)
    assert 1400 <= one.prompt_length <= 1500
    assert text.count(f"[assistant]{REPLY};") == text.count("[user]") - 1 >= 2
    assert text.endswith(f"[user]{prompts[3].messages[0].content};[assistant]\n")


def test_text_from_a_file(tokenizer, tmp_path):
    path = tmp_path / "real.txt"
    path.write_text("one two three four five six seven " * 20)
    perturbation = Perturbation.parse(f"before=100@{path}")
    assert perturbation.key.startswith("before=100@real.txt:")
    assert "one two three" in tokenizer.decode(perturbation.apply(PROMPTS, tokenizer)[0].ids)
    path.write_text("others " * 20)
    assert Perturbation.parse(f"before=100@{path}").key != perturbation.key
    assert Perturbation.parse(f"system=@{path}").apply(PROMPTS, tokenizer)[0].prompt_length > 140


def test_too_little_text_and_prompts_that_are_too_long(tokenizer):
    with pytest.raises(DriftlabError, match="comes to .* with all text"):
        Perturbation.parse("before=5000").apply(PROMPTS, tokenizer)
    with pytest.raises(DriftlabError, match="tokens without it: ask for more than 10"):
        Perturbation.parse("dialogue=10").apply(PROMPTS, tokenizer)


# ---- what cannot be


@pytest.mark.parametrize("key", ["thinking=on", "thinking=off"])
def test_thinking_needs_the_switch(key):
    with pytest.raises(DriftlabError, match="no switch enable_thinking"):
        text_of(key, byte_tokenizer(MARKED))
    with pytest.raises(DriftlabError, match="no switch enable_thinking"):
        text_of(f"none+{key}", byte_tokenizer())


def test_roles_that_a_template_does_not_write():
    fixed = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[Q]{{ m['content'] }}{% else %}[A]{{ m['content'] }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    )
    with pytest.raises(DriftlabError, match="does not write the names"):
        text_of("roles=human", byte_tokenizer(fixed))
    with pytest.raises(DriftlabError, match="no roles without a template"):
        text_of("none+roles=human", byte_tokenizer())


def test_what_changes_nothing_is_refused():
    trimming = byte_tokenizer(TEMPLATE.replace("m['content']", "m['content'] | trim"))
    for key in ("whitespace=trailing", "whitespace=leading"):
        with pytest.raises(DriftlabError, match="changes no token"):
            text_of(key, trimming)
    assert text_of("whitespace=double", trimming) != text_of("chat", trimming)


def test_ones_own_format_is_not_anothers():
    with pytest.raises(DriftlabError, match="own template is of that format"):
        text_of("format=chatml", byte_tokenizer("<|im_start|>" + MARKED))
    with pytest.raises(DriftlabError, match="needs a template"):
        text_of("none+format=gemma", byte_tokenizer())


def test_without_a_chat_template():
    tokenizer = byte_tokenizer(None)
    assert text_of("none", tokenizer) == "<s>how are you"
    assert text_of("none+bos=off", tokenizer) == "how are you"
    assert text_of("format=gemma", tokenizer).startswith("<s><start_of_turn>user")
    with pytest.raises(DriftlabError, match="no chat template"):
        text_of("bos=off", tokenizer)


@pytest.mark.parametrize(
    "key",
    [
        *(
            "",
            "nonsense",
            "bos",
            "bos=",
            "bos=maybe",
            "turns=N",
            "turns=0",
            "turns=-1",
            "turns=two",
            "turns=@x",
        ),
        *("before=@x", "before=10@", "system=@", "bos=on@x", "format=N", "system=N", "turns=²", "before=1.5", "chat=1"),
    ],
)
def test_unknown_keys_list_what_there_is(key):
    name, given, value = key.partition("=")
    told = r"unknown perturbation .* known are chat, none, system=default\|empty"
    if name in PARTS:
        allowed = "|".join(PARTS[name])
        said = f"{value!r} is no value of it" if value else "its value is missing"
        told = re.escape(f"perturbation {key!r}: {said}; write {name}={allowed}")
    with pytest.raises(DriftlabError, match=told):
        Perturbation.parse(key)


@pytest.mark.parametrize("key", ["none=x", "none=1", "none="])
def test_a_part_without_values_takes_none(key):
    with pytest.raises(DriftlabError, match=f"perturbation '{key}': it takes no value; write none$"):
        Perturbation.parse(key)


@pytest.mark.parametrize("key", ["bos=on+bos=off", "none+chat", "turns=1+turns=1"])
def test_one_thing_twice(key):
    with pytest.raises(DriftlabError, match="twice"):
        Perturbation.parse(key)


def test_missing_and_empty_files(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DriftlabError, match="is empty"):
        Perturbation.parse(f"system=@{tmp_path / 'empty.txt'}")
    with pytest.raises(DriftlabError, match="cannot read"):
        Perturbation.parse(f"system=@{tmp_path / 'none.txt'}")


def test_keys_do_not_depend_on_order_and_come_back():
    for key in STANDARD:
        assert Perturbation.parse(key).key == key
    assert Perturbation.parse("bos=off + none").key == "none+bos=off"
    assert Perturbation.parse("chat+bos=off").key == "bos=off"
    assert Perturbation.parse("turns=007").key == "turns=7"


# ---- the set


def test_applicable_leaves_out_what_has_no_use_and_says_why(tokenizer):
    kept, refused = applicable(STANDARD, PROMPTS[:1], tokenizer)
    keys = [one.key for one in kept]
    assert keys[:4] == ["chat", "none", "bos=off", "none+bos=off"]
    assert refused["bos=on"] == "gives the same tokens as chat"
    assert refused["system=default"] == "gives the same tokens as chat"
    assert refused["none+bos=on"] == "gives the same tokens as none"
    assert set(keys) | set(refused) == set(STANDARD)
    assert not set(keys) & set(refused)
    kept, refused = applicable(STANDARD, PROMPTS[:1], byte_tokenizer(MARKED, adds_bos=False))
    assert "enable_thinking" in refused["thinking=on"]


# ---- the diff


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_spans_make_up_both_prompts(before, after):
    found = spans(before, after)
    assert [i for s in found if s.fate != "added" for i in s.ids] == before
    assert [i for s in found if s.fate != "removed" for i in s.ids] == after
    for span in found:
        if span.fate != "added":
            assert tuple(before[span.before : span.before + len(span.ids)]) == span.ids
        if span.fate != "removed":
            assert tuple(after[span.after : span.after + len(span.ids)]) == span.ids


def test_the_diff_of_a_removed_bos_is_one_line(tokenizer):
    one = Perturbation.parse("bos=off").apply(PROMPTS, tokenizer)[0]
    lines = one.diff(tokenizer)
    assert [line for line in lines if line[0] != " "] == ["-     0     256 '<s>'"]
    assert any("tokens kept" in line for line in lines)
    assert one.sinks((0,)) == ()
    assert one.sinks((1, 3)) == (0, 2)


def test_lines_of_a_diff_by_hand():
    class Letters:
        def decode(self, ids):
            return "abcdefgh"[ids[0]]

    assert token_diff([0, 1, 2, 3], [0, 4, 2, 3, 5], Letters()) == [
        "      0       0 'a'",
        "-     1       1 'b'",
        "+     1       4 'e'",
        "      2       2 'c'",
        "      3       3 'd'",
        "+     4       5 'f'",
    ]
    assert moved((0, 1, 3), [0, 1, 2, 3], [4, 4, 0, 2, 3]) == (2, 4)


def test_every_perturbation_changes_only_what_it_says(tokenizer):
    """Of the plain prompt nothing is removed but what the part is about."""
    removed = {
        **{"none": "[system]be kind;[user];[assistant]\n", "bos=off": "<s>", "system=empty": "be kind"},
        **{"whitespace=end": "\n", "language=de": "", "thinking=off": "", "turns=2": "", "whitespace=double": ""},
    }
    for key, expected in removed.items():
        one = Perturbation.parse(key).apply(PROMPTS, tokenizer)[0]
        gone = [i for s in spans(one.plain, one.ids) if s.fate == "removed" for i in s.ids]
        assert tokenizer.decode(gone) == expected, key


# ---- recordings


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama(vocab_size=258), byte_tokenizer(), name="bytes", aux_layers=(1, 3, 5))


def test_recordings_of_two_perturbations_are_two(target, tmp_path, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_CACHE", str(tmp_path))
    made = {
        key: target.record(PROMPTS, max_new_tokens=3, perturbation=Perturbation.parse(key))
        for key in ("chat", "bos=off", "none", "turns=1", "bos=on")
    }
    assert len({trajectory.path for trajectory in made.values()}) == 5  # bos=on has chat's tokens, and its own name
    for key, trajectory in made.items():
        assert trajectory.settings["template"] == key
        expected = Perturbation.parse(key).encode(PROMPTS, target.tokenizer)
        assert [t.tokens[: t.prompt_length].tolist() for t in trajectory] == expected
    # what is no perturbation is the recording that there was
    assert target.record(PROMPTS, max_new_tokens=3).path == made["chat"].path
    assert target.record(PROMPTS, max_new_tokens=3, template=False).path == made["none"].path


def test_a_perturbation_stands_alone(target):
    with pytest.raises(DriftlabError, match="leave template= and system= out"):
        target.record(PROMPTS, perturbation=Perturbation.parse("none"), template=False)
    with pytest.raises(DriftlabError, match="leave template= and system= out"):
        target.record(PROMPTS, perturbation=Perturbation.parse("none"), system="x")
