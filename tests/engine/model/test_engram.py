"""Engram's token side: folding, primes, hashes, history, tables on disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from engine.api import EngineError
from engine.config import Engram
from engine.model import quant
from engine.model.engram import (
    NO_TOKEN,
    EngramTable,
    NgramHash,
    fold_table,
    fold_text,
    multipliers,
    ngrams,
)
from tests.engine.model import build

PUBLISHED = Engram(
    layer_ids=(1, 14),
    num_embeddings=(384006168, 384016682),
    max_ngram_size=4,
    n_heads=8,
    head_dim=256,
    vocab_size=16000000,
    compressed_vocab_size=99092,
    pad_token_id=2,
)


def test_the_primes_sum_to_the_published_table_sizes():
    """24 primes per layer from 16 million upward, none used twice."""
    assert [sum(primes) for primes in PUBLISHED.primes] == [384006168, 384016682]
    assert len({p for primes in PUBLISHED.primes for p in primes}) == 48
    assert min(PUBLISHED.primes[0]) == 16000057


def test_multipliers_are_odd_and_cannot_overflow():
    """Twice a draw below (2**63 - 1) / classes / 2, plus 1, from a generator seeded per layer."""
    for layer in (1, 14):
        draws = np.random.default_rng(10007 * layer).integers(0, 46539438283891, 4)
        got = multipliers(PUBLISHED, layer)
        assert got.tolist() == (2 * draws + 1).tolist()
        assert all(int(m) * 99091 < 2**63 for m in got)


def test_a_three_token_prompt_hashes_as_by_hand():
    """xor of id times multiplier over the n-gram, modulo each head's prime, plus its offset."""
    config = Engram(
        layer_ids=(1,),
        num_embeddings=(0,),
        max_ngram_size=3,
        n_heads=2,
        head_dim=4,
        vocab_size=10,
        compressed_vocab_size=50,
        pad_token_id=0,
    )
    assert config.primes == ((11, 13, 17, 19),)
    m = [int(x) for x in multipliers(config, 1)]
    pad = 7
    grams = ngrams(np.array([NO_TOKEN, NO_TOKEN]), np.array([3, 4, 5]), pad)
    assert grams.tolist() == [[3, 7, 7], [4, 3, 7], [5, 4, 3]]
    want = []
    for latest, before, oldest in grams.tolist():
        two = (latest * m[0]) ^ (before * m[1])
        three = two ^ (oldest * m[2])
        want.append([two % 11, 11 + two % 13, 24 + three % 17, 41 + three % 19])

    assert NgramHash(config, 0).rows(grams).tolist() == want


def test_an_image_token_hides_itself_and_everything_behind_it():
    """At the image, and for the tokens after it, what lies at or before it reads as pad."""
    grams = ngrams(np.array([1, 2]), np.array([3, NO_TOKEN, 4, 5, 6]), 0)

    assert grams.tolist() == [[3, 2, 1], [0, 0, 0], [4, 0, 0], [5, 4, 0], [6, 5, 4]]


@given(st.lists(st.integers(-1, 9), min_size=1, max_size=12), st.data())
def test_ngrams_do_not_depend_on_the_split(ids, data):
    """A history carried from chunk to chunk gives what the whole sequence gives."""
    history = np.full(3, NO_TOKEN)
    whole = ngrams(history, np.array(ids), 0)
    cut = data.draw(st.integers(0, len(ids)))
    parts = []
    for piece in (ids[:cut], ids[cut:]):
        if piece:
            parts.append(ngrams(history, np.array(piece), 0))
            history = np.concatenate((history, piece))[-3:]

    assert np.concatenate(parts).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("The", "the"),
        (" the", "the"),
        ("Café", "cafe"),
        ("ﬁ", "fi"),
        ("ের", "র"),  # a spacing vowel sign is a mark too
        (" ", " "),
        ("\t \n", " "),
        ("a\n\n b", "a b"),
        ("\u00a0", " "),
        ("\u0301", ""),
    ],
)
def test_folding(text, folded):
    """NFKC, NFD, marks dropped, lower case, blanks folded and stripped; a lone blank stays."""
    assert fold_text(text) == folded


def test_tokens_fold_by_text_and_broken_bytes_by_name(tmp_path):
    """Spellings of one word share a class; half a UTF-8 character keeps its own."""
    tokenizer = build.tokenizer(288)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fold = fold_table(tmp_path / "tokenizer.json", 288, 288)

    def ids(*texts):
        found = [i for i in range(288) for t in texts if tokenizer.decode([i]) == t]
        assert len(found) >= len(texts)
        return found

    assert len({fold[i] for i in ids("the", "The", "THE", " the")}) == 1
    assert len({fold[i] for i in ids("café", "cafe")}) == 1
    broken = [i for i in range(288) if "\ufffd" in tokenizer.decode([i])]
    assert len(broken) > 100
    assert len({fold[i] for i in broken}) == len(broken)
    assert fold.max() == len(set(fold.tolist())) - 1
    assert fold[:3].tolist() == [0, 1, 2]


def test_more_classes_than_the_config_admits_are_refused(tmp_path):
    """The multipliers are only safe below engram_compressed_vocab_size."""
    build.tokenizer(288).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(EngineError, match=r"at most engram_compressed_vocab_size = 9 .* got 2"):
        fold_table(tmp_path / "tokenizer.json", 288, 9)
    with pytest.raises(EngineError, match=r"absent\.json: Engram needs the tokenizer"):
        fold_table(tmp_path / "absent.json", 288, 288)


@pytest.mark.parametrize("stored", ["bf16", "f32", "fp8"])
def test_rows_are_joined_in_order(stored):
    """A lookup gives each token's rows side by side, with the rows' own scales."""
    table = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    if stored == "fp8":
        weight, scale = quant.quantise_rows_fp8(table, 32)
        table = quant.dequantise_rows_fp8(weight, scale, 32)
        lookup = EngramTable(weight, scale.view(torch.uint8))
    else:
        lookup = EngramTable(table.bfloat16() if stored == "bf16" else table, None)
    got = lookup.lookup(np.array([[3, 19], [0, 3]]), torch.float32)

    assert torch.equal(got, torch.stack([table[[3, 19]].flatten(), table[[0, 3]].flatten()]))
