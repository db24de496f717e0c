"""Which target states a drafter reads: layer ids, and the two ways to count them.

    boundary          id k is the residual stream after k decoder layers, k = 0 (the embedding) .. N
                      (vLLM, speculators)
    output of layer   id j is the output of layer j = 0 .. N - 1, which is boundary j + 1
                      (SGLang, SpecForge, TorchSpec, ModelOpt, TensorRT-LLM)

Both are called eagle_aux_hidden_state_layer_ids. Without ids every project means the same states: boundaries 2, N // 2, N - 3.
Inside driftlab ids are boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from driftlab.errors import DriftlabError

Counting = Literal["boundary", "output"]
Family = Literal["", "kimi", "latent"]

NAMES = {"boundary": "boundaries", "output": "output-of-layer"}


@dataclass(frozen=True, kw_only=True)
class LayerIds:
    """Layer ids of a file, how its project counts them, and how many states ``fc`` takes."""

    ids: tuple[int, ...] | None
    """as the file has them; None: left out"""
    count: int
    """A, states that fc takes"""
    counting: Counting | None
    """None: not certain from where the file comes"""
    why: str
    """why it is counted so; empty if ``counting`` is None"""
    sure: bool = True
    """whether that is known of the file, and not only likely"""
    nested: bool = True
    """whether they stand in eagle_config (where SGLang reads them) or at the top level (where vLLM does)"""
    project: str = ""
    """whose file it is"""
    family: Family = ""
    """kimi: the target is one of those whose ids SGLang counts as outputs only if the first is 1 (DeepSeek, Kimi); latent:
    the drafter has MLA, and its target may be one"""
    given: bool = False
    """the counting is the user's word"""
    exact: tuple[int, ...] | None = None
    """the states themselves, where they are known; () for the final one"""
    exact_why: str = ""

    def __post_init__(self) -> None:
        if self.ids is not None:
            self._check_ids()
        if self.exact is not None and len(self.exact) != self.count:
            raise DriftlabError(f"{self.exact_why}: states {list(self.exact)}, but fc.weight takes {self.count}")

    def _check_ids(self) -> None:
        ids = self.ids or ()
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids) or len(set(ids)) < len(ids):
            raise DriftlabError(f"layer ids {list(ids)} are not distinct whole numbers: pass aux_layers=")
        if ids and min(ids) < 0:
            raise DriftlabError(
                f"layer ids {list(ids)}: a negative id counts from the end in TensorRT-LLM only: pass aux_layers="
            )
        if len(ids) != self.count:
            raise DriftlabError(f"{len(ids)} layer ids {list(ids)}, but fc.weight takes {self.count} states")

    @property
    def needs_depth(self) -> bool:
        """Whether the states cannot be named before the target's depth is known."""
        return self.ids is None and self.exact is None

    @property
    def open_words(self) -> str:
        """What to say while the target's depth is not known."""
        return "no layer ids: 2, N // 2, N - 3 of a target with N layers; pass a target or num_layers="

    def states(self, num_layers: int | None) -> tuple[tuple[int, ...], Any, str]:
        """Return the boundaries, ascending, where they come from ("read" or "assumed"), and why in words.

        Args:
            num_layers: N of the target; None: not known.

        Raises:
            DriftlabError: no ids and no depth, or states that the target does not have.
        """
        if self.exact is not None:
            return self._exact(self.exact, num_layers)
        if self.ids is None:
            return self._default(num_layers)
        ids = tuple(sorted(self.ids))
        counting, source, why = self._counted(ids, num_layers)
        states = ids if counting == "boundary" else tuple(i + 1 for i in ids)
        if num_layers is not None and states[-1] > num_layers:
            raise DriftlabError(
                f"layer ids {list(self.ids)} counted as {NAMES[counting]} name state {states[-1]}, but the target "
                f"has {num_layers} layers: it is the drafter of another target, or pass aux_layers="
            )
        sorted_words = "" if ids == self.ids else ", sorted, as every engine concatenates states in the order of layers"
        return (
            states,
            source,
            f"ids {list(self.ids)} counted as {NAMES[counting]}{sorted_words} ({why}) -> states {list(states)}",
        )

    def _exact(self, states: tuple[int, ...], num_layers: int | None) -> tuple[tuple[int, ...], Any, str]:
        default = None if self.ids is not None or num_layers is None else self._default(num_layers)[0]
        if num_layers is not None and (states[-1] > num_layers or default not in (None, states)):
            raise DriftlabError(
                f"it reads states {list(states)} ({self.exact_why}), and a target of {num_layers} layers has others "
                f"({f'by default {list(default)}' if default else f'0 to {num_layers}'}): it is the drafter of "
                "another target, or pass aux_layers="
            )
        ids = "no layer ids" if self.ids is None else f"ids {list(self.ids)}"
        return states, "read", f"{ids} -> states {list(states)} ({self.exact_why})"

    def _default(self, num_layers: int | None) -> tuple[tuple[int, ...], Any, str]:
        if self.count != 3:
            raise DriftlabError(f"config.json does not say which {self.count} target states it reads: pass aux_layers=")
        if num_layers is None:
            raise DriftlabError(
                "config.json does not say which 3 target states it reads: pass aux_layers=, or the target (or "
                "num_layers=), for then they are 2, N // 2, N - 3, as in every engine"
            )
        states = (2, num_layers // 2, num_layers - 3)
        if not 2 < states[1] < states[2]:
            raise DriftlabError(
                f"config.json names no layers, and a target of {num_layers} layers has no default ones (2, N // 2, N "
                f"- 3 would be {list(states)}): pass aux_layers=, distinct and ascending in 0..{num_layers}"
            )
        words = f"no layer ids, so 2, N // 2, N - 3 with N = {num_layers}, as in every engine -> states {list(states)}"
        return states, "assumed", words

    def _counted(self, ids: tuple[int, ...], num_layers: int | None) -> tuple[Counting, Any, str]:
        """Return the counting, its source and its reason: the user's, the impossible, the project's, then likelihood."""
        if self.given and self.counting is not None:
            return self.counting, "given", self.why
        if self.counting == "boundary":
            return "boundary", "read" if self.sure else "assumed", self.why
        if num_layers is not None and ids[-1] == num_layers:
            return "boundary", "assumed", f"id {ids[-1]} = N can be no output of a layer"
        if self.family == "kimi":
            return self._kimi(ids)
        if self.counting is not None:
            if self.sure and not self._like_kimi(ids):
                return self.counting, "read", self.why
            return self.counting, "assumed", self._or_deepseek(self.why, ids)
        match = _default_of(ids, num_layers)
        if match is not None:
            counting, depth = match
            return counting, "assumed", f"so they are the default states of a target with {depth} layers"
        if ids[0] == 1 and (not self.nested or self.project == "vLLM"):
            return (
                "output",
                "assumed",
                "they start at 1, as the defaults of that counting; pass aux_layers= to override",
            )
        if self.nested and self.project == "vLLM":
            why = (
                "in eagle_config alone, of a file with one of vLLM's architectures: vLLM reads them so there (its "
                "newer runner passes over them)"
            )
            return "boundary", "assumed", f"{why}; pass aux_layers= to override"
        if self.nested:
            why = "in eagle_config, where SGLang reads them so; vLLM takes the same ids as boundaries"
            return "output", "assumed", self._or_deepseek(f"{why}; pass aux_layers= to override", ids)
        return "boundary", "assumed", "at the top level, where vLLM reads them so; pass aux_layers= to override"

    def _kimi(self, ids: tuple[int, ...]) -> tuple[Counting, Any, str]:
        """Count as SGLang does for a Kimi target; what the project itself counts is said where it is another thing."""
        if ids[0] == 1:
            source = "read" if self.counting is not None and self.sure else "assumed"
            return "output", source, "the first is 1: SGLang's rule for DeepSeek and Kimi targets"
        why = "the first is not 1: SGLang's rule for DeepSeek and Kimi targets"
        if self.counting == "output":
            why += (
                f"; {self.project} itself counts outputs of layers, and without that rule they are states "
                f"{[i + 1 for i in ids]}: give layer_ids='output' for those"
            )
        return "boundary", "assumed", why

    def _like_kimi(self, ids: tuple[int, ...]) -> bool:
        """Whether they are the boundary defaults, as in SpecForge's own files for Kimi targets."""
        return self.project == "SpecForge" and is_default(ids)

    def _or_deepseek(self, why: str, ids: tuple[int, ...]) -> str:
        if ids[0] == 1 or (self.family != "latent" and not self._like_kimi(ids)):
            return why
        return (
            f"{why}; if its target is a DeepSeek or Kimi model, SGLang takes them as boundaries: give "
            f"layer_ids='boundary' for states {list(ids)}"
        )


def is_default(states: tuple[int, ...]) -> bool:
    """Whether these boundaries are 2, N // 2, N - 3 of a target with some number of layers N."""
    return len(states) == 3 and states[0] == 2 and states[1] == (states[2] + 3) // 2


def _default_of(ids: tuple[int, ...], num_layers: int | None) -> tuple[Counting, int] | None:
    """Return the counting by which the ids are the default ones, and the depth of a target for which they are."""
    if len(ids) != 3:
        return None
    shifts: dict[Counting, int] = {"boundary": 0, "output": 1}
    for counting, shift in shifts.items():
        states = tuple(i + shift for i in ids)
        depth = states[-1] + 3
        if is_default(states) and num_layers in (None, depth):
            return counting, depth
    return None
