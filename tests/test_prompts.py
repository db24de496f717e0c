"""Prompt files in every spelling, garbled files, one BOS, whole-dialogue rendering."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import warnings
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftlab.errors import DriftlabError
from driftlab.prompts import SHIPPED, Message, Prompt, encode, evenly, fingerprint, load_prompts

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + TEMPLATE
DIALOGUE = [
    ("system", "Be brief."),
    ("user", "Name a tree."),
    ("assistant", "An oak."),
    ("user", "And another?"),
    ("assistant", "A birch."),
]
EXPECTED = tuple(Message(*pair) for pair in DIALOGUE[:-1])


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def openai(dialogue=DIALOGUE, column="messages"):
    return {column: [{"role": role, "content": text} for role, text in dialogue]}


def sharegpt(dialogue=DIALOGUE):
    names = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names.get(role, role), "value": text} for role, text in dialogue]}


def parts(dialogue=DIALOGUE):
    return {"messages": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in dialogue]}


def user(text, name="p"):
    return Prompt(name, (Message("user", text),))


class Fake:
    """One token a character; BOS is "^" (id 1)."""

    bos_token_id = 1

    def __init__(self, adds=True, template_bos=True, chat_template="yes"):
        self.adds, self.template_bos, self.chat_template, self.calls = adds, template_bos, chat_template, []

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        self.calls.append(messages)
        body = "".join(f"[{m['role']}]{m['content']}" for m in messages)
        return ("^" if self.template_bos else "") + body + "[assistant]"

    def __call__(self, text, add_special_tokens=True):
        ids = [1 if c == "^" else 10 + ord(c) for c in text]
        return {"input_ids": [1, *ids] if add_special_tokens and self.adds else ids}


@pytest.fixture(scope="module")
def fast():
    """A real byte-level tokenizer that puts <s> in front, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])

    def build(template):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
        tokenizer.chat_template = template
        return tokenizer

    return build


# --- the shipped prompts


def test_shipped_prompts_are_eighty_in_eight_categories_with_two_turns():
    prompts = load_prompts("default")
    assert [p.id for p in prompts] == [f"driftlab-{n:03d}" for n in range(1, 81)]
    assert set(Counter(p.category for p in prompts).values()) == {10}
    assert len({p.category for p in prompts}) == 8
    rows = [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()]
    assert all(set(row) == {"question_id", "category", "turns"} and len(row["turns"]) == 2 for row in rows)
    assert len({turn for row in rows for turn in row["turns"]}) == 160
    assert [p.messages for p in prompts] == [(Message("user", row["turns"][0]),) for row in rows]


def test_the_module_needs_neither_torch_nor_transformers():
    code = "import sys, driftlab.prompts; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- spellings (M3, M5)


@pytest.mark.parametrize(
    "row",
    [openai(), openai(column="conversations"), sharegpt(), parts(), {**openai(), "turns": None, "prompt": "ignored"}],
    ids=["openai", "conversations", "sharegpt", "parts", "nulls"],
)
def test_one_dialogue_gives_the_same_messages_in_every_spelling(tmp_path, row):
    (prompt,) = load_prompts(write(tmp_path / "a.jsonl", row))
    assert prompt.messages == EXPECTED
    assert encode(prompt, Fake()) == encode(Prompt("a:1", EXPECTED), Fake())


@pytest.mark.parametrize("row", [{"turns": ["Hi", "And?"]}, {"prompt": "Hi"}, "Hi", openai([("user", "Hi")])], ids=str)
def test_one_user_message_in_every_spelling(tmp_path, row):
    assert load_prompts(write(tmp_path / "a.jsonl", row)) == [Prompt("a:1", (Message("user", "Hi"),))]
    assert load_prompts([row])[0].messages == (Message("user", "Hi"),)


def test_speed_bench_user_turns_without_answers_are_cut_to_the_first():
    row = {"question_id": "q", "category": "qa", **openai([("system", "S"), ("user", "one"), ("user", "two")])}
    assert load_prompts([row]) == [Prompt("q", (Message("system", "S"), Message("user", "one")), "qa")]
    answered = openai([("user", "one"), ("user", "two"), ("assistant", "yes"), ("user", "three")])
    assert len(load_prompts([answered])[0].messages) == 4


def test_speed_bench_placeholder_is_refused():
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{question}"
    with pytest.raises(DriftlabError, match="prompts:1: SPEED-Bench placeholder"):
        load_prompts([{"turns": [text]}])


def test_developer_and_tool_messages_are_kept():
    dialogue = [("developer", "D"), ("user", "U"), ("assistant", "A"), ("tool", "T"), ("user", "V")]
    (prompt,) = load_prompts([openai(dialogue)])
    assert prompt.messages == tuple(Message(*pair) for pair in dialogue)
    assert load_prompts([sharegpt(dialogue)])[0].messages == prompt.messages


def test_what_follows_the_last_user_message_is_cut_and_not_read():
    row = openai([("user", "U")])
    row["messages"] += [{"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "tool", "content": "T"}]
    assert load_prompts([row])[0].messages == (Message("user", "U"),)


def test_several_text_parts_are_joined_by_newlines():
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert load_prompts([{"messages": [{"role": "user", "content": content}]}])[0].messages[0].content == "a\nb"


# --- refusals


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (openai([("narrator", "x")]), "unknown role 'narrator'"),
        ({"messages": [{"content": "x"}]}, "unknown role None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not text"),
        ({"messages": [{"role": "user"}]}, "expected text, found a NoneType"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, {"role": "user", "content": "x"}]}, "tool_calls"),
        ({"messages": ["x"]}, "a message is a dict, not a str"),
        ({"messages": "x"}, "messages must be a list"),
        ({"turns": "x"}, "turns must be a list"),
        ({"turns": [{"role": "user"}]}, "turns: expected text, found a dict"),
        ({"prompt": 3}, "prompt: expected text, found a int"),
        ({"text": "x", "n": 1}, r"no column with a prompt \(columns: 'text', 'n'\).*\"turns\""),
        ({"prompt": "x", "id": 1.5}, "id: expected text"),
        ({"prompt": "x", "id": True}, "id: expected text"),
        ({"prompt": "x", "category": []}, "category: expected text"),
        ({"prompt": "x", "tools": [{"name": "f"}]}, "tools are not rendered"),
        ({"prompt": "\ud800"}, "surrogate"),
        (["x"], "a list is no row"),
        (None, "a NoneType is no row"),
    ],
    ids=str,
)
def test_a_bad_row_is_refused_by_file_and_line(tmp_path, row, message):
    path = write(tmp_path / "a.jsonl", "fine", row)
    with pytest.raises(DriftlabError, match=rf"a\.jsonl:2: .*{message}"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", b'"ok"\n\n{"prompt": "x"\n', r"a\.jsonl:3: not valid JSON .*one JSON value a line.*\"turns\""),
        ("a.jsonl", b'"ok"\n"\xff"\n', r"a\.jsonl:2: .*it is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not valid JSON"),
        ("a.jsonl", b"1" * 5_000, r"a\.jsonl:1: not valid JSON"),
        ("a.json", b'[\n"ok",\n{"prompt" "x"}]', r"a\.json:3: not valid JSON"),
        ("a.json", b'["ok",\n"\xff"]', r"a\.json:2: .*it is not UTF-8"),
        ("a.json", b'{"prompt": "x"}', "expected a list of rows, not a dict"),
        ("a.json", b'["ok", {}]', r"a\.json: item 2: no column"),
        ("a.txt", b"x", r"no \.jsonl or \.json file"),
        ("a.jsonl", b"", "no usable prompt: it has no rows"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DriftlabError, match=message):
        load_prompts(tmp_path / name)


@pytest.mark.parametrize("source", ["missing.jsonl", "nul\0.jsonl", "What is a tree?", {"prompt": "x"}, None, 3])
def test_a_source_that_is_none_is_refused(source):
    with pytest.raises(DriftlabError):
        load_prompts(source)


def test_a_folder_is_refused(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(DriftlabError, match="cannot read"):
        load_prompts(tmp_path / "a.jsonl")


def test_no_usable_prompt_is_an_error_with_counts_and_first_lines(tmp_path):
    """M2: an empty data set must not become a later, unrelated error."""
    rows = [openai([("assistant", "x")]), {"turns": []}, {"prompt": " \n"}]
    expected = r"no usable prompt: 2 with no user message, first .*a\.jsonl:1; 1 with empty user message, first .*:3"
    with pytest.raises(DriftlabError, match=expected):
        load_prompts(write(tmp_path / "a.jsonl", *rows))
    with pytest.raises(DriftlabError, match="the list has no usable prompt: it has no rows"):
        load_prompts([])


def test_some_unusable_prompts_are_skipped_with_a_warning():
    with pytest.warns(UserWarning, match="skipped prompts: 1 with empty user message, first prompts:2"):
        prompts = load_prompts(["a", "", "b"])
    assert [p.id for p in prompts] == ["prompts:1", "prompts:3"]


@pytest.mark.parametrize("options", [{"turns": "all"}, {"limit": 0}, {"limit": -1}])
def test_options_outside_their_range_are_refused(options):
    with pytest.raises(DriftlabError, match=next(iter(options))):
        load_prompts("default", **options)


# --- files


def test_bom_crlf_and_empty_lines_are_tolerated(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n\r\n  \n{"prompt": "y"}')
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf[{"prompt": "x"},\r\n {"prompt": "y"}]\r\n')
    assert [(p.id, p.messages[0].content) for p in load_prompts(tmp_path / "a.jsonl")] == [("a:1", "x"), ("a:4", "y")]
    assert [(p.id, p.messages[0].content) for p in load_prompts(str(tmp_path / "a.json"))] == [
        ("a:1", "x"),
        ("a:2", "y"),
    ]


def test_ids_are_text_and_duplicates_are_refused(tmp_path):
    rows = [{"question_id": 81, "turns": ["x"]}, {"id": "b", "prompt": "y"}, "z"]
    assert [p.id for p in load_prompts(write(tmp_path / "a.jsonl", *rows))] == ["81", "b", "a:3"]
    rows.append({"question_id": "81", "prompt": "again"})
    with pytest.raises(DriftlabError, match=r"a\.jsonl:4: the id '81' was already used at .*a\.jsonl:1"):
        load_prompts(write(tmp_path / "a.jsonl", *rows))


def test_prompts_pass_through_and_limit_takes_the_first():
    prompts = load_prompts("default")
    assert load_prompts(prompts) == prompts
    assert load_prompts(iter(prompts), limit=3) == prompts[:3]
    assert load_prompts("default", limit=500) == prompts
    with pytest.raises(DriftlabError, match="already used at prompts:1"):
        load_prompts([prompts[0], prompts[0]])


def test_limit_stops_before_a_broken_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('"x"\n"y"\n{', encoding="utf-8")
    assert len(load_prompts(tmp_path / "a.jsonl", limit=2)) == 2


@pytest.mark.parametrize("messages", [(), (Message("assistant", "x"),)])
def test_a_prompt_ends_with_a_user_message(messages):
    with pytest.raises(DriftlabError, match="must end with a user message"):
        Prompt("x", messages)


def test_evenly_goes_round_the_categories():
    prompts = [dataclasses.replace(user("x", name), category=name[0]) for name in ("b1", "b2", "b3", "a1", "c1", "c2")]
    assert [p.id for p in evenly(prompts, 5)] == ["b1", "a1", "c1", "b2", "c2"]
    assert evenly(prompts, 2) == evenly(prompts, 5)[:2]
    assert sorted(p.id for p in evenly(prompts, 99)) == sorted(p.id for p in prompts)
    assert set(Counter(p.category for p in evenly(load_prompts("default"), 16)).values()) == {2}
    with pytest.raises(DriftlabError, match="n is 0"):
        evenly(prompts, 0)


def test_fingerprint_depends_on_ids_and_messages_in_order():
    a, b = user("x", "a"), user("y", "b")
    assert len(fingerprint([a])) == 64
    assert fingerprint([a]) == fingerprint([dataclasses.replace(a, category="c")])
    others = ([user("x", "b")], [user("z", "a")], [a, b], [b, a], [Prompt("a", (Message("system", "x"), *a.messages))])
    assert len({fingerprint(p) for p in ([a], *others)}) == 6


@SETTINGS
@given(st.lists(st.text().filter(str.strip), min_size=1, max_size=5), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_any_text_makes_the_round_trip(tmp_path, texts, ascii_only, newline):
    path = tmp_path / "a.jsonl"
    lines = (json.dumps({"turns": [text, text]}, ensure_ascii=ascii_only) + newline for text in texts)
    path.write_bytes("".join(lines).encode("utf-8"))
    assert [p.messages[0].content for p in load_prompts(path)] == texts
    (tmp_path / "a.json").write_text(json.dumps(texts, ensure_ascii=ascii_only), encoding="utf-8")
    assert [p.messages[0].content for p in load_prompts(tmp_path / "a.json")] == texts


COLUMNS = ["turns", "messages", "conversations", "prompt", "role", "content", "from", "value", "type", "text", "tools"]


def _json_values():
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("user")
    names = st.sampled_from(COLUMNS)
    return st.recursive(
        leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=4), max_leaves=12
    )


@SETTINGS
@given(st.binary(max_size=80) | st.lists(_json_values(), max_size=3).map(lambda v: json.dumps(v).encode()), st.data())
def test_a_garbled_file_raises_nothing_else(tmp_path, raw, data):
    cut = data.draw(st.integers(0, len(raw)))
    noise = data.draw(st.sampled_from([b"", b"\n", b"\xff", b'"', b"{", b"\\ud800", b"\0"]))
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(raw[:cut] + noise + raw[cut:])
        _loads_or_refuses(tmp_path / name)


@SETTINGS
@given(st.lists(_json_values(), max_size=3))
def test_rows_of_any_shape_raise_nothing_else(rows):
    _loads_or_refuses(rows)


def _loads_or_refuses(source):
    with warnings.catch_warnings(), contextlib.suppress(DriftlabError):
        warnings.filterwarnings("ignore", "skipped prompts")
        assert load_prompts(source)


# --- encoding (K1, K5, M5)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("template_bos", [True, False])
def test_one_bos_on_the_messages_path(adds, template_bos):
    ids = encode(user("hi"), Fake(adds, template_bos))
    assert ids.count(1) == (1 if adds or template_bos else 0)
    assert ids == ([1] if adds or template_bos else []) + [10 + ord(c) for c in "[user]hi[assistant]"]


@pytest.mark.parametrize("text", ["^[user]hi[assistant]", "[user]hi[assistant]"])
def test_one_bos_on_the_rendered_text_path(text):
    assert encode(user(text), Fake(), template=False) == encode(user("hi"), Fake())
    assert encode(user(text), Fake(adds=False), template=False).count(1) == text.count("^")


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_a_double_bos_that_the_user_wrote_is_kept_with_a_warning(template, adds):
    class Bare(Fake):
        def apply_chat_template(self, messages, add_generation_prompt, tokenize):
            return messages[-1]["content"]

    with pytest.warns(UserWarning, match="more than one BOS"):
        ids = encode(user("^^hi"), Bare(adds), template=template)
    assert ids[:3] == [1, 1, 10 + ord("h")]


@pytest.mark.parametrize("chat", [TEMPLATE, WITH_BOS], ids=["plain", "bos"])
def test_one_bos_with_a_real_tokenizer(fast, chat):
    tokenizer = fast(chat)
    prompt = Prompt("p", EXPECTED)
    ids = encode(prompt, tokenizer)
    text = "<|system|>Be brief.\n<|user|>Name a tree.\n<|assistant|>An oak.\n<|user|>And another?\n<|assistant|>"
    assert tokenizer.decode(ids) == "<s>" + text
    assert ids == encode(user("<s>" + text), tokenizer, template=False) == encode(user(text), tokenizer, template=False)
    with pytest.warns(UserWarning, match="more than one BOS"):
        assert encode(user("<s><s>x"), tokenizer, template=False).count(tokenizer.bos_token_id) == 2


def test_a_tokenizer_without_bos_is_left_alone(fast):
    class NoBos(Fake):
        bos_token_id = None

    assert encode(user("hi"), NoBos(adds=False, template_bos=False))[0] == 10 + ord("[")


def test_the_whole_dialogue_is_rendered_once():
    """K5: rendered message by message, a dialogue can come out differently. M5: each turn once."""
    tokenizer = Fake()
    ids = encode(Prompt("p", EXPECTED), tokenizer)
    assert tokenizer.calls == [[m._asdict() for m in EXPECTED]]
    assert len(ids) == 1 + sum(len(f"[{m.role}]{m.content}") for m in EXPECTED) + len("[assistant]")


def test_system_replaces_system_and_developer_messages():
    tokenizer = Fake()
    encode(Prompt("p", (Message("developer", "D"), *EXPECTED)), tokenizer, system="New.")
    encode(user("hi"), tokenizer, system="")
    assert [[m["role"] for m in call] for call in tokenizer.calls] == [
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert [call[0]["content"] for call in tokenizer.calls] == ["New.", ""]
    raw = encode(user("hi"), Fake(adds=False), template=False, system="Sys.")
    assert raw == [10 + ord(c) for c in "Sys.\n\nhi"]


def test_raw_text_joins_the_messages_by_blank_lines():
    ids = encode(Prompt("p", EXPECTED), Fake(), template=False)
    assert ids == [1] + [10 + ord(c) for c in "Be brief.\n\nName a tree.\n\nAn oak.\n\nAnd another?"]


@pytest.mark.parametrize("missing", [None, ""])
def test_a_missing_template_is_explained(missing):
    with pytest.raises(DriftlabError, match="pass template=False"):
        encode(user("hi"), Fake(chat_template=missing))
    assert encode(user("hi"), Fake(chat_template=missing), template=False)


def test_no_token_to_condition_on_is_refused():
    with pytest.raises(DriftlabError, match="'empty' gives no token"):
        encode(user("", "empty"), Fake(adds=False), template=False)


def test_a_template_that_refuses_the_dialogue_is_named(fast):
    tokenizer = fast("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}")
    with pytest.raises(DriftlabError, match=r"'p': the chat template refuses this dialogue \(no system role\)"):
        encode(Prompt("p", EXPECTED), tokenizer)


def test_a_template_that_drops_a_developer_message_is_noticed(fast):
    tokenizer = fast("{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% endif %}{% endfor %}")
    with pytest.warns(UserWarning, match="leaves a developer message out"):
        encode(Prompt("p", (Message("developer", "Be kind."), Message("user", " hi "))), tokenizer)
