"""The target: load any Hugging Face causal language model, record it, make prompts with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from driftlab.errors import DriftlabError
from driftlab.progress import Progress, silent
from driftlab.prompts import Prompt, encode, load_prompts
from driftlab.target.adapter import Adapter, load_pretrained
from driftlab.target.record import Job, run
from driftlab.target.sampling import Sampling, continue_prompts, streams
from driftlab.trajectory import TargetHead, TargetSpec, Trajectory

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
        self.tokenizer = tokenizer
        self.spec: TargetSpec = self.adapter.spec(name, label or name, _eos_ids(model, tokenizer))
        self.aux_layers = tuple(default_aux_layers(self.spec.num_layers) if aux_layers is None else aux_layers)
        bad = [k for k in self.aux_layers if not 0 <= k <= self.spec.num_layers]
        if bad or not self.aux_layers or list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise DriftlabError(
                f"aux_layers {list(self.aux_layers)}: give one or more, distinct, ascending, in 0..{self.spec.num_layers}"
            )

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
        model, tokenizer, label = load_pretrained(
            name,
            device=device,
            dtype=dtype,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        return cls(
            model, tokenizer, name=name if label != Path(name).name else label, label=label, aux_layers=aux_layers
        )

    @property
    def head(self) -> TargetHead:
        """Embedding, head and final-norm gain."""
        return self.adapter.head()

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
        answers: Sequence[str] | None = None,
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
            answers: record these texts in place of generating (the target's own answers, or replay is not what the
                target would say).
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
        prompt_ids = [tuple(encode(p, self.tokenizer, template=template, system=system)) for p in loaded]
        answer_ids = None if answers is None else self._encode_answers(answers, loaded, max_new_tokens)
        self._check_lengths(loaded, prompt_ids, max_new_tokens)
        job = Job(
            spec=self.spec,
            aux_layers=self.aux_layers,
            prompts=tuple(loaded),
            prompt_ids=tuple(prompt_ids),
            answers=answer_ids,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_k, top_p, seed),
            template="chat" if template else "none",
            target_dtype=str(self.adapter.dtype).removeprefix("torch."),
            store_dtype=str(store_dtype or self.adapter.dtype).removeprefix("torch."),
        )
        return run(
            self.adapter,
            self.tokenizer,
            job,
            out=None if out is None else Path(out),
            piece_size=piece_size,
            progress=progress,
        )

    def _encode_answers(
        self, answers: Sequence[str], prompts: Sequence[Prompt], limit: int
    ) -> tuple[tuple[int, ...], ...]:
        if len(answers) != len(prompts):
            raise DriftlabError(f"{len(answers)} answers for {len(prompts)} prompts")
        encoded = []
        for answer, prompt in zip(answers, prompts, strict=True):
            ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"][:limit]
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
        prefix, end = self._user_turn()
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

    def _user_turn(self) -> tuple[list[int], int]:
        """Return the template's tokens up to where the user's text begins, and the token that ends it."""
        mark = "\u2603mark\u2603"
        if not self.tokenizer.chat_template:
            raise DriftlabError("self-prompts need a chat template; this tokenizer has none")
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        before, _, after = text.partition(mark)
        prefix = self.tokenizer(before, add_special_tokens=False)["input_ids"]
        return prefix, self.tokenizer(after, add_special_tokens=False)["input_ids"][0]


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id
    ids = [] if configured is None else configured if isinstance(configured, list) else [configured]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return tuple(sorted(set(ids)))
