r"""One draft step of an EAGLE-3 drafter in six launches, K steps in one CUDA graph: the latency path.

    1 qkv       embedding, both input norms, q, k, v, rotary, append to the cache      4 gate_up   norm, gate, up, SwiGLU
    2 decode    attention over [context | own keys], probes                            5 project   down + residual
    3 project   o_proj + residual                                                      6 head      final norm, logits, token

Weights are read where the module keeps them. Positions and tokens stay in device memory, grids are fixed, so the launches of a
whole chain are captured once and replayed. On a CPU the same launches run one by one in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftlab.errors import DriftlabError

MOST = 16
"""sequences at most: more rows are a matter for a matrix product"""
SPLITS = 16
"""programs that share the keys of one kv head"""
WARPS = 4
"""of every kernel of the step"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """Tiles of a matrix-vector kernel: BM rows of the batch, BN of the weights, BK columns; DOT: see matvec_kernels."""

    BM: int
    BN: int
    BK: int
    NST: int
    DOT: bool

    def upto(self, columns: int) -> Tiles:
        """Return tiles no wider than a weight is."""
        return Tiles(self.BM, self.BN, min(self.BK, max(16, power_of_two(columns))), self.NST, self.DOT)


def tiles_of(batch: int) -> Tiles:
    """Return the tiles for a batch: CUDA cores up to 4 rows, tensor cores with the weights on the M side beyond."""
    if batch > 4:
        return Tiles(16, 64, 128, 4, True)
    return {1: Tiles(1, 8, 512, 4, False), 2: Tiles(2, 8, 256, 4, False)}.get(batch, Tiles(4, 8, 128, 5, False))


def gate_up_tiles(batch: int) -> Tiles:
    """Return the tiles for the kernel that streams two weights at a time."""
    tiles = tiles_of(batch)
    return Tiles(tiles.BM, 64, 64, 4, True) if tiles.DOT else Tiles(tiles.BM, 4, tiles.BK, tiles.NST, False)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def refuses(drafter: Any) -> str:
    """Return why the step kernels cannot stand for a drafter, or nothing if they can."""
    config = drafter.config
    block = drafter.layers[0].self_attn
    controls = block.controls
    neutral = controls.bias is None and controls.drop is None
    scaling = config.rope_scaling
    reasons = {
        "an MTP head's step is not EAGLE-3's": config.architecture != "eagle3",
        f"it has {config.num_hidden_layers} layers, the kernels one": config.num_hidden_layers != 1,
        "latent attention": config.latent is not None,
        "a norm on each query and key (qk_norm)": config.qk_norm,
        "a gate on the attention's output": config.attention_gate,
        "a mixture of experts": config.experts is not None,
        "its hidden input is normed twice (twice_normed)": config.twice_normed,
        "rotary embedding turns interleaved pairs": config.rope_interleaved,
        "rotary embedding turns a part of each head": config.rope_width != config.head_dim,
        "dynamic rotary scaling depends on the length": scaling is not None and scaling.kind == "dynamic",
        "interventions on the attention are set": not neutral or not _is_one(controls.score_scale) or block.steering,
        f"its dtype is {drafter.dtype}": drafter.dtype not in DTYPES,
    }
    return "; ".join(words for words, holds in reasons.items() if holds)


def _is_one(value: Tensor | float) -> bool:
    return not isinstance(value, Tensor) and value == 1


@dataclass(frozen=True)
class Drafted:
    """What a chain drafted. Tensors are views of buffers that the next ``draft`` writes again.

    ``tokens [batch depth]``: target ids; ``logits_max``, ``lse [batch depth]`` over the draft vocabulary; ``logits [batch depth
    draft_vocab]`` float32, of tokens drawn by chance; ``normed``,
    ``feedback [batch depth d_model]``; of depths >= 2: ``resid [batch depth-1 d_model]``, ``q [batch head depth-1 d_head]``
    and, with probes, ``mass [batch head depth-1 seg]``, ``entropy`` (nats), ``attention_lse [batch head depth-1]``.
    """

    tokens: Tensor
    logits_max: Tensor
    lse: Tensor
    logits: Tensor | None
    normed: Tensor
    feedback: Tensor
    resid: Tensor
    q: Tensor
    mass: Tensor | None
    entropy: Tensor | None
    attention_lse: Tensor | None


class StepKernels:
    """Chains of up to ``depth`` tokens for ``batch`` sequences whose keys fit in ``capacity`` places.

    Buffers and graphs belong to the object. Weights stay the drafter's: a change of their values is seen, and where they were
    moved the graph is captured again.

    Raises:
        DriftlabError: a drafter that the kernels refuse, or sizes that they have not.
    """

    def __init__(self, drafter: Any, batch: int, capacity: int, depth: int, *, probes: bool) -> None:
        reason = refuses(drafter)
        if reason:
            raise DriftlabError(f'the step kernels cannot draft with this drafter: {reason}. Use backend="torch"')
        if not 1 <= batch <= MOST or depth < 1 or capacity < depth:
            raise DriftlabError(
                f"step kernels for batch {batch}, capacity {capacity}, depth {depth}: batch is 1..{MOST}, depth at least 1, "
                "capacity holds the context and the chain's own keys"
            )
        self.drafter, self.batch, self.capacity, self.depth, self.probes = drafter, batch, capacity, depth, probes
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._captured: tuple[int, ...] = ()
        with torch.inference_mode(False):  # buffers made inside could not be written outside
            self._allocate()

    def _allocate(self) -> None:
        config, device, dtype = self.drafter.config, self.drafter.device, self.drafter.dtype
        heads, kv_heads, d_head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        batch, depth, width = self.batch, self.depth, config.hidden_size

        def states(*shape: int) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        self.k_cache, self.v_cache = (states(batch, kv_heads, self.capacity, d_head) for _ in range(2))
        self.segments = numbers(batch, self.capacity, dtype=torch.int32)
        self.rows = numbers(batch, dtype=torch.int64)
        self.tokens = numbers(depth, batch, dtype=torch.int64)
        self.normed, self.resid = states(depth, batch, width), states(depth, batch, width)
        self.q = states(depth, batch, heads, d_head)
        self.attended = states(batch, heads * d_head)
        self.prenormed, self.stream = states(batch, width), states(batch, width)
        self.inner = states(batch, config.intermediate_size)
        self.mass = numbers(depth, batch, heads, 4)
        self.entropy, self.attention_lse = numbers(depth, batch, heads), numbers(depth, batch, heads)
        self.parts = {name: numbers(batch, heads, SPLITS) for name in ("p_max", "p_sum", "p_cross")}
        self.parts |= {"p_mass": numbers(batch, heads, SPLITS, 4), "p_out": numbers(batch, heads, SPLITS, d_head)}
        self.parts["count"] = torch.zeros(batch * kv_heads, device=device, dtype=torch.int32)
        blocks = -(-config.draft_vocab_size // tiles_of(batch).BN)
        self.head_parts = {name: numbers(batch, blocks) for name in ("p_max", "p_sum", "p_warm")}
        self.head_parts["p_arg"] = numbers(batch, blocks, dtype=torch.int32)
        self.head_parts["count"] = torch.zeros(1, device=device, dtype=torch.int32)
        self.logits: Tensor | None = None  # [depth batch draft_vocab], made by the first chain that is drawn by chance
        self.logits_max, self.lse = numbers(depth, batch), numbers(depth, batch)
        self.uniforms, self.temperature = numbers(depth, batch), numbers(1)
        self.cos, self.sin = turning_tables(self.drafter, self.capacity)

    @torch.no_grad()
    def draft(
        self,
        kv: Any,
        feedback: Tensor,
        normed: Tensor,
        rows: Tensor,
        segments: Tensor,
        depth: int,
        *,
        uniforms: Tensor | None = None,
        temperature: float = 0.0,
    ) -> Drafted:
        """Draft ``depth`` tokens from the state after depth 1.

        Args:
            kv: the layer's keys and values after depth 1, ``k``, ``v`` [batch kv_head ctx d_head].
            feedback, normed: that state, [batch d_model].
            rows: [batch], absolute row that each chain starts from; context keys beyond it are not seen.
            segments: [batch ctx].
            depth: up to the object's own.
            uniforms: [batch depth] in [0, 1), what a ``temperature`` above 0 draws with.
            temperature: 0 takes the arg max.
        """
        context = kv.k.shape[2]
        self._check(context, feedback, rows, depth, uniforms, temperature)
        self.k_cache[:, :, :context].copy_(kv.k)
        self.v_cache[:, :, :context].copy_(kv.v)
        self.segments[:, :context].copy_(segments)
        self.rows.copy_(rows)
        self.normed[0].copy_(normed)
        if not self.drafter.config.norm_output:
            self.resid[0].copy_(feedback)
        sample = temperature > 0
        if sample:
            if self.logits is None:
                shape = (self.depth, self.batch, self.drafter.config.draft_vocab_size)
                with torch.inference_mode(False):
                    self.logits = torch.empty(shape, device=self.drafter.device, dtype=torch.float32)
            # a number just below 1 becomes 1 in float32, where the last token would be taken whatever its share
            self.uniforms[:depth].copy_(uniforms.T).clamp_(max=1 - 2**-24)
            self.temperature.fill_(temperature)
        self._run(depth, sample)
        return self._drafted(depth, sample)

    def _check(
        self, context: int, feedback: Tensor, rows: Tensor, depth: int, uniforms: Tensor | None, temperature: float
    ) -> None:
        if not 1 <= depth <= self.depth:
            raise DriftlabError(f"depth {depth}: these step kernels were made for 1..{self.depth}")
        if len(feedback) != self.batch or len(rows) != self.batch:
            raise DriftlabError(f"{len(feedback)} states, {len(rows)} rows: these step kernels are for {self.batch}")
        # rows are below the context's length, so the last own key is at most here; to ask for the largest row would wait
        if context + depth - 1 > self.capacity:
            raise DriftlabError(
                f"{context} context keys and a depth of {depth} do not fit in the step kernels' capacity of {self.capacity}: "
                "make them with a larger one"
            )
        if temperature < 0 or (temperature > 0 and uniforms is None):
            raise DriftlabError(
                f"temperature {temperature}: at least 0, and above 0 it draws with uniforms [batch depth]"
            )

    def _drafted(self, depth: int, sample: bool) -> Drafted:
        feedback = self.normed if self.drafter.config.norm_output else self.resid

        def deeper(x: Tensor) -> Tensor | None:
            return x[1:depth].movedim(0, 2) if self.probes else None

        return Drafted(
            tokens=self.tokens[:depth].T,
            logits_max=self.logits_max[:depth].T,
            lse=self.lse[:depth].T,
            logits=self.logits[:depth].transpose(0, 1) if sample else None,
            normed=self.normed[:depth].transpose(0, 1),
            feedback=feedback[:depth].transpose(0, 1),
            resid=self.resid[1:depth].transpose(0, 1),
            q=self.q[1:depth].movedim(0, 2),
            mass=deeper(self.mass),
            entropy=deeper(self.entropy),
            attention_lse=deeper(self.attention_lse),
        )

    def _run(self, depth: int, sample: bool) -> None:
        if self.drafter.device.type != "cuda":
            self._launch(depth, sample)
            return
        here = tuple(x.data_ptr() for x in (*self.drafter.parameters(), *self.drafter.buffers()))
        if here != self._captured:
            self._graphs, self._captured = {}, here
        with torch.cuda.device(self.drafter.device):
            if (depth, sample) not in self._graphs:
                self._graphs[depth, sample] = _capture(lambda: self._launch(depth, sample))
            self._graphs[depth, sample].replay()

    def _launch(self, depth: int, sample: bool) -> None:
        self._head(0, sample)
        for step in range(1, depth):
            self._layer(step)
            self._head(step, sample)

    def _layer(self, step: int) -> None:
        from driftlab.kernels import chain_kernels as kernels

        config, layer = self.drafter.config, self.drafter.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        batch, width, inner = self.batch, config.hidden_size, config.intermediate_size
        heads, kv_heads, d_head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        norms = {"EPS": config.rms_norm_eps, "PLUS_ONE": config.norm_plus_one}
        tiles = tiles_of(batch)
        pairs = tiles.BN // 2
        feedback = (self.normed if config.norm_output else self.resid)[step - 1]
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        kernels.qkv_kernel[((heads + 2 * kv_heads) * -(-d_head // 2 // pairs),)](
            self.tokens[step - 1], self.drafter.embed_tokens.weight, feedback, self.rows,
            *(p.weight for p in projections), *(_bias(p) for p in projections),
            layer.input_layernorm.weight, layer.hidden_norm.weight, self.cos, self.sin, self.q[step], self.k_cache,
            self.v_cache, self.prenormed, step, self.capacity, B=batch, D=width, H=heads, KVH=kv_heads, HD=d_head,
            BIAS=config.attention_bias, STORE=config.norm_before_residual, **norms, **vars(tiles.upto(width)), num_warps=WARPS,
        )  # fmt: skip
        kernels.decode_kernel[(batch * kv_heads, SPLITS)](
            self.q[step], self.k_cache, self.v_cache, self.rows, self.segments, self.attended, self.mass[step],
            self.entropy[step], self.attention_lse[step], *(self.parts[name] for name in PARTS), step, self.capacity,
            H=heads, KVH=kv_heads, HD=d_head, SCALE=attention.scale, WINDOW=attention.window, PROBES=self.probes,
            SPLITS=SPLITS, **decode_tiles(heads // kv_heads, d_head), num_warps=WARPS,
        )  # fmt: skip
        self._project(
            self.attended, attention.o_proj, self.prenormed if config.norm_before_residual else feedback, self.stream
        )
        wide = gate_up_tiles(batch).upto(width)
        kernels.gate_up_kernel[(-(-inner // wide.BN),)](
            self.stream, layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight,
            _bias(mlp.gate_proj), _bias(mlp.up_proj), self.inner, B=batch, N=inner, K=width, BIAS=config.mlp_bias,
            **norms, **vars(wide), num_warps=WARPS,
        )  # fmt: skip
        self._project(self.inner, mlp.down_proj, self.stream, self.resid[step])

    def _project(self, x: Tensor, linear: nn.Linear, residual: Tensor, y: Tensor) -> None:
        from driftlab.kernels import chain_kernels as kernels

        rows, columns = linear.weight.shape
        tiles = tiles_of(self.batch).upto(columns)
        kernels.project_kernel[(-(-rows // tiles.BN),)](
            x, linear.weight, _bias(linear), residual, y, B=self.batch, N=rows, K=columns, BIAS=linear.bias is not None,
            **vars(tiles), num_warps=WARPS,
        )  # fmt: skip

    def _head(self, step: int, sample: bool) -> None:
        """Depth 1 reads the normed state as it is; deeper ones norm the residual stream and store it."""
        from driftlab.kernels import chain_kernels as kernels

        drafter, config = self.drafter, self.drafter.config
        weight, vocab = drafter.lm_head.weight, config.draft_vocab_size
        deeper, normed, tiles = step > 0, self.normed[step], tiles_of(self.batch)
        gain = drafter.norm.weight if config.head_norm else normed
        blocks = -(-vocab // tiles.BN)
        kernels.head_kernel[(blocks,)](
            self.resid[step] if deeper else normed, gain, weight, normed, self.logits[step] if sample else self.lse,
            *(self.head_parts[name] for name in HEAD_PARTS), drafter.d2t if drafter.reduced else self.tokens,
            self.uniforms[step], self.temperature, self.tokens[step], self.logits_max[step], self.lse[step],
            B=self.batch, BLOCKS=blocks, BB=power_of_two(blocks), V=vocab, D=config.hidden_size, EPS=config.rms_norm_eps,
            PLUS_ONE=config.norm_plus_one, NORM=deeper and config.head_norm, STORE=deeper, REDUCED=drafter.reduced,
            LOGIT_SCALE=config.logit_scale, SAMPLE=sample, **vars(tiles.upto(config.hidden_size)), num_warps=WARPS,
        )  # fmt: skip


PARTS = ("p_max", "p_sum", "p_cross", "p_mass", "p_out", "count")
HEAD_PARTS = ("p_max", "p_arg", "p_sum", "p_warm", "count")


def decode_tiles(group: int, d_head: int) -> dict[str, int]:
    """Return the tiles of the attention kernel: a group of query heads padded to the rows of a tensor-core product."""
    return {"BD": max(16, power_of_two(d_head)), "BG": max(16, power_of_two(group)), "BC": 32, "NST": 3}


def turning_tables(drafter: Any, capacity: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [capacity, d_head / 2] as the module rounds them: float64 angles, then the drafter's dtype."""
    rotary = drafter.layers[0].self_attn.rotary
    angle = torch.arange(capacity, device=drafter.device)[:, None] * rotary._frequencies(drafter.device)
    factor = 1.0 if rotary.scaling is None else rotary.scaling.rotation_factor
    return (angle.cos() * factor).to(drafter.dtype), (angle.sin() * factor).to(drafter.dtype)


@torch.no_grad()
def fuse(drafter: Any, aux: Tensor) -> Tensor:
    """Project captured states [batch row aux d_target] to [batch row d_model], as ``Drafter.fuse`` does, up to 16 rows in all.

    More rows, a drafter without fc, or one with a norm over all states at once: the module itself.
    """
    from driftlab.kernels import chain_kernels as kernels

    config = drafter.config
    batch, rows = aux.shape[:2]
    if not 0 < batch * rows <= MOST or not config.aux_layers or config.norm_before_fc or drafter.dtype not in DTYPES:
        return drafter.fuse(aux)
    states = aux.to(drafter.dtype).contiguous()
    fused = states.new_empty(batch, rows, config.hidden_size)
    gain = torch.stack([norm.weight for norm in drafter.fc_norm]) if config.fc_norm else states
    tiles = tiles_of(batch * rows).upto(config.target_hidden_size)
    kernels.fuse_kernel[(-(-config.hidden_size // tiles.BN),)](
        states, gain, drafter.fc.weight, _bias(drafter.fc), fused, B=batch * rows, N=config.hidden_size,
        K=config.target_hidden_size, AUX=states.shape[2], EPS=config.rms_norm_eps, PLUS_ONE=config.norm_plus_one,
        NORM=config.fc_norm, BIAS=config.fc_bias, **vars(tiles), num_warps=WARPS,
    )  # fmt: skip
    return fused


def _bias(linear: nn.Linear) -> Tensor:
    """Return the bias, or in its place a tensor that the kernel is told not to read."""
    return linear.weight if linear.bias is None else linear.bias


def _capture(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record launches into a graph; they run once before, which compiles the kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph
