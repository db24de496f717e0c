"""Prompt files in the usual spellings, and the token ids a target sees before it answers.

One row is one prompt. The first of these columns that a row fills is read, every other column is ignored:

- ``messages``: ``[{"role", "content"}]`` (OpenAI), content being text or a list of text parts (joined by newlines);
- ``conversations``: ``[{"from", "value"}]`` (ShareGPT) or role / content;
- ``turns``: ``["first user turn", ...]`` (MT-Bench, Spec-Bench, SPEED-Bench);
- ``prompt``: text. A row may also be a plain string.

The same dialogue gives the same messages in each. A dialogue is cut back to its last user message. User messages that
come without any answer (``turns``; SPEED-Bench's ``messages``) are turns of their own, of which only the first is used:
a later one needs the target's answers. ``question_id`` or ``id`` names a row, ``category`` groups it.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from driftlab.errors import DriftlabError

ROLES = {"human": "user", "gpt": "assistant"} | {r: r for r in ("user", "assistant", "system", "developer", "tool")}
SYSTEM_ROLES = ("system", "developer")
ACCEPTED = (
    'a row is {"turns": ["..."]}, {"messages": [{"role": "user", "content": "..."}]}, '
    '{"conversations": [{"from": "human", "value": "..."}]}, {"prompt": "..."} or a plain string'
)
# SPEED-Bench's published files carry this in place of text that its own script fetches.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
SHIPPED = Path(__file__).with_name("data") / "prompts.jsonl"


class Message(NamedTuple):
    """One message: a role (system, developer, user, assistant, tool) and its text."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """A dialogue that ends with the user message to be answered."""

    id: str
    messages: tuple[Message, ...]
    category: str | None = None

    def __post_init__(self) -> None:
        if not self.messages or self.messages[-1].role != "user":
            raise DriftlabError(f"prompt {self.id!r} must end with a user message, the one to be answered")


class _Row(NamedTuple):
    where: str  # for error messages
    name: str  # the id of a row that has none
    value: Any


def load_prompts(source: Any, limit: int | None = None, turns: str = "first") -> list[Prompt]:
    """Read prompts; see the module's text for the accepted rows.

    ``source`` is a .jsonl file, a .json file that holds one list, an iterable of rows (strings, dicts, Prompts), or
    ``"default"``, the 80 prompts shipped with the package. ``limit`` keeps the first n. ``turns`` has one option.

    Returns a non-empty list with unique ids; a row without an id is called ``file-stem:line``.
    Raises :class:`DriftlabError` for a broken file or row (named by file and line), an unknown role, content that is
    not text, two rows with one id, or when no row is usable. Rows without a user message are skipped with a warning.
    """
    if turns != "first":
        raise DriftlabError(f'turns is {turns!r}, but only "first" exists: a later turn needs the target\'s answers')
    if limit is not None and limit < 1:
        raise DriftlabError(f"limit is {limit}, but at least 1 prompt is needed")
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    skipped: dict[str, list[str]] = {}
    for row in _rows(source):
        prompt = _prompt(row)
        if isinstance(prompt, str):
            skipped.setdefault(prompt, []).append(row.where)
            continue
        if prompt.id in seen:
            raise DriftlabError(f"{row.where}: the id {prompt.id!r} was already used at {seen[prompt.id]}; rename one")
        seen[prompt.id] = row.where
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    _report(source, skipped, empty=not prompts)
    return prompts


def evenly(prompts: Iterable[Prompt], n: int) -> list[Prompt]:
    """Return ``n`` prompts spread over the categories: the first of each, then the next; all if there are fewer.

    Categories come in order of appearance, so that a smaller choice is the beginning of a larger one.
    Raises :class:`DriftlabError` if ``n`` is below 1.
    """
    if n < 1:
        raise DriftlabError(f"n is {n}, but at least 1 prompt is needed")
    groups: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [prompt for round_ in zip_longest(*groups.values()) for prompt in round_ if prompt is not None][:n]


def encode(prompt: Prompt, tokenizer: Any, *, template: bool = True, system: str | None = None) -> list[int]:
    """Return the token ids of ``prompt`` up to where the answer starts.

    With ``template`` the whole dialogue is rendered by the tokenizer's chat template, generation prompt included.
    Without, the messages' texts are joined by blank lines and get the tokenizer's own special tokens. Either way there
    is one BOS where the tokenizer wants one, also when the text already starts with it (vllm#27515); more than one in
    the text itself is kept with a warning. ``system`` replaces all system and developer messages.

    Raises :class:`DriftlabError` if there is no chat template, if the template refuses the dialogue, or if no token
    comes out. Warns if the template leaves a system, developer or user message out.
    """
    messages = prompt.messages
    if system is not None:
        messages = (Message("system", system), *(m for m in messages if m.role not in SYSTEM_ROLES))
    if template:
        ids = tokenize(render(prompt.id, messages, tokenizer), tokenizer, special=False)
    else:
        ids = tokenize(plain_text(messages), tokenizer, special=True)
    if not ids:
        raise DriftlabError(f"prompt {prompt.id!r} gives no token, so there is nothing to answer; give it some text")
    if _leading(ids, tokenizer.bos_token_id) > 1:
        warnings.warn(f"prompt {prompt.id!r} starts with more than one BOS token; kept as written", stacklevel=2)
    return ids


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 (hex) of the prompts' ids and messages, in order. The category is not part of it."""
    content = [[prompt.id, [[m.role, m.content] for m in prompt.messages]] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode("ascii")).hexdigest()


def _rows(source: Any) -> Iterator[_Row]:
    if isinstance(source, (str, os.PathLike)):
        path = SHIPPED if source == "default" else Path(source)
        readers = {".jsonl": _jsonl_rows, ".json": _json_rows}
        if path.suffix.lower() not in readers:
            raise DriftlabError(f"{str(source)!r} is no .jsonl or .json file; the text of a prompt goes into a list")
        try:
            yield from readers[path.suffix.lower()](path)
        except DriftlabError:
            raise
        except (OSError, ValueError) as error:  # a path that no file can have is a ValueError
            raise DriftlabError(f"cannot read {str(path)!r}: {error}") from error
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        for number, value in enumerate(source, start=1):
            yield _Row(f"prompts:{number}", f"prompts:{number}", value)
    else:
        raise DriftlabError(f"prompts come from a path or a list, not from a {type(source).__name__}; {ACCEPTED}")


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    with open(path, "rb") as lines:  # bytes: str.splitlines would also split at U+2028 inside a prompt
        for number, line in enumerate(lines, start=1):
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                yield _Row(f"{path}:{number}", f"{path.stem}:{number}", _parse(line.rstrip(), path, number))


def _json_rows(path: Path) -> Iterator[_Row]:
    rows = _parse(path.read_bytes(), path, 1)
    if not isinstance(rows, list):
        raise DriftlabError(f"{path}: expected a list of rows, not a {type(rows).__name__}; {ACCEPTED}")
    for number, value in enumerate(rows, start=1):
        yield _Row(f"{path}: item {number}", f"{path.stem}:{number}", value)


def _parse(raw: bytes, path: Path, line: int) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        problem = f"{error.msg} at column {error.colno}; a .jsonl file has one JSON value a line, a .json file one list"
    except UnicodeDecodeError as error:
        line += raw[: error.start].count(b"\n")
        problem = f"it is not UTF-8, {error.reason}"
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; ten thousand brackets
        problem = str(error)
    raise DriftlabError(f"{path}:{line}: not valid JSON ({problem}); {ACCEPTED}")


def _prompt(row: _Row) -> Prompt | str:
    """The row's prompt, or why it has none."""
    value, where = row.value, row.where
    if isinstance(value, Prompt):
        return value
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        raise DriftlabError(f"{where}: a {type(value).__name__} is no row; {ACCEPTED}")
    if fields.get("tools") not in (None, "", "[]", [], ()):
        raise DriftlabError(f"{where}: tools are not rendered here; take the column out to go on without them")
    messages = _messages(fields, where)
    if not messages:
        return "no user message"
    if not messages[-1].content.strip():
        return "empty user message"
    if any(PLACEHOLDER in message.content for message in messages):
        raise DriftlabError(f"{where}: SPEED-Bench placeholder in place of text; run its prepare script first")
    name = _label(fields, "question_id", where) or _label(fields, "id", where) or row.name
    return Prompt(name, messages, _label(fields, "category", where))


def _messages(fields: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    column = next((c for c in ("messages", "conversations", "turns", "prompt") if fields.get(c) is not None), None)
    if column is None:
        found = ", ".join(map(repr, fields)) or "none"
        raise DriftlabError(f"{where}: no column with a prompt (columns: {found}); {ACCEPTED}")
    value = fields[column]
    if column == "prompt":
        return (Message("user", _text(value, f"{where}: prompt")),)
    if not isinstance(value, (list, tuple)):
        raise DriftlabError(f"{where}: {column} must be a list, not a {type(value).__name__}; {ACCEPTED}")
    if column == "turns":
        return tuple(Message("user", _text(turn, f"{where}: turns")) for turn in value[:1])
    return _dialogue(value, f"{where}: {column}")


def _dialogue(items: Sequence[Any], where: str) -> tuple[Message, ...]:
    """The messages up to the one to be answered; empty if there is no user message."""
    roles = [_role(item, where) for item in items]
    users = [i for i, role in enumerate(roles) if role == "user"]
    if not users:
        return ()
    end = users[-1] if "assistant" in roles else users[0]
    return tuple(_message(item, role, where) for item, role in zip(items[: end + 1], roles, strict=False))


def _role(item: Any, where: str) -> str:
    if not isinstance(item, Mapping):
        raise DriftlabError(f"{where}: a message is a dict, not a {type(item).__name__}; {ACCEPTED}")
    role = item.get("role") or item.get("from")
    if not isinstance(role, str) or role not in ROLES:
        raise DriftlabError(f"{where}: unknown role {role!r}; known are {', '.join(ROLES)}")
    return ROLES[role]


def _message(item: Mapping[str, Any], role: str, where: str) -> Message:
    if item.get("tool_calls"):
        raise DriftlabError(f"{where}: tool_calls in a message cannot be rendered here; write them as text")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    parts = content if isinstance(content, (list, tuple)) else [content]
    return Message(role, "\n".join(_part(part, f"{where}: {role} message") for part in parts))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        return _text(part, where)
    if part.get("type") != "text":
        raise DriftlabError(f"{where}: a part of type {part.get('type')!r} is not text; only text can be used")
    return _text(part.get("text"), where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DriftlabError(f"{where}: expected text, found a {type(value).__name__}; {ACCEPTED}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DriftlabError(f"{where}: half of a surrogate pair is no text ({error.reason})") from error
    return value


def _label(fields: Mapping[str, Any], column: str, where: str) -> str | None:
    value = fields.get(column)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value, f"{where}: {column}")


def _report(source: Any, skipped: dict[str, list[str]], empty: bool) -> None:
    counts = "; ".join(f"{len(places)} with {reason}, first {places[0]}" for reason, places in skipped.items())
    if empty:
        name = str(source) if isinstance(source, (str, os.PathLike)) else "the list"
        raise DriftlabError(f"{name} has no usable prompt: {counts or 'it has no rows'}; {ACCEPTED}")
    if skipped:
        warnings.warn(f"skipped prompts: {counts}", stacklevel=3)


def render(name: str, messages: Sequence[Message], tokenizer: Any, **options: Any) -> str:
    """Return the dialogue as the chat template writes it, up to where the answer starts.

    The whole dialogue at once: rendered one message at a time it can differ (slime#2263). ``options`` go to the template:
    ``chat_template=`` in place of the tokenizer's own, and its switches. Raises and warns as :func:`encode`.
    """
    if not tokenizer.chat_template and not options.get("chat_template"):
        raise DriftlabError("this tokenizer has no chat template; pass template=False to use the raw text")
    dialogue = [message._asdict() for message in messages]
    try:
        text = tokenizer.apply_chat_template(dialogue, **{"add_generation_prompt": True, **options}, tokenize=False)
    except Exception as error:  # a template raises whatever it likes: "System role not supported", roles must alternate
        raise DriftlabError(f"prompt {name!r}: the chat template refuses this dialogue ({error})") from error
    for message in messages:
        # templates take the thoughts out of earlier answers, which is what they are for
        if message.content.rpartition("</think>")[2].strip() not in text:
            warnings.warn(f"prompt {name!r}: the chat template leaves a {message.role} message out", stacklevel=3)
    return text


def plain_text(messages: Iterable[Message]) -> str:
    """Return the messages' texts without a template, joined by blank lines."""
    return "\n\n".join(m.content for m in messages if m.content)


def tokenize(text: str, tokenizer: Any, special: bool) -> list[int]:
    """Return ids with exactly one BOS if the tokenizer adds one, whether or not ``text`` already starts with it.

    ``special``: with the tokenizer's other special tokens too.
    """
    bos = tokenizer.bos_token_id
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    full = list(tokenizer(text)["input_ids"])
    adds, has = _leading(full, bos) > _leading(plain, bos), _leading(plain, bos) > 0
    if special:
        return full[1:] if adds and has else full
    return [bos, *plain] if adds and not has else plain


def _leading(ids: list[int], bos: int | None) -> int:
    return next((i for i, token in enumerate(ids) if token != bos), len(ids))
