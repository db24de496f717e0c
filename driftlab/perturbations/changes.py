r"""The single changes, and the way of a dialogue to token ids once they are made.

A change maps an :class:`Input` to an :class:`Input`. Those that fill a prompt up to N tokens measure the whole prompt and so
come last. BOS means a leading token that *is* a BOS: where a template's first role marker is the same token (SmolLM2's
``<|im_start|>``), the marker stays and counts as none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from driftlab.errors import DriftlabError
from driftlab.perturbations.texts import EXCHANGES, FORMATS, LANGUAGES, MESSAGE_WORDS, REPLY, ROLE_NAMES, SYSTEMS
from driftlab.prompts import SYSTEM_ROLES, Message, plain_text, render, tokenize

_PIECE = re.compile(r"\S{1,24}\s*")  # a word, or a part of what is written without spaces


@dataclass(frozen=True)
class Input:
    """A prompt before it is tokens: its messages, and how they are to be written."""

    name: str
    messages: tuple[Message, ...]
    template: bool = True
    chat_template: str | None = None
    switches: tuple[tuple[str, bool], ...] = ()
    roles: str = ""
    bare_end: bool = False
    bos: bool | None = None

    @property
    def question(self) -> str:
        """The message to be answered."""
        return self.messages[-1].content

    def asking(self, question: str) -> Input:
        """The same with another question."""
        return dataclasses.replace(self, messages=(*self.messages[:-1], Message("user", question)))

    def after(self, earlier: Sequence[Message]) -> Input:
        """The same with more messages before the question."""
        return dataclasses.replace(self, messages=(*self.messages[:-1], *earlier, self.messages[-1]))


def encode_input(given: Input, tokenizer: Any) -> list[int]:
    """Return the token ids of an input.

    Raises:
        DriftlabError: as :func:`driftlab.prompts.encode`, or where a change cannot be made.
    """
    if given.template:
        ids = tokenize(_written(given, tokenizer), tokenizer, special=False)
    else:
        text = plain_text(given.messages)
        ids = tokenize(text.rstrip() if given.bare_end else text, tokenizer, special=True)
    wanted = given.bos
    if wanted is None and given.chat_template is not None and tokenizer.chat_template:
        own = tokenize(render(given.name, given.messages, tokenizer), tokenizer, special=False)
        wanted = has_bos(own, tokenizer, given.template)
    if wanted is not None:
        ids = _with_bos(ids, tokenizer, given, wanted)
    if not ids:
        raise DriftlabError(f"prompt {given.name!r} gives no token, so there is nothing to answer")
    return ids


def has_bos(ids: Sequence[int], tokenizer: Any, template: bool) -> bool:
    """Whether ids begin with a BOS that is not just the template's first role marker."""
    bos = tokenizer.bos_token_id
    if bos is None or not ids or ids[0] != bos:
        return False
    if not template or not tokenizer.chat_template:
        return True
    markers = 1 if _bos_marks_roles(tokenizer) else 0
    return next((i for i, token in enumerate(ids) if token != bos), len(ids)) > markers


def _with_bos(ids: list[int], tokenizer: Any, given: Input, wanted: bool) -> list[int]:
    own_format, bos = given.template and given.chat_template is None, tokenizer.bos_token_id
    if bos is None:
        if wanted:
            raise DriftlabError("bos=on: this tokenizer has no BOS token")
        return ids
    markers = int(own_format and bool(tokenizer.chat_template) and _bos_marks_roles(tokenizer) and ids[:1] == [bos])
    text = ids[next((i for i, token in enumerate(ids) if token != bos), len(ids)) :]
    return [bos] * (wanted + markers) + text


def _bos_marks_roles(tokenizer: Any) -> bool:
    """Whether the template writes its BOS token again after what it begins with."""
    text = render("probe", (Message("user", "a"), Message("assistant", "b"), Message("user", "c")), tokenizer)
    ids, bos = tokenize(text, tokenizer, special=False), tokenizer.bos_token_id
    return bos in ids[next((i for i, token in enumerate(ids) if token != bos), len(ids)) :]


def _written(given: Input, tokenizer: Any) -> str:
    options: dict[str, Any] = dict(given.switches)
    if given.chat_template is not None:
        options["chat_template"] = given.chat_template
    write = _renamed if given.roles else _rendered
    text = write(given, tokenizer, options)
    return text.rstrip() if given.bare_end else text


def _rendered(given: Input, tokenizer: Any, options: Mapping[str, Any]) -> str:
    return render(given.name, given.messages, tokenizer, **options)


def _renamed(given: Input, tokenizer: Any, options: Mapping[str, Any]) -> str:
    """Other role names: the template is given them, and what it writes last, where the answer starts, is changed too."""
    names = ROLE_NAMES[given.roles]
    messages = [Message(names.get(m.role, m.role), m.content) for m in given.messages]
    text = render(given.name, messages, tokenizer, **options)
    dialogue = render(given.name, messages, tokenizer, **{**options, "add_generation_prompt": False})
    suffix = text.removeprefix(dialogue)
    kept = all(message.content.strip() in dialogue for message in messages)
    # asked with a content in which the name does not stand: a template may take an unknown role for another
    bare = render(given.name, [Message(names["user"], "0")], tokenizer, **{**options, "add_generation_prompt": False})
    if not (kept and names["user"] in bare and suffix != text and "assistant" in suffix):
        raise DriftlabError(
            f"roles={given.roles}: this chat template does not write the names of the roles it is given"
        )
    return dialogue + suffix.replace("assistant", names["assistant"])


# ---------------------------------------------------------------------------------------------- the changes


def no_template(given: Input) -> Input:
    """Join the raw texts."""
    return dataclasses.replace(given, template=False)


def with_bos(given: Input, value: str) -> Input:
    """One BOS in front, or none."""
    return dataclasses.replace(given, bos=value == "on")


def with_system(given: Input, value: str, text: str) -> Input:
    """Another system message in place of all; ``default``: none, so that the template writes its own if it has one."""
    rest = tuple(m for m in given.messages if m.role not in SYSTEM_ROLES)
    if value == "default":
        return dataclasses.replace(given, messages=rest)
    return dataclasses.replace(given, messages=(Message("system", text or SYSTEMS[value]), *rest))


def with_format(given: Input, value: str, tokenizer: Any) -> Input:
    """Another model's template."""
    if not given.template:
        raise DriftlabError(f"format={value}: a template's format needs a template")
    marker, template = FORMATS[value]
    if tokenizer.chat_template and marker in str(tokenizer.chat_template):
        raise DriftlabError(
            f"format={value}: this target's own template is of that format, so it would not be another's"
        )
    return dataclasses.replace(given, chat_template=template)


def with_whitespace(given: Input, value: str) -> Input:
    """White space around or inside the question; ``end``: none after what the template writes last."""
    if value == "end":
        return dataclasses.replace(given, bare_end=True)
    changed = {
        "trailing": given.question + " ",
        "leading": "\n" + given.question,
        "double": given.question.replace(" ", "  "),
    }
    return given.asking(changed[value])


def with_roles(given: Input, value: str) -> Input:
    """Other names of user and assistant."""
    if not given.template:
        raise DriftlabError(f"roles={value}: there are no roles without a template")
    return dataclasses.replace(given, roles=value)


def with_turns(given: Input, count: int) -> Input:
    """Earlier exchanges before the question."""
    pairs = [EXCHANGES[i % len(EXCHANGES)] for i in range(count)]
    return given.after([m for q, a in pairs for m in (Message("user", q), Message("assistant", a))])


def with_language(given: Input, value: str) -> Input:
    """An instruction in another language before the question, which is not translated."""
    return given.asking(f"{LANGUAGES[value]}\n\n{given.question}")


def with_thinking(given: Input, value: str, tokenizer: Any) -> Input:
    """Set the template's switch ``enable_thinking``."""
    if "enable_thinking" not in str(tokenizer.chat_template or "") or not given.template or given.chat_template:
        raise DriftlabError(f"thinking={value}: the chat template in use has no switch enable_thinking")
    return dataclasses.replace(given, switches=(("enable_thinking", value == "on"),))


def with_text_before(given: Input, text: str) -> Input:
    """Text before the question, in the same message."""
    return given.asking(f"{text}\n\n{given.question}") if text else given


def with_conversation(given: Input, text: str) -> Input:
    """The text as earlier user messages, each with the same reply."""
    words = _PIECE.findall(text)
    parts = ["".join(words[i : i + MESSAGE_WORDS]).strip() for i in range(0, len(words), MESSAGE_WORDS)]
    return given.after([m for part in parts for m in (Message("user", part), Message("assistant", REPLY))])


def filled(given: Input, make: Callable[[Input, str], Input], text: str, limit: int, key: str, tokenizer: Any) -> Input:
    """Return ``make(given, beginning of text)`` with the longest beginning, in words, that leaves ``limit`` tokens in all.

    Raises:
        DriftlabError: if the prompt is longer without it, or not so long with all of it.
    """
    words = _PIECE.findall(text)

    def with_words(count: int) -> Input:
        return make(given, "".join(words[:count]).rstrip())

    def length(count: int) -> int:
        return len(encode_input(with_words(count), tokenizer))

    if (least := length(0)) > limit:
        raise DriftlabError(f"{key}: prompt {given.name!r} has {least} tokens without it: ask for more than {limit}")
    high = min(64, len(words))
    while high < len(words) and length(high) <= limit:  # a book need not be tokenized for a page
        high = min(2 * high, len(words))
    if high == len(words) and (most := length(high)) < limit:
        raise DriftlabError(
            f"{key}: prompt {given.name!r} comes to {most} tokens with all text that there is: give more prompts, or a longer "
            f"text as {key.split('@')[0]}@FILE"
        )
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length(middle) <= limit else (low, middle - 1)
    return with_words(low)
