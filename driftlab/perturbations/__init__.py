"""Perturbations of the input: each changes one thing, has a readable key, and is shown as a token diff.

A key is one part, or several joined by ``+`` (two things are changed, then). It stands in the ``template`` column of rows and
in the settings of recordings. :data:`PARTS` lists them; ``chat`` is no change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from driftlab.errors import DriftlabError
from driftlab.perturbations import changes
from driftlab.perturbations.changes import Input, encode_input
from driftlab.perturbations.diff import moved, spans, token_diff
from driftlab.perturbations.texts import FORMATS, LANGUAGES, ROLE_NAMES, SYSTEMS
from driftlab.prompts import Prompt

__all__ = [
    "BOS_GRID",
    "PARTS",
    "STANDARD",
    "Part",
    "Perturbation",
    "Perturbed",
    "applicable",
    "moved",
    "spans",
    "token_diff",
]

_FILE, _COUNT = "@FILE", "N"
#: part: its values (``N``: a number; ``@FILE``: a file with text), in the order in which parts are applied
PARTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "system": ("default", *SYSTEMS, _FILE),
    "language": tuple(LANGUAGES),
    "whitespace": ("trailing", "leading", "double", "end"),
    "turns": (_COUNT,),
    "format": tuple(FORMATS),
    "roles": tuple(ROLE_NAMES),
    "thinking": ("on", "off"),
    "bos": ("on", "off"),
    "before": (_COUNT, _COUNT + _FILE),
    "dialogue": (_COUNT, _COUNT + _FILE),
}
#: chat template on / off x BOS on / off
BOS_GRID = ("bos=on", "bos=off", "none+bos=on", "none+bos=off")
#: one of each kind; what a target has no use for is left out by :func:`applicable`
STANDARD = (
    *("chat", "none", "bos=on", "bos=off", "none+bos=on", "none+bos=off"),
    *(f"system={name}" for name in ("default", *SYSTEMS)),
    *(f"format={name}" for name in FORMATS),
    *(f"whitespace={name}" for name in PARTS["whitespace"]),
    *(f"roles={name}" for name in ROLE_NAMES),
    *("turns=2", "turns=6", "language=de", "language=zh", "thinking=on", "thinking=off"),
)
#: parts that say how it is to be, not what is to change: it may be so already
_STATES = ("bos=on", "bos=off", "thinking=on", "thinking=off", "system=default")


class Part(NamedTuple):
    """One change: ``name=value``; ``text``: what a file gave."""

    name: str
    value: str = ""
    text: str = ""

    @property
    def key(self) -> str:
        """As it is written."""
        return f"{self.name}={self.value}" if self.value else self.name


@dataclass(frozen=True)
class Perturbed:
    """A prompt's token ids under a perturbation, and ``plain``: without. (The answer starts at ``prompt_length``.)"""

    id: str
    ids: tuple[int, ...]
    plain: tuple[int, ...]

    @property
    def prompt_length(self) -> int:
        """Tokens."""
        return len(self.ids)

    def diff(self, tokenizer: Any) -> list[str]:
        """What changed: :func:`token_diff`."""
        return token_diff(self.plain, self.ids, tokenizer)

    def sinks(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Where the tokens that are sinks in the plain prompt are now; () if they are gone.

        (Which token *is* the sink is searched for in every recording: this says whether the old one is still there.)
        """
        return moved(positions, self.plain, self.ids)


@dataclass(frozen=True)
class Perturbation:
    """Changes of the input, at most one of a name."""

    parts: tuple[Part, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Perturbation:
        """Read a key, such as ``none``, ``system=long`` or ``none+bos=off``; files are read here.

        Raises:
            DriftlabError: an unknown part or value (with a listing), a part that occurs twice, a file that cannot be read (or
                whose path holds a "+").
        """
        words = [word.strip() for word in text.split("+")]
        parts = [_part(word) for word in words if word != "chat"]
        names = [part.name for part in parts]
        if len(set(names)) < len(names) or (len(words) > 1 and {"chat", "none"} <= set(words)):
            raise DriftlabError(f"perturbation {text!r} says one thing twice")
        return cls(tuple(sorted(parts, key=lambda part: list(PARTS).index(part.name))))

    @property
    def key(self) -> str:
        """Name in rows and recordings: ``chat`` or the parts, a file by its name and the digest of its text."""
        return "+".join(part.key for part in self.parts) or "chat"

    @property
    def changes_bos_or_switch_only(self) -> bool:
        """Whether it says how things are to be, and they may be so already."""
        return all(part.key in _STATES for part in self.parts)

    def encode(self, prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt. Raises as :meth:`apply`."""
        return [list(found.ids) for found in self.apply(prompts, tokenizer)]

    def apply(self, prompts: Sequence[Prompt], tokenizer: Any) -> list[Perturbed]:
        """Perturb prompts. ``before`` and ``dialogue`` without a file take the other prompts' messages, from the next one on.

        Raises:
            DriftlabError: if this cannot be done to these prompts (no template, no such switch, too little text), or if it
                would change none of them.
        """
        found = []
        for i, prompt in enumerate(prompts):
            given = Input(prompt.id, prompt.messages)
            if not tokenizer.chat_template:
                given = changes.no_template(given)
            plain = tuple(encode_input(given, tokenizer))
            given = Input(prompt.id, prompt.messages)
            for part in self.parts:
                given = _applied(part, given, [*prompts[i + 1 :], *prompts[:i]], tokenizer)
            found.append(Perturbed(prompt.id, tuple(encode_input(given, tokenizer)), plain))
        stays = self.changes_bos_or_switch_only or (self.key == "none" and not tokenizer.chat_template)
        if not stays and all(one.ids == one.plain for one in found):
            raise DriftlabError(f"{self.key} changes no token of these prompts with this tokenizer: leave it out")
        return found


def applicable(
    keys: Iterable[str], prompts: Sequence[Prompt], tokenizer: Any
) -> tuple[list[Perturbation], dict[str, str]]:
    """Return the perturbations that change these prompts, and why the others are left out, by key.

    Left out too is what gives the same tokens as an earlier one (``bos=on`` where there is a BOS anyway).
    """
    kept: list[Perturbation] = []
    refused: dict[str, str] = {}
    seen: dict[tuple[tuple[int, ...], ...], str] = {}
    for key in keys:
        perturbation = Perturbation.parse(key)
        try:
            ids = tuple(tuple(found.ids) for found in perturbation.apply(prompts, tokenizer))
        except DriftlabError as error:
            refused[key] = str(error)
            continue
        if ids in seen:
            refused[key] = f"gives the same tokens as {seen[ids]}"
            continue
        seen[ids] = perturbation.key
        kept.append(perturbation)
    return kept, refused


def _part(word: str) -> Part:
    name, given, value = word.partition("=")
    count, at, path = value.partition("@")
    allowed = PARTS.get(name)
    if allowed is not None and not at and value in allowed and value not in (_COUNT, _FILE):
        return Part(name, value)
    if allowed == () and not given:
        return Part(name)
    number = count.isascii() and count.isdigit() and int(count) > 0
    pattern = ("" if not count else _COUNT if number else "?") + (_FILE if at else "")
    if allowed is None:
        raise DriftlabError(f"unknown perturbation {word!r}; known are {_listing()}; several are joined by +")
    if not value or pattern not in allowed or (at and not path):
        told = "its value is missing" if allowed else "it takes no value"
        told = f"{value!r} is no value of it" if value and allowed else told
        wanted = _form(name, allowed) + (" (N a number from 1 on)" if any(_COUNT in one for one in allowed) else "")
        raise DriftlabError(f"perturbation {word!r}: {told}; write {wanted}")
    count = str(int(count)) if count else ""
    if not at:
        return Part(name, count)
    text = _read(path)
    return Part(name, f"{count}@{Path(path).name}:{hashlib.sha256(text.encode()).hexdigest()[:8]}", text)


def _listing() -> str:
    return ", ".join(["chat", *(_form(name, values) for name, values in PARTS.items())])


def _form(name: str, values: Sequence[str]) -> str:
    return f"{name}={'|'.join(values)}" if values else name


def _read(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise DriftlabError(f"cannot read the text of a perturbation from {path!r}: {error}") from error
    if not text:
        raise DriftlabError(f"{path!r}, the text of a perturbation, is empty")
    return text


def _applied(part: Part, given: Input, others: Sequence[Prompt], tokenizer: Any) -> Input:
    name, value = part.name, part.value
    if name in ("before", "dialogue"):
        text = part.text or "\n\n".join(m.content for prompt in others for m in prompt.messages if m.role == "user")
        make = changes.with_text_before if name == "before" else changes.with_conversation
        return changes.filled(given, make, text, int(value.partition("@")[0]), part.key, tokenizer)
    simple = {
        "none": lambda: changes.no_template(given),
        "system": lambda: changes.with_system(given, value, part.text),
        "language": lambda: changes.with_language(given, value),
        "whitespace": lambda: changes.with_whitespace(given, value),
        "turns": lambda: changes.with_turns(given, int(value)),
        "format": lambda: changes.with_format(given, value, tokenizer),
        "roles": lambda: changes.with_roles(given, value),
        "thinking": lambda: changes.with_thinking(given, value, tokenizer),
        "bos": lambda: changes.with_bos(given, value),
    }
    return simple[name]()
