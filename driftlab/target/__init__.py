"""The target: load any Hugging Face causal language model, record it, make prompts with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from driftlab.errors import DriftlabError
from driftlab.files import cache_dir
from driftlab.models import PACKAGED
from driftlab.perturbations import Perturbation
from driftlab.progress import Progress, silent
from driftlab.prompts import Prompt, encode, load_prompts, tokenize
from driftlab.recorded import TargetHead, TargetSpec
from driftlab.target.adapter import Adapter
from driftlab.target.continuous import SelfJob, Source, record_self
from driftlab.target.loading import load_pretrained
from driftlab.target.record import Job, run
from driftlab.target.sampling import Sampling, continue_prompts, streams
from driftlab.target.windows import Window
from driftlab.trajectory import Trajectory
from driftlab.workers import usable_cores

__all__ = ["Sampling", "Target", "default_aux_layers"]


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return (2, N // 2, N - 3), what EAGLE-3 engines capture. Raises DriftlabError if those are not distinct, ascending.

    Small targets have no such layers ((2, 2, 1) for N = 4): name them.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 2 < layers[1] < layers[2]:
        raise DriftlabError(
            f"a target of {num_layers} layers has no default aux layers (2, N//2, N-3 would be {layers}): pass "
            f"aux_layers=, distinct and ascending in 0..{num_layers}"
        )
    return layers


class Target:
    """The large model that verifies. ``Target.load("smollm2")``, or wrap a loaded model and its tokenizer.

    ``spec``: shapes and identity; ``head``: embedding, head, final-norm gain; ``aux_layers``: the captured states.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "custom",
        label: str | None = None,
        aux_layers: Sequence[int] | None = None,
    ) -> None:
        self.adapter = Adapter(model)
        self._source: Source | None = None
        self.tokenizer = tokenizer
        self.spec: TargetSpec = self.adapter.spec(name, label or name, _eos_ids(model, tokenizer))
        self.aux_layers = default_aux_layers(self.spec.num_layers) if aux_layers is None else aux_layers

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The states that a recording keeps; may be set, e.g. to ``drafter.config.aux_layers``."""
        return self._aux_layers

    @aux_layers.setter
    def aux_layers(self, layers: Sequence[int]) -> None:
        layers = tuple(layers)
        bad = [k for k in layers if not 0 <= k <= self.spec.num_layers]
        if bad or not layers or list(layers) != sorted(set(layers)):
            raise DriftlabError(
                f"aux_layers {list(layers)}: give one or more, distinct, ascending, in 0..{self.spec.num_layers}"
            )
        self._aux_layers = layers

    @classmethod
    def load(
        cls,
        name: str = "smollm2",
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        device_map: Any = None,
        aux_layers: Sequence[int] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        progress: Progress = silent,
    ) -> Target:
        """Load ``"smollm2"``, a Hugging Face id, or a local folder.

        Args:
            name: ``smollm2`` is SmolLM2-135M-Instruct (Q4_1, de-quantised), from the package index, cached.
            device: where to put it; default CPU. Use ``device_map`` (passed to transformers) for large targets.
            dtype: of weights and computation. Replay equals a live run bit for bit in float32.
            aux_layers: captured states, k = residual stream after k layers; default (2, N // 2, N - 3).
            revision: of a Hugging Face id.
            trust_remote_code: run code that comes with the model; off unless you say so.
            progress: told about downloads and conversion.

        Raises:
            DriftlabError: no such model, not reachable, weights missing, or not a model that can be captured.
        """
        if name not in PACKAGED and "/" not in name and not Path(name).exists():  # the hub would be asked five times
            raise DriftlabError(
                f"cannot load target {name!r}: there is no such folder. Give {sorted(PACKAGED)}, the path of a local model "
                "folder, or a Hugging Face id with its owner (openai-community/gpt2)"
            )
        model, tokenizer, label = load_pretrained(
            name,
            device=device,
            dtype=dtype,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        target = cls(
            model, tokenizer, name=name if label != Path(name).name else label, label=label, aux_layers=aux_layers
        )
        if device_map is None and target.adapter.device.type == "cpu":
            target._source = Source(name, dtype, revision, trust_remote_code)
        return target

    @property
    def head(self) -> TargetHead:
        """Embedding, head and final-norm gain."""
        return self.adapter.head()

    @contextmanager
    def attention(self, *, window: int, sinks: int = 0) -> Iterator[None]:
        """See only the last ``window`` keys (a query's own among them) and the first ``sinks`` of the text, in the block.

        A mask, in every layer, in prefill and in decoding; positions stay (:mod:`driftlab.target.windows`). What is recorded
        in the block says so and has another name. Needs eager or SDPA attention; blocks do not nest.

        Raises:
            DriftlabError: a window below 1, negative sinks, layers or an attention that a mask does not reach, another block.
        """
        with self.adapter.attending(Window(window, sinks)):
            yield

    def record(
        self,
        prompts: Any = "default",
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        template: bool = True,
        system: str | None = None,
        perturbation: Perturbation | str | None = None,
        answers: Sequence[str] | Sequence[Sequence[int]] | None = None,
        own_answers: bool = False,
        out: str | Path | None = None,
        store_dtype: torch.dtype | None = None,
        piece_size: int = 16,
        progress: Progress = silent,
    ) -> Trajectory:
        """Continue the prompts and keep what drafters need. Done once: the same call opens the finished recording.

        Args:
            prompts: anything :func:`driftlab.prompts.load_prompts` reads: a file, strings, prompts, or "default".
            max_new_tokens: length limit of an answer.
            temperature: 0 is greedy; ``top_k`` (0 off) and ``top_p`` (1 off) cut the distribution before sampling.
            seed: of the sampling; each sequence has its own stream.
            template: render the tokenizer's chat template; off: the raw text.
            system: system message, in place of the prompt's own or the template's default.
            perturbation: a change of the input, or its key (:mod:`driftlab.perturbations`), in place of ``template`` and
                ``system``.
            answers: record these texts, or token ids, in place of generating (the target's own answers, or replay is not what
                the target would say).
            own_answers: the given answers are the target's own, made with these sampling settings (by a live run, say).
            out: folder to write; default a folder of the cache named by content.
            store_dtype: of the aux states; default the target's. last_hidden is float32 always.
            piece_size: prompts decoded together and written together. It does not change the texts.
            progress: called with ("recording", prompts done, prompts).

        Raises:
            DriftlabError: an empty or over-long prompt, a folder with another recording, states that are not finite, a
                full disk. Finished pieces are kept.
        """
        if max_new_tokens < 1 or piece_size < 1:
            raise DriftlabError(f"max_new_tokens {max_new_tokens} and piece_size {piece_size} must be at least 1")
        if store_dtype is not None and not store_dtype.is_floating_point:
            raise DriftlabError(f"store_dtype {store_dtype}: hidden states are stored in a floating-point type")
        if isinstance(answers, str):
            raise DriftlabError("answers is one string: give a list with one answer per prompt")
        loaded = load_prompts(prompts)
        if isinstance(perturbation, str):
            perturbation = Perturbation.parse(perturbation)
        if perturbation is not None and not (template and system is None):
            raise DriftlabError(
                f"perturbation {perturbation.key!r} says how the prompt is made: leave template= and system= out"
            )
        if perturbation is None:
            ids = [encode(p, self.tokenizer, template=template, system=system) for p in loaded]
        else:
            ids = perturbation.encode(loaded, self.tokenizer)
        prompt_ids = [tuple(tokens) for tokens in ids]
        answer_ids = None if answers is None else self._encode_answers(answers, loaded, max_new_tokens)
        if own_answers and (answers is None or any(isinstance(answer, str) for answer in answers)):
            raise DriftlabError(
                "own_answers says that the given token ids are the target's own: pass answers= with lists of ids (text "
                "encoded again need not be the same tokens)"
            )
        self._check_lengths(loaded, prompt_ids, max_new_tokens)
        window = self.adapter.window
        attention = "" if window is None else window.label
        # the label stands wherever a number does
        spec = self.spec if window is None else dataclasses.replace(self.spec, label=f"{self.spec.label}, {attention}")
        job = Job(
            spec=spec,
            aux_layers=self.aux_layers,
            prompts=tuple(loaded),
            prompt_ids=tuple(prompt_ids),
            answers=answer_ids,
            own_answers=own_answers or answers is None,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_k, top_p, seed),
            template=perturbation.key if perturbation is not None else "chat" if template else "none",
            target_dtype=str(self.adapter.dtype).removeprefix("torch."),
            store_dtype=str(store_dtype or self.adapter.dtype).removeprefix("torch."),
            attention=attention,
        )
        return run(
            self.adapter,
            self.tokenizer,
            job,
            out=None if out is None else Path(out),
            piece_size=piece_size,
            progress=progress,
        )

    def record_self_prompts(
        self,
        count: int,
        *,
        max_new_tokens: int = 192,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        user_tokens: int = 56,
        user_temperature: float = 1.0,
        user_top_k: int = 32,
        slots: int = 96,
        processes: int | None = None,
        out: str | Path | None = None,
        store_dtype: torch.dtype | None = torch.bfloat16,
        progress: Progress = silent,
    ) -> Trajectory:
        """Let the target write user messages and answer them, and keep its states: text to train drafters on.

        (Magpie, arXiv 2406.08464: the target continues its own chat template from where the user speaks.) One pass: the
        states kept are those of the decoding. Stopped at any moment, the same call goes on; called with a larger count it
        adds to what is there. Conversation i depends on the seed and i alone.

        Args:
            count: conversations, rounded up to a multiple of 32.
            max_new_tokens: length limit of an answer.
            temperature: of the answers, 0 greedy; ``top_k`` and ``top_p`` as in :meth:`record`.
            top_k: see ``temperature``.
            top_p: see ``temperature``.
            seed: of user messages and answers.
            user_tokens: messages that do not end within so many tokens are drawn again.
            user_temperature: of the user's messages.
            user_top_k: of the user's messages.
            slots: conversations decoded together, by each process.
            processes: on a CPU several processes of few threads, each with a copy of the target, are faster than one;
                default one a core for a target that came from :meth:`load`, else 1.
            out: folder; default one of the cache, named by content.
            store_dtype: of the aux states; half the size in bfloat16. last_hidden is float32 always.
            progress: called with ("self-prompts", conversations done, conversations).

        Raises:
            DriftlabError: no chat template, messages that never end, a model that cannot be decoded in slots, states that
                are not finite, a folder with another recording. Finished pieces are kept.
        """
        if min(count, max_new_tokens, slots, user_tokens) < 1:
            raise DriftlabError(
                f"count {count}, max_new_tokens {max_new_tokens}, slots {slots} and user_tokens {user_tokens} must be at "
                "least 1"
            )
        if self.adapter.window is not None:
            raise DriftlabError(
                "self-prompts are made in slots, which know no window: make them outside target.attention(...)"
            )
        prefix, suffix = self._user_turn(reply=True)
        store = store_dtype or self.adapter.dtype
        if not store.is_floating_point:
            raise DriftlabError(f"store_dtype {store}: hidden states are stored in a floating-point type")
        job = SelfJob(
            spec=self.spec,
            aux_layers=self.aux_layers,
            prefix=tuple(prefix),
            suffix=tuple(suffix),
            user=Sampling(user_temperature, user_top_k),
            user_tokens=user_tokens,
            sampling=Sampling(temperature, top_k, top_p, seed),
            max_new_tokens=max_new_tokens,
            target_dtype=str(self.adapter.dtype).removeprefix("torch."),
            store_dtype=str(store).removeprefix("torch."),
        )
        if job.length > self.spec.max_positions:
            raise DriftlabError(
                f"conversations of up to {job.length} tokens are beyond the target's {self.spec.max_positions} positions: "
                "lower max_new_tokens or user_tokens"
            )
        if processes is None:
            processes = 1 if self._source is None or self.adapter.hooked else usable_cores()
        if processes > 1 and (self._source is None or self.adapter.hooked):
            raise DriftlabError(
                "several processes need a target from Target.load on the CPU, without hooks: pass processes=1"
            )
        return record_self(
            self.adapter,
            self.tokenizer,
            job,
            count,
            out=cache_dir() / "recordings" / job.fingerprint[:16] if out is None else Path(out),
            slots=slots,
            source=self._source,
            processes=processes,
            progress=progress,
        )

    def _encode_answers(
        self, answers: Sequence[Any], prompts: Sequence[Prompt], limit: int
    ) -> tuple[tuple[int, ...], ...]:
        if len(answers) != len(prompts):
            raise DriftlabError(f"{len(answers)} answers for {len(prompts)} prompts")
        encoded = []
        for answer, prompt in zip(answers, prompts, strict=True):
            given = self.tokenizer(answer, add_special_tokens=False)["input_ids"] if isinstance(answer, str) else answer
            ids = list(given)[:limit]
            if any(type(i) is not int or not 0 <= i < self.spec.vocab_size for i in ids):
                raise DriftlabError(
                    f"the answer to prompt {prompt.id!r} has something that is no token id in 0..{self.spec.vocab_size - 1}"
                )
            # no decoder goes on after EOS
            ids = ids[: next((i for i, token in enumerate(ids, 1) if token in self.spec.eos_ids), len(ids))]
            if not ids:
                raise DriftlabError(f"the answer to prompt {prompt.id!r} is empty")
            encoded.append(tuple(ids))
        return tuple(encoded)

    def _check_lengths(self, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        for prompt, tokens in zip(prompts, ids, strict=True):
            if len(tokens) + max_new_tokens > self.spec.max_positions:
                raise DriftlabError(
                    f"prompt {prompt.id!r} has {len(tokens)} tokens; with {max_new_tokens} new ones that is beyond the "
                    f"target's {self.spec.max_positions} positions: shorten or remove it, or lower max_new_tokens"
                )

    def self_prompts(
        self,
        count: int,
        *,
        seed: int = 0,
        max_tokens: int = 56,
        temperature: float = 1.0,
        top_k: int = 32,
        batch_size: int = 64,
        progress: Progress = silent,
    ) -> list[Prompt]:
        """Let the target write user messages itself: it continues its own chat template from where the user speaks.

        (Magpie, arXiv 2406.08464.) Messages that do not end within ``max_tokens`` or are shorter than five tokens are
        drawn again.
        """
        prefix, suffix = self._user_turn()
        end = suffix[0]
        prompts: list[Prompt] = []
        generators = streams([prefix] * (batch_size * 4 * (count // batch_size + 2)), seed)
        while len(prompts) < count and len(generators) >= batch_size:
            taken, generators = generators[:batch_size], generators[batch_size:]
            messages = continue_prompts(
                self.adapter,
                [prefix] * batch_size,
                max_new_tokens=max_tokens,
                stop_ids=[end, *self.spec.eos_ids],
                sampling=Sampling(temperature, top_k),
                generators=taken,
            )
            texts = [self.tokenizer.decode(m[:-1]).strip() for m in messages if m[-1] == end and len(m) > 5]
            prompts += load_prompts([text for text in texts if text]) if any(texts) else []
            progress("self-prompts", min(len(prompts), count), count)
        if len(prompts) < count:
            raise DriftlabError(f"the target ended only {len(prompts)} of {count} messages: raise max_tokens")
        return [Prompt(f"self-{seed}-{i:05d}", p.messages, "self") for i, p in enumerate(prompts[:count])]

    def _user_turn(self, reply: bool = False) -> tuple[list[int], list[int]]:
        """Return the template's tokens up to where the user's text begins, and those from its end on.

        ``reply``: to where the assistant speaks, for a conversation that goes on; else what the template ends with.
        """
        mark = "\u2603mark\u2603"
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise DriftlabError("self-prompts need a chat template; this tokenizer has none")
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=reply
        )
        before, _, after = text.partition(mark)
        prefix = tokenize(before, self.tokenizer, special=False)  # with the BOS that recorded prompts begin with
        suffix = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        if not before or not suffix:
            raise DriftlabError("this chat template marks neither where the user's text begins nor where it ends")
        return prefix, suffix


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id
    ids = [] if configured is None else configured if isinstance(configured, list) else [configured]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return tuple(sorted(set(ids)))
