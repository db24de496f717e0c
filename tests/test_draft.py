"""Two executors of one recursion: they agree with each other, and with the recursion written out the slow way."""

import dataclasses

import pytest
import torch
from builders import random_batch
from naive import naive_chain

VARIANTS = ("eagle3", "fc_norm", "norm_output", "eagle31")
HEADS = {"gqa": (4, 2), "mha": (4, 4), "mqa": (4, 1)}
REDUCED = tuple(range(3, 60, 3))
WIDTH = 32
BY_START = (
    *("hook_feedback", "hook_normed", "layers.0.hook_resid", "layers.0.hook_attn_out", "layers.0.hook_mlp_out"),
    *("layers.0.self_attn.hook_q", "layers.0.self_attn.hook_out", "layers.0.self_attn.hook_visible"),
)
BY_HEAD_AND_START = tuple(f"layers.0.self_attn.hook_{name}" for name in ("mass", "entropy", "recent"))


def build(make_drafter, variant="eagle31", heads="gqa", reduced=False, **overrides):
    query, kv = HEADS[heads]
    drafter = make_drafter(
        variant,
        draft_vocab=REDUCED if reduced else None,
        num_attention_heads=query,
        num_key_value_heads=kv,
        **overrides,
    )
    for layer in drafter.layers:
        layer.self_attn.recent_windows = (1, 2, 4, 9)
    return drafter


def batch_of(*lengths_and_prompts, **options):
    lengths, prompts = zip(*lengths_and_prompts, strict=True)
    return random_batch(lengths, prompts, width=WIDTH, **options)


def cached_run(drafter, *args, run, **kwargs):
    return drafter.run_with_cache(*args, run=run, **kwargs)


# ---- chain == all_starts(feed="own")


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chain_is_what_all_starts_draft_on_their_own_tokens(make_drafter, variant, heads, reduced):
    from driftlab import all_starts, chain

    drafter = build(make_drafter, variant, heads, reduced)
    batch, depth = batch_of((20, 12), (11, 1), (16, 9)), 4
    draft, everything = cached_run(drafter, batch, depth, feed="own", run=all_starts)
    assert draft.tokens.shape == (3, 10, 4)
    for i in (0, 3, 6):
        assert draft.valid[:, i].all()
        tokens, one = cached_run(drafter, batch, draft.rows[:, i], depth, run=chain)
        assert torch.equal(tokens, draft.tokens[:, i])
        for k in range(1, depth + 1):
            for name in BY_START:
                close(one[name, k], everything[name, k][:, i : i + 1], name)
            for name in BY_HEAD_AND_START:
                close(one[name, k], everything[name, k][:, :, i : i + 1], name)
    assert len(draft.tokens.unique()) > 4


def close(ours, theirs, name, rtol=2e-5, atol=2e-5):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def test_two_layers_agree_too(make_drafter):
    from driftlab import all_starts, chain

    drafter = build(make_drafter, num_hidden_layers=2)
    batch = batch_of((14, 8), (9, 1))
    draft, everything = cached_run(drafter, batch, 4, feed="own", run=all_starts)
    for i in range(6):
        tokens, one = cached_run(drafter, batch, draft.rows[:, i], 4, run=chain)
        assert torch.equal(tokens, draft.tokens[:, i])
        for k in range(1, 5):
            close(one["hook_feedback", k], everything["hook_feedback", k][:, i : i + 1], k)
            mass = "layers.1.self_attn.hook_mass"
            close(one[mass, k], everything[mass, k][:, :, i : i + 1], mass)


# ---- against the naive recursion


def followed(drafter, batch, depth, feed):
    """Every depth's (tokens, state, cache) of the package, in float64."""
    from driftlab.draft import greedy_tokens, unroll

    batch = batch.to("cpu", torch.float64)
    steps = []

    def run(drafter):
        for state, drafted in unroll(drafter, batch, depth, feed=feed):
            tokens = greedy_tokens(drafter, state.normed) if drafted is None else drafted
            steps.append((tokens, drafter.logits(state.normed), state.normed, state.feedback))

    with torch.no_grad():
        _, cache = drafter.run_with_cache(run=run)
    return steps, cache


@pytest.mark.parametrize("feed", ["text", "own"])
@pytest.mark.parametrize(
    ("variant", "heads", "reduced", "num_layers"),
    [
        ("eagle3", "gqa", False, 1),
        ("fc_norm", "mha", True, 1),
        ("norm_output", "mqa", False, 1),
        ("eagle31", "gqa", True, 1),
        ("eagle31", "gqa", False, 2),
        ("eagle3", "gqa", True, 2),
    ],
)
def test_every_depth_up_to_8_is_the_naive_recursion_in_float64(make_drafter, variant, heads, reduced, num_layers, feed):
    drafter = build(make_drafter, variant, heads, reduced, num_hidden_layers=num_layers).double()
    batch, depth = batch_of((14, 5), (12, 1)), 8
    steps, cache = followed(drafter, batch, depth, feed)
    starts = batch.starts
    for b in range(2):
        tokens, length = batch.tokens[b], int(batch.lengths[b])
        for i in range(0, int(starts.valid[b].sum()), 2):
            row = int(starts.rows[b, i])
            fed = [int(tokens[min(row + k + 1, length - 1)]) for k in range(1, depth)]
            expected = naive_chain(drafter, tokens, batch.aux[b], row, depth, None if feed == "own" else [*fed, 0])
            for k, step in enumerate(expected, 1):
                token, logits, normed, feedback = (value[b, i] for value in steps[k - 1])
                assert int(token) == step["token"]
                close(logits, step["logits"], f"logits {k}", rtol=0, atol=1e-9)
                close(normed, step["normed"], f"normed {k}", rtol=0, atol=1e-9)
                close(feedback, step["feedback"], f"feedback {k}", rtol=0, atol=1e-9)
                for layer, by_head in enumerate(step["weights"]):
                    mass = cache[f"layers.{layer}.self_attn.hook_mass", k]
                    index = row if layer < num_layers - 1 and k == 1 else i
                    own = torch.stack([p[row + 1 :].sum() for p in by_head])
                    close(mass[b, :, index, 3], own, f"self {k}", rtol=0, atol=1e-9)


def test_training_gets_the_same_states_and_gradients_through_the_feedback(make_drafter):
    """unroll() outside no_grad: depth 3 depends on the fusion through two feedbacks."""
    from driftlab.draft import unroll

    drafter = build(make_drafter)
    for state, tokens in unroll(drafter, batch_of((12, 4)), 3, feed="text"):
        assert tokens is None
        (gradient,) = torch.autograd.grad(state.normed.sum(), drafter.fc.weight, retain_graph=True)
        assert (gradient != 0).any()


# ---- feeds


@pytest.mark.parametrize("variant", ["eagle3", "eagle31"])
def test_greedy_accept_lengths_are_the_same_under_both_feeds(make_drafter, variant):
    """The text is made of the drafter's own chains with a few wrong tokens, so that all accept lengths occur."""
    from driftlab import all_starts

    drafter = build(make_drafter, variant)
    batch, depth = batch_of((30, 6), (26, 4)), 4
    texts = agreeing(drafter, batch)
    accepted = {}
    for feed in ("text", "own"):
        draft = all_starts(drafter, texts, depth, feed=feed)
        wanted = draft.rows[..., None] + torch.arange(2, depth + 2)
        inside = wanted < texts.lengths[:, None, None]
        match = draft.tokens == texts.tokens[:, None].expand(-1, wanted.shape[1], -1).gather(2, wanted.clamp(max=29))
        accepted[feed] = (match & inside).cumprod(-1).sum(-1)[draft.valid]
        if feed == "text":
            by_text = draft.tokens
    assert torch.equal(accepted["text"], accepted["own"])
    assert set(accepted["text"].tolist()) == set(range(depth + 1))
    assert not torch.equal(by_text, draft.tokens)


def agreeing(drafter, batch):
    """Write the chain of every fifth row into the answers: none of its tokens, the first, ..., all four, in turn."""
    import dataclasses

    from driftlab import chain

    for index in range(4):
        rows = batch.prompt_lengths - 1 + 5 * index
        drafts, tokens = chain(drafter, batch, rows, 4), batch.tokens.clone()
        for b, row in enumerate(rows.tolist()):
            count = (index + 3 * b + 3) % 5
            tokens[b, row + 2 : row + 2 + count] = drafts[b, :count]
        batch = dataclasses.replace(batch, tokens=tokens)
    return batch


def test_text_is_fed_one_token_further_at_each_depth_and_the_last_one_past_the_end(make_drafter):
    from driftlab import all_starts

    drafter, batch = build(make_drafter), batch_of((9, 6), (7, 6))
    fed = []
    original = drafter.next
    drafter.next = lambda state, tokens: fed.append(tokens.tolist()) or original(state, tokens)
    all_starts(drafter, batch, 3, feed="text")
    first, second = batch.tokens.tolist()
    assert [by_depth[0] for by_depth in fed] == [[first[7], first[8], first[8]], [first[8], first[8], first[8]]]
    assert [by_depth[1][0] for by_depth in fed] == [second[6], second[6]]


# ---- positions, pairing, and pieces


def spied_positions(drafter):
    seen = []
    rotary = drafter.layers[0].self_attn.rotary
    original = rotary.forward
    rotary.forward = lambda x, positions: seen.append(positions.tolist()) or original(x, positions)
    return seen


def test_positions_are_0_to_n_minus_1_then_n_n_plus_1(make_drafter):
    """A prompt of 7 tokens and the first answer token: rows 0..6; the first drafted token comes at 7 (sglang#25015)."""
    from driftlab import chain

    drafter = build(make_drafter)
    seen = spied_positions(drafter)
    chain(drafter, batch_of((8, 7)), [6], 4)
    assert seen == [[[0, 1, 2, 3, 4, 5, 6]], [[6]], [[7]], [[7]], [[8]], [[8]], [[9]], [[9]]]


def test_all_starts_have_the_same_positions(make_drafter):
    from driftlab import all_starts

    drafter = build(make_drafter)
    seen = spied_positions(drafter)
    all_starts(drafter, batch_of((6, 4)), 3)
    assert seen == [[[0, 1, 2, 3, 4]], [[3, 4]], [[4, 5]], [[4, 5]], [[5, 6]], [[5, 6]]]


def test_row_t_pairs_the_state_at_t_with_the_token_after_it(make_drafter):
    """Prompt a b c d, the target emits e: (h_a, b), (h_b, c), (h_c, d), (h_d, e)."""
    from driftlab import all_starts, chain

    drafter, batch = build(make_drafter), batch_of((5, 4))
    for run in (lambda d: all_starts(d, batch, 2), lambda d: chain(d, batch, [3], 2)):
        embedded = []
        original = drafter.embed
        drafter.embed = lambda tokens, seen=embedded, embed=original: seen.append(tokens.tolist()) or embed(tokens)
        _, cache = drafter.run_with_cache(run=run)
        del drafter.embed
        assert embedded[0] == [batch.tokens[0, 1:5].tolist()]
        assert torch.equal(cache["fusion.hook_states", 1], batch.aux[:, :4])


def test_a_prompt_of_one_token(make_drafter):
    from driftlab import all_starts, chain

    drafter = build(make_drafter)
    batch = batch_of((2, 1))
    draft = all_starts(drafter, batch, 3, feed="own")
    assert draft.rows.tolist() == [[0]]
    assert torch.equal(chain(drafter, batch, [0], 3), draft.tokens[:, 0])


@pytest.mark.parametrize("num_layers", [1, 2])
def test_context_in_pieces_is_context_in_one(make_drafter, num_layers):
    """After any history of drafts thrown away, the next draft is that of a fresh prefill with the target's states."""
    from driftlab.draft import Chain

    drafter = build(make_drafter, num_hidden_layers=num_layers)
    batch = batch_of((21, 5))
    tokens, aux = batch.tokens[:, 1:], batch.aux[:, :-1]

    def feedback(session, extend):
        extend()
        tokens, cache = drafter.run_with_cache(run=lambda _: session.draft(4))
        return tokens, torch.cat([cache["hook_feedback", k] for k in (2, 3, 4)], 1)

    grown = Chain(drafter, prompt_lengths=[5])
    for first, last in ((0, 5), (5, 6), (6, 9), (9, 14), (14, 20)):
        piece = feedback(grown, lambda first=first, last=last: grown.extend(tokens[:, first:last], aux[:, first:last]))
        fresh = Chain(drafter, prompt_lengths=[5])
        whole = feedback(fresh, lambda last=last, fresh=fresh: fresh.extend(tokens[:, :last], aux[:, :last]))
        assert torch.equal(piece[0], whole[0])
        close(piece[1], whole[1], "feedback")
        assert grown.rows == last


# ---- batches


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_padded_batch_is_its_sequences_one_by_one(make_drafter, num_layers):
    from driftlab import all_starts

    drafter = build(make_drafter, "eagle3", num_hidden_layers=num_layers)
    shapes = ((20, 12), (11, 1), (16, 15), (9, 3))
    together, whole = cached_run(drafter, batch_of(*shapes), 3, feed="own", run=all_starts)
    for b, (length, prompt) in enumerate(shapes):
        padded = batch_of(*shapes)
        alone = type(padded)(
            tokens=padded.tokens[b : b + 1, :length],
            aux=padded.aux[b : b + 1, :length],
            last_hidden=padded.last_hidden[b : b + 1, :length],
            lse=padded.lse[b : b + 1, :length],
            lengths=padded.lengths[b : b + 1],
            prompt_lengths=padded.prompt_lengths[b : b + 1],
            ids=padded.ids[b : b + 1],
            finish=("length",),
            sinks=padded.sinks,
        )
        single, one = cached_run(drafter, alone, 3, feed="own", run=all_starts)
        count = length - prompt
        assert int(together.valid[b].sum()) == count
        assert torch.equal(together.tokens[b, :count], single.tokens[0])
        assert torch.equal(together.rows[b, :count], single.rows[0])
        for k in (1, 2, 3):
            for name in BY_START:
                if name.startswith("layers.0.") and num_layers == 2 and k == 1:
                    continue  # every row there, not the starts alone
                close(whole[name, k][b, :count], one[name, k][0], name)
            last = f"layers.{num_layers - 1}.self_attn"
            for name in ("mass", "entropy", "recent"):
                close(whole[f"{last}.hook_{name}", k][b, :, :count], one[f"{last}.hook_{name}", k][0], name)


def test_the_size_of_a_batch_does_not_change_the_tokens(make_drafter, tiny_trajectory):
    from driftlab import all_starts

    drafter = build(make_drafter)
    reference = all_starts(drafter, tiny_trajectory, 4, feed="own", max_tokens=10_000)
    assert reference.ids == tuple(entry.id for entry in tiny_trajectory.entries)
    for max_tokens in (1, 80):
        draft = all_starts(drafter, tiny_trajectory, 4, feed="own", max_tokens=max_tokens)
        assert draft.ids == reference.ids
        assert torch.equal(draft.valid, reference.valid)
        for name in ("tokens", "rows"):
            for b in range(4):
                kept = reference.valid[b]
                assert torch.equal(getattr(draft, name)[b, kept], getattr(reference, name)[b, kept])


def test_progress_counts_depths_of_sequences_from_the_start(make_drafter, tiny_trajectory):
    from driftlab import all_starts

    said = []
    all_starts(build(make_drafter), tiny_trajectory, 2, max_tokens=1, progress=lambda *told: said.append(told))
    assert said == [("drafting", done, 8) for done in range(9)]
    said.clear()
    all_starts(build(make_drafter), tiny_trajectory, 3, max_tokens=10**6, progress=lambda *told: said.append(told))
    assert said == [("drafting", done, 12) for done in (0, 4, 8, 12)]  # one batch, and the bar moves within it


def test_logits_of_a_block_of_rows_at_a_time_change_nothing(make_drafter, monkeypatch):
    from driftlab import all_starts, draft

    drafter, batch = build(make_drafter, reduced=True), batch_of((20, 5), (12, 2))
    whole = all_starts(drafter, batch, 3, feed="own")
    monkeypatch.setattr(draft, "LOGIT_BLOCK_BYTES", 3 * 4 * len(REDUCED))
    assert torch.equal(all_starts(drafter, batch, 3, feed="own").tokens, whole.tokens)
    assert set(whole.tokens.flatten().tolist()) <= set(REDUCED)


# ---- what is refused


def test_errors_name_the_rule_and_the_value(make_drafter, tiny_trajectory):
    from driftlab import DriftlabError, all_starts, chain
    from driftlab.draft import Chain

    drafter, batch = build(make_drafter), batch_of((9, 5), (7, 4))
    for depth in (0, -1):
        with pytest.raises(DriftlabError, match=f"depth {depth}"):
            all_starts(drafter, batch, depth)
        with pytest.raises(DriftlabError, match=f"depth {depth}"):
            chain(drafter, batch, [4, 4], depth)
    for rows in ([-1, 3], [4, 6], [8, 5]):
        with pytest.raises(DriftlabError, match=r"0 <= t <= length - 2"):
            chain(drafter, batch, rows, 2)
    with pytest.raises(DriftlabError, match="one row for each of the 2 sequences"):
        chain(drafter, batch, [4], 2)
    chain(drafter, batch, [7, 5], 2)
    session = Chain(drafter, prompt_lengths=[4])
    with pytest.raises(DriftlabError, match=r"extend\(\)"):
        session.draft(2)
    session.extend(batch.tokens[:1, 1:5], batch.aux[:1, :4])
    session.draft(2)
    with pytest.raises(DriftlabError, match=r"extend\(\)"):
        session.draft(2)


def test_states_that_the_drafter_does_not_read_are_refused(make_drafter, tiny_trajectory):
    from driftlab import DriftlabError, all_starts, chain

    other = make_drafter(aux_layers=(1, 3, 4))
    with pytest.raises(DriftlabError, match=r"\[1, 3, 4\].*\[1, 3, 5\].*aux_layers=\[1, 3, 4\]"):
        all_starts(other, tiny_trajectory, 2)
    wider = random_batch((9,), (5,), width=48)
    fewer = random_batch((9,), (5,), width=WIDTH, aux=2)
    for batch, told in ((wider, "3 of width 48"), (fewer, "2 of width 32")):
        for run in (lambda batch=batch: all_starts(other, batch, 2), lambda batch=batch: chain(other, batch, [4], 2)):
            with pytest.raises(DriftlabError, match=told):
                run()


def test_of_a_recording_with_more_states_the_drafter_reads_its_own(make_drafter):
    from driftlab import all_starts, chain

    drafter = make_drafter(aux_layers=(1, 4))
    more = dataclasses.replace(random_batch((9, 7), (5, 3), width=WIDTH), aux_layers=(1, 3, 4))
    just = dataclasses.replace(more, aux=more.aux[:, :, [0, 2]], aux_layers=(1, 4))
    for run in (lambda b: all_starts(drafter, b, 3).tokens, lambda b: chain(drafter, b, [4, 4], 3)):
        assert torch.equal(run(more), run(just))


def test_without_aux_layers_the_final_state_is_read(make_drafter):
    from driftlab import all_starts, chain

    drafter = make_drafter(aux_layers=(), fc_norm=False)
    batch = random_batch((9, 7), (5, 3), width=WIDTH)
    other_aux = dataclasses.replace(batch, aux=batch.aux * 2)
    random = torch.randn(batch.last_hidden.shape, generator=torch.Generator().manual_seed(3))
    other_last = dataclasses.replace(batch, last_hidden=random)
    for run in (lambda b: all_starts(drafter, b, 3, feed="own").tokens, lambda b: chain(drafter, b, [4, 4], 3)):
        assert torch.equal(run(batch), run(other_aux))
        assert not torch.equal(run(batch), run(other_last))


def test_no_sequence_is_an_error(tiny_trajectory, make_drafter):
    from driftlab import DriftlabError, all_starts

    with pytest.raises(DriftlabError, match="no sequence"):
        all_starts(make_drafter("eagle3"), tiny_trajectory.subset([]), 2)


def test_a_feed_that_does_not_exist_is_refused(tiny_trajectory, make_drafter):
    """It used to run as text feed, under its own name. (Here the import hook may refuse it first, by its annotation.)"""
    from driftlab import all_starts

    with pytest.raises(Exception, match="self"):
        all_starts(make_drafter(), tiny_trajectory, 2, feed="self")


def test_a_state_that_is_not_finite_is_no_draft(tiny_trajectory, make_drafter):
    """Its arg max is a token, and its tau 1.0: a number that looks right."""
    from driftlab import DriftlabError, all_starts, chain

    drafter = make_drafter("eagle31")
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    name = tiny_trajectory.entries[0].id
    with pytest.raises(
        DriftlabError, match=f"not finite: sequence '{name}', row {tiny_trajectory.entries[0].prompt_length - 1}"
    ):
        all_starts(drafter, tiny_trajectory, 2)
    with pytest.raises(DriftlabError, match="not finite"):
        chain(drafter, tiny_trajectory.batch([0]), [12], 2)


def test_a_batch_of_other_layers_is_refused_too(tiny_trajectory, make_drafter):
    from driftlab import DriftlabError, all_starts

    drafter = make_drafter("eagle3", aux_layers=(0, 2, 6))
    with pytest.raises(DriftlabError, match="reads target states"):
        all_starts(drafter, tiny_trajectory.batch([0]), 2)
