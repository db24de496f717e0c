"""What a checkpoint of a drafter says about itself: its format, and every convention with the reason why it is read so.

    reading = read_checkpoint("path/or/hub-id", num_layers=32)
    print(reading.words())                           # format, shapes, conventions, notes
    drafter = reading.build(target)                  # or reading.with_given(norm_output=False).build(target)

Nothing is settled in silence: a :class:`Convention` is read in the settings, told by the tensors, assumed, or given by the
user. ``own`` reads driftlab's files, ``eagle3`` those of all EAGLE-3 projects, ``mtp`` MTP heads.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.fields import Size, field_value, fitted
from driftlab.drafter.formats.assign import assign, check_shapes
from driftlab.drafter.formats.conventions import Convention, Found, Ledger, naming, shown
from driftlab.drafter.formats.layerids import LayerIds
from driftlab.drafter.formats.remembered import Remembered, not_here
from driftlab.drafter.model import Drafter
from driftlab.drafter.shipped import SHIPPED, shipped_path
from driftlab.errors import DriftlabError

__all__ = ["Convention", "Found", "Ledger", "Reading", "naming", "read_checkpoint", "read_raw", "shown"]

SETTINGS = frozenset(f.name for f in dataclasses.fields(DrafterConfig))
READING_OPTIONS = frozenset({"format", "specforge", "layer_ids", "module"})
"""what a user may give beside the fields of DrafterConfig: how the file is to be read"""
_UNSAID = READING_OPTIONS | {"aux_layers"}  # None means that nothing is given

_SAME_TENSORS = {
    *("aux_layers", "layer_ids", "specforge", "norm_output", "norm_before_residual", "norm_before_fc", "fc_norm"),
    *("head_norm", "twice_normed", "rope_theta", "rope_scaling", "rope_interleaved", "rotary_dim", "rms_norm_eps"),
    *("windows", "logit_scale", "zero_first_embedding", "ttt", "trained_length"),
}
"""what may be given otherwise without a change of what is read of the file"""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A checkpoint, read: everything but its weights, which :attr:`tensors` reads when asked."""

    raw: Any
    """the opened checkpoint, a :class:`driftlab.drafter.formats.files.RawCheckpoint`"""
    name: str
    """what to call it in messages: as the user named it"""
    format: str
    """which project's file it is, as far as that can be told"""
    told: str
    """how that was told"""
    settled: tuple[Convention, ...]
    """one for each field of DrafterConfig that the file fixes; a field without one has its default"""
    shapes: dict[str, tuple[int, ...]]
    """canonical name -> shape"""
    load_tensors: Callable[[], dict[str, Tensor]]
    """reads all tensors under their canonical names; d2t as offsets, t2d complete"""
    copies: Mapping[str, str] = field(default_factory=dict)
    """canonical name -> name of the tensor that it is a copy of: a tied head"""
    notes: tuple[str, ...] = ()
    layer_ids: LayerIds | None = None
    """which target states it reads, where that depends on the target's depth"""
    draft_vocab: Tensor | None = None
    """ascending target ids of the draft vocabulary; None: the whole vocabulary"""
    num_layers: int | None = None
    """decoder layers of the target, if the user said so"""
    given: Mapping[str, Any] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    """tensors that the file's own engine leaves out, and so does the drafter; a note names them"""
    load_embedding: Callable[[], Tensor] | None = None
    """reads the file's own embedding, where some engines put the target's in its place"""
    trained_for: dict[str, str] | None = None
    """label and fingerprint of the target, where the file names it"""

    @property
    def path(self) -> Path:
        """Where the files are."""
        return self.raw.path

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors under their canonical names."""
        with naming(self.name):
            return self.load_tensors()

    @property
    def conventions(self) -> tuple[Convention, ...]:
        """Everything settled; aux_layers is None where the target's depth would have to be known."""
        return self.conventions_for(None)

    def conventions_for(self, target: Any) -> tuple[Convention, ...]:
        """Return everything settled, aux_layers as counted for ``target`` (a Target, a Trajectory, or None)."""
        if self.layer_ids is None:
            return self.settled
        depth = self._depth(target)
        if depth is None and self.layer_ids.needs_depth:
            row = Convention("aux_layers", None, "assumed", self.layer_ids.open_words)
        else:
            row = Convention("aux_layers", *self.layer_ids.states(depth))
        return (*self.settled, row)

    def config_for(self, target: Any = None) -> DrafterConfig:
        """Return the configuration.

        Args:
            target: needed if the file leaves the captured states to the target's depth (or give ``num_layers``).

        Raises:
            DriftlabError: the states cannot be told, or the settings contradict each other.
        """
        with naming(self.name):
            return self._config(None if self.layer_ids is None else self.layer_ids.states(self._depth(target))[0])

    def _config(self, states: tuple[int, ...] | None) -> DrafterConfig:
        values = {row.name: row.value for row in self.settled if row.name in SETTINGS}
        return DrafterConfig(**values, **({} if states is None else {"aux_layers": states}))

    def with_given(self, **overrides: Any) -> Reading:
        """Return the same file read with some conventions given by the user (fields of DrafterConfig, "specforge", ...)."""
        if isinstance(self.raw, Remembered):
            not_here()
        changed = read_raw(self.raw, self.name, num_layers=self.num_layers, **{**self.given, **overrides})
        if "tensors" in self.__dict__ and set(overrides) <= _SAME_TENSORS:
            changed.__dict__["tensors"] = self.tensors
        return changed

    def build(self, target: Any = None) -> Drafter:
        """Return the drafter; ``drafter.notes`` says in words what was assumed, ``drafter.reading`` is this.

        Args:
            target: lends embedding and head where the file has none, and its depth (a Target or a Trajectory).

        Raises:
            DriftlabError: a missing, unused or misshapen tensor, or a drafter that does not fit the target.
        """
        config = self.config_for(target)
        told = self.about(target)
        notes = [*self.layer_notes(target), *self.notes, *self.embedding_notes(target), *self.check(target), *told]
        for words in told:
            warnings.warn(words, stacklevel=3)
        drafter = Drafter(config, target, draft_vocab=self.draft_vocab)
        with naming(self.name):
            assign(drafter, self.tensors)
        drafter.trained_for = self.trained_for  # not this target, unless the file names it: nobody else knows
        drafter.notes = notes
        drafter.reading = dataclasses.replace(self)  # without the tensors that this one holds
        return drafter

    def words(self, target: Any = None) -> str:
        """Return what a person reads: format, shapes, conventions, notes."""
        from driftlab.drafter.formats.words import reading_words

        return reading_words(self, target)

    def to_dict(self, target: Any = None) -> dict[str, Any]:
        """Return the same as plain JSON values."""
        from driftlab.drafter.formats.words import reading_values

        return reading_values(self, target)

    def __deepcopy__(self, memo: Any) -> Reading:
        return self  # it never changes

    def __reduce__(self) -> Any:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        lends = None if self.load_embedding is None else not_here
        return _restored, (
            {**values, "raw": Remembered.of(self.raw), "load_tensors": not_here, "load_embedding": lends},
        )

    def _depth(self, target: Any) -> int | None:
        spec = getattr(target, "spec", None)
        if spec is not None and self.num_layers not in (None, spec.num_layers):
            raise DriftlabError(f"num_layers={self.num_layers}, but {spec.label} has {spec.num_layers}: leave it out")
        return self.num_layers if spec is None else spec.num_layers

    def check(self, target: Any = None) -> list[str]:
        """Compare the file's tensors with its configuration by names and shapes; return notes on what stays unused.

        Raises:
            DriftlabError: a missing, unused or misshapen tensor.
        """
        ids = self.layer_ids
        with naming(self.name):
            # shapes do not depend on which states they are
            config = self._config(tuple(range(ids.count))) if ids and ids.needs_depth else self.config_for(target)
            shapes = {**self.shapes, **{name: self.shapes[source] for name, source in self.copies.items()}}
            shapes = {name: shape for name, shape in shapes.items() if name not in self.unused}
            return check_shapes(config, shapes, {row.name for row in self.settled if row.source == "given"})

    def layer_notes(self, target: Any = None) -> list[str]:
        """Return how the layer ids were counted, in words."""
        if self.layer_ids is None:
            return []
        return [f"aux_layers: {row.why}" for row in self.conventions_for(target) if row.name == "aux_layers"]

    def embedding_notes(self, target: Any = None) -> list[str]:
        """Return who would use the target's embedding in place of the file's own, unless the two are known to be equal."""
        if self.load_embedding is None:
            return []
        head, when = getattr(target, "head", None), "if it differs from the target's"
        if head is not None and not isinstance(self.raw, Remembered):
            own, lent = self.load_embedding().float().cpu(), head.embed.detach().float().cpu()
            if own.shape == lent.shape and torch.equal(own, lent):
                return []
            when = "it differs from this target's, and"
        without = "" if self.raw.config.get("target_hidden_size") else " and SafeAILab's code (no target_hidden_size)"
        return [
            f"own_embed: the file's embedding is used, as in vLLM; {when} SGLang, TensorRT-LLM and tokenspeed (equal "
            f"widths){without} compute other numbers, for they use the target's: give own_embed=False to do the same"
        ]

    def about(self, target: Any) -> list[str]:
        """Return what does not go together between file and target, in words; nothing without a target."""
        spec = getattr(target, "spec", None)
        if spec is None:
            return []
        said, rows = [], {row.name: row for row in self.settled}
        for name, theirs in (("target_hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
            if name in rows and rows[name].value != theirs:
                said.append(
                    f"{name} is {rows[name].value}, {spec.label} has {theirs}: it is the drafter of another target"
                )
        if self.trained_for is not None and spec.fingerprint != self.trained_for["fingerprint"]:
            said.append(
                f"{self.name} was trained for {self.trained_for['label']} (weights {self.trained_for['fingerprint'][:12]}), "
                f"this target is {spec.label} ({spec.fingerprint[:12]}): states and head are not those that it learned from"
            )
        theta = rows.get("rope_theta")
        if theta is not None and theta.source == "assumed" and theta.value != spec.rope_theta:
            said.append(
                f"rope_theta: {theta.value:g}, since the file does not say; {spec.label} has {spec.rope_theta:g}. "
                "Engines do the same; if it was trained otherwise, give rope_theta="
            )
        scaling = rows.get("rope_scaling")
        if self.format != "driftlab" and spec.rope_type != "default" and scaling is not None and scaling.value is None:
            said.append(
                f"rope: {spec.label} uses {spec.rope_type} rotary scaling, this file has none (lost in a conversion? "
                "speculators#574)"
            )
        return said


def read_checkpoint(path: str | Path, *, num_layers: Any = None, **given: Any) -> Reading:
    """Read a checkpoint of any known format.

    Args:
        path: a folder, a file, a Hugging Face id, or a name in :data:`driftlab.drafter.SHIPPED`.
        num_layers: decoder layers N of the target, where no target is passed later: layer ids left out mean 2, N//2, N-3.
        given: conventions known better than the file says them: any field of DrafterConfig; ``specforge`` ("before-879" or
            "after-879": when a SpecForge file was trained); ``layer_ids`` ("boundary" or "output": how its layer ids
            count); ``module`` of a file with several MTP modules; ``format``, a name in ``provenance.FORMATS``;
            ``revision`` of a Hugging Face id.

    Raises:
        DriftlabError: not a drafter, a contradiction, a setting without its tensor, a setting that is not known, a value that
            none of its kind can have.
    """
    from driftlab.drafter.formats.files import open_checkpoint

    name = str(path)
    revision = given.pop("revision", None)
    path = shipped_path(name) if name in SHIPPED and not Path(name).exists() else path
    with naming(name):
        raw = open_checkpoint(path, revision=revision)
    if not Path(path).exists():
        name = raw.label  # a hub id, with the commit that was read
    return read_raw(raw, name, num_layers=num_layers, **given)


def read_raw(raw: Any, name: str | None = None, *, num_layers: Any = None, **given: Any) -> Reading:
    """Read an opened checkpoint; see :func:`read_checkpoint`."""
    from driftlab.drafter.formats import eagle3, mtp, mtpnames, own

    name = raw.label if name is None else name
    unknown = sorted(set(given) - SETTINGS - READING_OPTIONS)
    if unknown:
        raise DriftlabError(
            f"given {unknown}: no such convention; fields of DrafterConfig may be given, and {sorted(READING_OPTIONS)}"
        )
    given = _normal(given)
    num_layers = fitted("num_layers", num_layers, Size | None)
    with naming(name):
        if "driftlab" in raw.config:
            reading = own.read_own(raw, given)
        elif mtp.looks_like_mtp(raw.names):
            reading = mtp.read_mtp(raw, given)
        else:
            mtpnames.refuse_part(raw.names)
            reading = eagle3.read_eagle3(raw, given)
    there = {row.name for row in reading.settled}
    rest = [Convention(k, v, "given", "given by the user") for k, v in given.items() if k in SETTINGS - there]
    return dataclasses.replace(reading, name=name, num_layers=num_layers, settled=(*reading.settled, *rest))


def _normal(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given in the types of DrafterConfig, without what was not said."""
    values = {key: value for key, value in given.items() if value is not None or key not in _UNSAID}
    try:
        return {key: _given_value(key, value) for key, value in values.items()}
    except DriftlabError as error:
        raise DriftlabError(f"given: {error}") from error


def _given_value(key: str, value: Any) -> Any:
    if key in SETTINGS:
        return field_value(DrafterConfig, key, value)
    return fitted(key, value, int if key == "module" else str)


def _restored(values: dict[str, Any]) -> Reading:
    return Reading(**values)
