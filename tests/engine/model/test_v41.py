"""V4.1's own parts, where no golden tensor reaches: identities they must satisfy (model.md 6.3)."""

from __future__ import annotations

import copy

import pytest
import torch

from engine.kernels import reference as ops
from engine.model import v4
from engine.model.checkpoint import load_model
from engine.model.v4 import Model
from tests.engine.model import build
from tests.engine.model.drive import Request, make_pool, run, step, tokens

IDS = tokens(60, 7)


def _load(path, config, tensors=None):
    return load_model(build.write(path, config, tensors=tensors))


def _equal(a, b, tolerance=2e-5):
    return bool((a - b).abs().max() <= tolerance)


def test_engram_without_wkv_is_the_identity(tmp_path):
    """Keys and values of zero add nothing; with any wkv the tables matter."""
    config = build.v41()
    tensors = build.random_tensors(config)
    with_tables = run(_load(tmp_path / "a", config, tensors), IDS)
    for name in tensors:
        if name.endswith("engram.wkv.weight"):
            tensors[name] = torch.zeros_like(tensors[name])
    silent = run(_load(tmp_path / "b", config, tensors), IDS)
    plain = build.v41(engram_layer_ids=[])
    rest = {name: t for name, t in tensors.items() if ".engram." not in name}

    assert _equal(silent, run(_load(tmp_path / "c", plain, rest), IDS), 0.0)
    assert not _equal(silent, with_tables, 1e-2)


def _captured(monkeypatch):
    """Record every candidate mask and every choice, per call."""
    masks, choices = [], []
    original_mask, original_choice = ops.candidate_entries, ops.select_entries

    def candidate_entries(scores, counts, group, k):
        mask = original_mask(scores, counts, group, k)
        masks.append((mask, counts))
        choices.pop()  # the choice among groups, made inside
        return mask

    def select_entries(scores, k):
        choice = original_choice(scores, k)
        choices.append((scores, choice))
        return choice

    monkeypatch.setattr(ops, "candidate_entries", candidate_entries)
    monkeypatch.setattr(ops, "select_entries", select_entries)
    return masks, choices


def test_candidates_limit_the_later_choices(tmp_path, monkeypatch):
    """Layers above the candidate source choose inside its groups; the newest group is among them."""
    model = _load(tmp_path, build.v41())
    masks, choices = _captured(monkeypatch)
    run(model, IDS, [50] + [1] * 10)

    assert len(masks) == 11  # one prefill block, ten decode steps
    layers = [i for i, layer in enumerate(model.config.layers) if layer.owns_index]
    reading = [i for i in layers if model.config.layers[i].reads_candidates]
    limited = 0
    for n, (mask, counts) in enumerate(masks):
        assert mask.gather(1, counts[:, None] - 1).all()
        assert (mask.sum(1) <= 8).all()  # four groups of two
        made = choices[n * len(layers) : (n + 1) * len(layers)]
        for scores, (chosen, real) in made[-len(reading) :]:
            assert mask.gather(1, chosen)[real].all()
            assert torch.isneginf(scores[~mask]).all()
            limited += int((~mask).sum())
    assert limited > 1000


def test_enough_candidate_groups_change_nothing(tmp_path):
    """With as many groups kept as there are, the model equals one without candidates."""
    few = build.v41()
    tensors = build.random_tensors(few)
    many = build.v41(candidate_topk_blocks=len(IDS))
    none = build.v41(candidate_source_layer_id=None)
    limited, unlimited, without = (
        run(_load(tmp_path / name, config, tensors), IDS, [40] + [1] * 20)
        for name, config in (("few", few), ("many", many), ("none", none))
    )

    assert _equal(unlimited, without, 0.0)
    assert not _equal(limited, without, 1e-3)


def test_a_ratio_1_entry_is_a_normed_rotated_projection(tmp_path):
    """With the compressor's weights tied to the window's, entries equal window keys."""
    config = build.v41()
    tensors = build.random_tensors(config)
    tensors["layers.4.attn.compressor.wkv.weight"] = tensors["layers.4.attn.wkv.weight"]
    tensors["layers.4.attn.compressor.norm.weight"] = tensors["layers.4.attn.kv_norm.weight"]
    model = _load(tmp_path, config, tensors)
    pool = make_pool(model)
    run(model, IDS, [13, 1, 1, 45], pool=pool)
    width = config["text_config"]["sliding_window"]
    entries = pool.entries[4].flatten(0, 1)[16:][: len(IDS)]  # blocks 1.. in order
    positions = torch.arange(len(IDS) - width, len(IDS))

    assert _equal(pool.window[4][1][positions % width], entries[positions], 1e-5)


def test_a_routing_bias_for_images_that_equals_the_other_has_no_effect(tmp_path):
    """bias_vl = bias: image tokens are routed like text; another bias_vl routes them elsewhere."""
    config = build.v41(image=True, engram_layer_ids=[])
    tensors = build.random_tensors(config)
    ids = [*IDS[:20], *[5] * 10, *IDS[20:30]]
    different = run(_load(tmp_path / "a", config, tensors), ids)
    for name in list(tensors):
        if name.endswith("gate.bias_vl"):
            tensors[name] = tensors[name.removesuffix("_vl")].clone()
    same = run(_load(tmp_path / "b", config, tensors), ids)
    blind = run(_load(tmp_path / "c", build.v41(engram_layer_ids=[]), tensors), ids)

    assert _equal(same, blind, 0.0)
    assert _equal(different[:20], blind[:20])
    assert not _equal(different[20:], blind[20:], 1e-3)


def test_image_tokens_take_nothing_from_engram(tmp_path):
    """The tables change what follows text, and pass image tokens by."""
    config = build.v41(
        image=True,
        engram_layer_ids=[0],
        num_hidden_layers=2,
        compress_ratios=[0, 0, 0, 0],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
        dspark_target_layer_ids=[0],
    )
    tensors = build.random_tensors(config)
    model = _load(tmp_path / "a", config, tensors)
    tensors = tensors | {n: t * 2 for n, t in tensors.items() if n.endswith("engram.wkv.weight")}
    louder = _load(tmp_path / "b", config, tensors)
    ids = [5, 5, 7, 8]
    first, second = run(model, ids), run(louder, ids)

    assert _equal(first[:2], second[:2], 0.0)
    assert not _equal(first[2:], second[2:], 1e-3)


def _swap(monkeypatch, layer_index, change):
    """Change something for the attention of one layer, and drop what the step had cached of it."""
    original = Model._attend

    def attend(model, layer, sink, q, k, step):
        if layer.index != layer_index:
            return original(model, layer, sink, q, k, step)
        caches = (step.decode_keys, step.span_entries, step.block_masks)
        undo = change(step)
        for cache in caches:
            cache.clear()
        o = original(model, layer, sink, q, k, step)
        undo()
        for cache in caches:
            cache.clear()
        return o

    monkeypatch.setattr(Model, "_attend", attend)


@pytest.mark.parametrize("tail", [1, 3], ids=["decode", "prefill"])
def test_each_layer_reads_the_entries_and_the_choice_of_its_source_only(
    tmp_path, monkeypatch, tail
):
    """Changing a source's entries (or choice) for one layer matters iff that is the layer's source."""
    model = _load(tmp_path, build.v41())
    layers = model.config.layers
    head = IDS[: 60 - tail]

    before = make_pool(model)
    step(model, before, [(Request(IDS), len(head))])

    def last_logits():
        request = Request(IDS, done=len(head))
        return step(model, copy.deepcopy(before), [(request, tail)])

    def entries_of(source):
        def change(state):
            saved = state.pool.entries[source].clone()
            state.pool.entries[source].mul_(1.5)
            return lambda: state.pool.entries[source].copy_(saved)

        return change

    def choice_of(source):
        def change(state):
            chosen = dict(state.decode_choice), dict(state.block_choice)
            if source in state.decode_choice:
                entries, real = state.decode_choice[source]
                state.decode_choice[source] = entries * 0, real
            for key, mask in chosen[1].items():
                if key[0] == source:
                    state.block_choice[key] = mask.roll(-1, 1)

            def undo():
                state.decode_choice.update(chosen[0])
                state.block_choice.update(chosen[1])

            return undo

        return change

    want = last_logits()
    kinds = (("kv_source", entries_of), ("index_source", choice_of))
    for kind, change in kinds:
        sources = sorted({getattr(layer, kind) for layer in layers} - {None})
        assert len(sources) >= 3
        for layer in layers:
            for source in sources:
                with monkeypatch.context() as patch:
                    _swap(patch, layer.index, change(source))
                    got = last_logits()
                moved = not _equal(got, want, 1e-4)
                assert moved == (getattr(layer, kind) == source), (kind, layer.index, source)


def test_the_pre_of_a_site_serves_the_next_site(tmp_path):
    """V4.1's input weights are the site before's pre: the first site sees stream 0 alone."""
    model = _load(tmp_path, build.v41())
    seen = {}
    pool = make_pool(model)
    step(model, pool, [(Request(IDS), 20)], tap=lambda name, value: seen.update({name: value}))
    weights = model._weights
    embedded = weights.embed[torch.tensor(IDS[:20])]
    first = ops.rms_norm(embedded, weights.layers[0].attn_site.norm, 1e-20)
    u = (seen["layers.8.ffn.pre"][..., None] * seen["layers.8.streams"]).sum(1)
    last = ops.rms_norm(u, weights.layers[9].attn_site.norm, 1e-20)

    assert _equal(seen["layers.0.attn.x"], first, 1e-6)
    assert _equal(seen["layers.9.attn.x"], last, 1e-5)
    assert set(seen) == {
        *(
            f"layers.{i}.{site}.{part}"
            for i in range(10)
            for site in ("attn", "ffn")
            for part in ("x", "y", "pre", "post", "comb")
        ),
        *(f"layers.{i}.streams" for i in range(10)),
    }


def test_without_choices_every_visible_entry_is_attended(tmp_path, monkeypatch):
    """No index source: nothing is scored, and index_topk has no effect."""
    config = build.v41(index_source_layer_ids=[], candidate_source_layer_id=None)
    model = _load(tmp_path, config)
    monkeypatch.setattr(v4.ops, "index_scores", None)  # would fail if called

    assert run(model, IDS, [30] + [1] * 30).isfinite().all()
    assert model.config.layers[4].index_source is None
    assert not make_pool(model).index_keys
