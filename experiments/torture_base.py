"""The whole files that torture.py breaks, and the jobs that it kills: everything of a random target of four narrow layers."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torture_files import SECRET, gguf_bytes

from driftlab import VARIANTS, Drafter, Target, TrainConfig, Trajectory, all_starts, train
from driftlab.ablation import Cell, ablate
from driftlab.errors import DriftlabError

PROMPTS = ["hello world", "abc", "q", "another prompt", "zebra", "a longer prompt than the others"]
LOGS = (
    "INFO 06-06 14:20:34 [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 38.8%, Mean acceptance length: 2.16, "
    "Accepted: 150 tokens, Drafted: 387 tokens, Per-position acceptance rate: 0.543, 0.357, 0.264\n" * 3,
    "\n".join(
        [
            'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0',
            'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0',
            'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 120.0',
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{i}"}} {n}.0'
                for i, n in enumerate((70, 35, 15))
            ),
        ]
    ),
    "[2026] Decode batch, #running-req: 1, accept len: 2.35, accept rate: 0.45, cuda graph: True\n" * 4,
    "num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length,acceptance_at_pos_0,acceptance_at_pos_1\n"
    "100,200,90,1.9,0.6,0.3\n50,100,50,2.0,0.7,0.3\n",
    "\n".join(json.dumps({"question_id": i, "choices": [{"idxs": [3, 4], "new_tokens": [9, 11]}]}) for i in range(4)),
)
"""small logs of five tools, by their formats' own words"""


def tiny_model() -> Any:
    """A random Llama whose texts vary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "eos_token_id": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": 1},
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(8) if parameter.ndim > 1 else parameter.uniform_(0.5, 2.0)
    return model


def tiny_tokenizer() -> Any:
    """One token a letter, BOS first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {letter: 3 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, **letters}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tiny_target() -> Target:
    """The target of everything here."""
    return Target(tiny_model(), tiny_tokenizer(), name="tiny", aux_layers=(1, 2, 3))


def build(base: Path) -> None:
    """Write a folder of every kind below ``base``, and a file outside of all of them that nobody may read."""
    from driftlab import models
    from driftlab.stored import save_draft

    base.mkdir(parents=True)
    (base / "outside.safetensors").write_text(SECRET)
    target = tiny_target()
    record(target, base / "recording" / "run")
    next((base / "recording").glob("head-*")).rename(base / "recording" / "head.safetensors")
    _point_to_head(base / "recording" / "run")
    held = Trajectory.open(base / "recording" / "run")
    _drafters(base, held)
    drafter = Drafter.load(base / "own", held)
    for folder in ("draft", "state", "prompts", "parquet", "csv", "gguf", "cache"):
        (base / folder).mkdir()
    save_draft(base / "draft" / "draft.safetensors", all_starts(drafter, held, 3, temperatures=(1.0,), top=4))
    fresh = Drafter(VARIANTS["eagle31"].for_target(held), held)
    train(fresh, held, TrainConfig(ttt=2, batch_size=2, epochs=4.0, save_every=0), out=base / "state", stop_after=2)
    _texts(base)
    with zipfile.ZipFile(base / "gguf" / "m.whl", "w") as wheel:
        wheel.writestr("m/model.gguf", gguf_bytes())
    for kind in ("target", "cache"):
        target.adapter.model.save_pretrained(base / kind)
    target.tokenizer.save_pretrained(base / "target")
    models._sign(models.PACKAGED["smollm2"], base / "cache")


def _point_to_head(run: Path) -> None:
    from driftlab.files import read_json
    from driftlab.pieces import write_trajectory_json

    write_trajectory_json(run, {**read_json(run / "trajectory.json"), "head": "head.safetensors"})


def _drafters(base: Path, held: Trajectory) -> None:
    from safetensors.torch import save_file

    drafter = Drafter(VARIANTS["eagle31"].for_target(held, lm_head="own"), held)
    drafter.save(base / "own")
    settings = json.loads((base / "own" / "config.json").read_text())
    del settings["driftlab"]
    tensors = {name: t.detach().clone().contiguous() for name, t in drafter.state_dict().items()}
    for kind in ("foreign", "bin", "oldbin", "sharded"):
        (base / kind).mkdir()
        (base / kind / "config.json").write_text(json.dumps(settings, indent=2))
    save_file(tensors, base / "foreign" / "model.safetensors", metadata={"format": "pt"})
    torch.save(tensors, base / "bin" / "pytorch_model.bin")
    torch.save(tensors, base / "oldbin" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    names = sorted(tensors)
    shards = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, held_there in shards.items():
        save_file({name: tensors[name] for name in held_there}, base / "sharded" / file)
    where = {name: file for file, there in shards.items() for name in there}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (base / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _texts(base: Path) -> None:
    from driftlab.results import as_rows, write_rows

    rows = [
        {"id": "one", "category": "math", "prompt": "two and two?"},
        {"id": "two", "category": "writing", "messages": [{"role": "user", "content": "é “quoted”\u2028line"}]},
        {"id": "three", "messages": [{"role": "system", "content": "short"}, {"role": "user", "content": "go on"}]},
    ]
    (base / "prompts" / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    records = [{"depth": k, "quantity": "tau", "value": 1 / k, "n": 10.0, "prompt": "NA"} for k in range(1, 9)]
    frame = as_rows(records, variant="eagle31", target="tiny", temperature=0.5, seed=3)
    write_rows(base / "parquet" / "rows.parquet", frame)
    write_rows(base / "csv" / "rows.csv", frame)
    for i, text in enumerate(LOGS):
        (base / f"log-{i}").mkdir()
        (base / f"log-{i}" / f"log.{i}").write_text(text)


# ---------------------------------------------------------------------------------------------- jobs to be killed


@dataclass(frozen=True, kw_only=True)
class TinyCell(Cell):
    """A short training, measured."""

    variant: str
    seed: int


def record(target: Target, out: Path) -> Trajectory:
    """A sampled recording in pieces of one prompt."""
    return target.record(PROMPTS, max_new_tokens=24, temperature=1.0, template=False, piece_size=1, out=out)


def job_record(base: Path, out: Path) -> None:
    """Record."""
    target = Target.load(str(base / "target"), aux_layers=(1, 2, 3))
    target.record(PROMPTS * 3, max_new_tokens=40, temperature=1.0, template=False, piece_size=3, out=out / "run")


def job_train(base: Path, out: Path) -> None:
    """Train, with states often."""
    held = Trajectory.open(base / "recording" / "run")
    drafter = Drafter(VARIANTS["eagle31"].for_target(held), held, seed=1)
    train(drafter, held, TrainConfig(ttt=3, batch_size=2, epochs=12.0, save_every=3), out=out / "drafter")


def job_ablate(base: Path, out: Path) -> None:
    """Four cells, each a training and a replay."""
    from driftlab.measure import replay_rows

    held = Trajectory.open(base / "recording" / "run")

    def run(cell: TinyCell) -> pd.DataFrame:
        drafter = Drafter(VARIANTS[cell.variant].for_target(held), held, seed=cell.seed)
        train(drafter, held, TrainConfig(ttt=2, batch_size=2, epochs=4.0, save_every=2), out=out / "trained" / cell.key)
        rows, _ = replay_rows(drafter.eval(), held, cell.key, depth=4)
        return rows

    cells = [TinyCell(variant=variant, seed=seed) for seed in range(2) for variant in ("eagle3", "eagle31")]
    report = ablate(cells, run, out=out / "cells")
    if report.failed:
        raise DriftlabError(report.failed[0].reason)  # a cell that fails is told, and the others go on


JOBS = {"record": job_record, "train": job_train, "ablate": job_ablate}


def result(out: Path) -> dict[str, bytes]:
    """What a finished job is compared by: every file but locks and provenance (time, seconds)."""
    kept = (path for path in sorted(out.rglob("*")) if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(out)): _content(path) for path in kept if not path.name.endswith(".run.json")}


def _content(path: Path) -> bytes:
    if path.name != "trajectory.json":
        return path.read_bytes()
    values = json.loads(path.read_text())
    for key in ("provenance", "checksum"):  # the time of day is in it
        values.pop(key, None)
    return json.dumps(values, sort_keys=True).encode()


def fresh(folder: Path) -> Path:
    """Return the folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
