"""The draft heads: V4's MTP stage and V4.1's DSpark step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracle_naive.formats import Array
from tests.oracle_naive.model import Naive, Vectors, rotary_frequencies


def mtp_logits(run: Naive, next_ids: list[int]) -> Array:
    """V4: [T, vocab_size], for the token two after each position.

    Args:
        run: a fresh run over T tokens.
        next_ids: the token that follows each of them.
    """
    c, w = run.c, run.w
    streams, _ = run.backbone()
    inputs = []
    for t, after in enumerate(next_ids):
        e = run.linear("mtp.0.e_proj", run.norm("mtp.0.enorm", w["embed.weight"][after]))
        hidden = [run.linear("mtp.0.h_proj", run.norm("mtp.0.hnorm", s)) for s in streams[t]]
        inputs.append(np.array([h + e for h in hidden]))
    layer = c.num_hidden_layers  # its ratio is the first trailing entry, 0; routing is learned
    out, _ = run.block("mtp.0", inputs, [], layer)
    x = [run.collapse("mtp.0.hc_head", s, np.empty(0)) for s in out]
    return np.array([w["head.weight"] @ run.norm("mtp.0.norm", v) for v in x])


@dataclass
class Draft:
    """What one DSpark step proposes.

    Attributes:
        logits: [block, vocab_size], the Markov head's part included.
        token_ids: [block], the most likely of each (lowest id of equal ones).
        confidence: [block].
    """

    logits: Array
    token_ids: list[int]
    confidence: Array


def dspark(run: Naive, sampled: int) -> Draft:
    """V4.1: the greedy draft after a run's last position.

    Args:
        run: a fresh run over the tokens that the backbone has seen.
        sampled: the token it then gave.
    """
    c, w = run.c, run.w
    run.backbone()
    freqs = rotary_frequencies(c, 0)
    past, size = len(run.ids), c.dspark_block_size
    main_x = []
    for t in range(past):
        taps = [run.block_inputs[layer][t].mean(axis=0) for layer in c.dspark_target_layer_ids]
        main = run.linear("mtp.0.main_proj", np.concatenate(taps))
        main_x.append(run.norm("mtp.0.main_norm", main))

    queries = [sampled] + [c.dspark_noise_token_id] * (size - 1)
    streams: Vectors = [np.tile(w["embed.weight"][i], (c.hc_mult, 1)) for i in queries]
    pres = [np.eye(c.hc_mult)[0] for _ in queries]
    for stage in range(c.num_nextn_predict_layers):
        name = f"mtp.{stage}"
        attn = f"{name}.attn"
        ring = [
            run.window_key(attn, main_x[t], t, freqs)
            for t in range(max(0, past - c.sliding_window), past)
        ]

        def attention(x: Vectors, attn: str = attn, ring: Vectors = ring) -> Vectors:
            own = [run.window_key(attn, x[i], past + i, freqs) for i in range(size)]
            seen = np.array(ring + own)  # no order inside the block: all see all
            out = []
            for i in range(size):
                latent = run.query_latent(attn, x[i])
                q = run.query(attn, latent, past + i, freqs)
                out.append(run.output(attn, run.attend(attn, q, seen), past + i, freqs))
            return out

        def moe(x: Vectors, name: str = name) -> Vectors:
            layer = c.num_hidden_layers  # past every hash layer
            return [
                run.moe(f"{name}.ffn", x[i], queries[i], layer, c.dspark_num_experts_per_tok)
                for i in range(size)
            ]

        streams, pres = run.site(name, "attn", streams, pres, attention)
        streams, pres = run.site(name, "ffn", streams, pres, moe)

    last = f"mtp.{c.num_nextn_predict_layers - 1}"
    logits, token_ids, confidence = [], [], []
    before = sampled
    for i in range(size):
        x = run.collapse(f"{last}.hc_head", streams[i], pres[i])
        markov = w[f"{last}.markov_head.embed.weight"][before]
        scores = w["head.weight"] @ run.norm(f"{last}.norm", x)
        scores = scores + w[f"{last}.markov_head.head.weight"] @ markov
        before = int(np.argmax(scores))
        logits.append(scores)
        token_ids.append(before)
        confidence.append(w[f"{last}.confidence_head.proj.weight"][0] @ np.concatenate([x, markov]))
    return Draft(np.array(logits), token_ids, np.array(confidence))
