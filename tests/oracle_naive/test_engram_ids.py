"""Engram's integer arithmetic against published sums and a hash worked out by hand."""

import numpy as np

from tests.oracle_naive import engram
from tests.oracle_naive.config import Config

V41_FLASH = Config.read(
    {
        "model_type": "deepseek_v41",
        "text_config": {
            "vocab_size": 129280,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "o_groups": 8,
            "sliding_window": 128,
            "n_routed_experts": 384,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "num_hash_layers": 0,
            "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
            "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "rms_norm_eps": 1e-20,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 512,
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384006168, 384016682],
            "engram_max_ngram_size": 4,
            "engram_n_heads": 8,
            "engram_vocab_size": 16000000,
            "engram_compressed_vocab_size": 99092,
            "engram_pad_token_id": 2,
            "image_token_id": 129264,
        },
    }
)
SMALL = V41_FLASH.replaced(
    vocab_size=64,
    engram_layer_ids=(1, 3),
    engram_n_heads=2,
    engram_vocab_size=10,
    engram_compressed_vocab_size=40,
    engram_pad_token_id=2,
    image_token_id=63,
)
FOLD = [(7 * i + 5) % 40 for i in range(64)]


def test_prime_tables_have_the_published_number_of_rows() -> None:
    """384006168 and 384016682, the second layer past the first one's primes."""
    sizes = engram.table_sizes(V41_FLASH)
    totals = tuple(sum(sum(heads) for heads in sizes[layer]) for layer in (1, 14))
    assert V41_FLASH.engram_num_embeddings == totals


def test_no_prime_is_taken_twice() -> None:
    """Over orders, heads and both layers; each walk starts at the same number."""
    assert engram.table_sizes(SMALL) == {
        1: [[11, 13], [17, 19], [23, 29]],
        3: [[31, 37], [41, 43], [47, 53]],
    }


def test_multipliers_are_odd_and_depend_on_the_layer() -> None:
    """Drawn by numpy's default generator, seeded with 10007 times the layer."""
    first, second = (engram.multipliers(layer, 4, 99092) for layer in (1, 14))
    assert all(m % 2 == 1 and 0 < m < 2**63 // 99092 + 2 for m in first + second)
    assert first != second
    drawn = np.random.default_rng(10007).integers(0, (2**63 - 1) // 99092 // 2, size=4)
    assert first == [2 * int(m) + 1 for m in drawn]


def test_rows_of_a_three_token_prompt_by_hand() -> None:
    """Before the start stands the folded pad id; offsets run over orders, then heads."""
    ids = [10, 20, 30]
    a, b, c, pad = FOLD[10], FOLD[20], FOLD[30], FOLD[2]
    m = engram.multipliers(1, 4, 40)
    two, three = (c * m[0]) ^ (b * m[1]), (c * m[0]) ^ (b * m[1]) ^ (a * m[2])
    four = three ^ (pad * m[3])
    assert engram.rows(SMALL, 1, ids, FOLD, 2) == [
        two % 11,
        11 + two % 13,
        24 + three % 17,
        41 + three % 19,
        60 + four % 23,
        83 + four % 29,
    ]
    assert engram.history(SMALL, ids, FOLD, 0) == [a, pad, pad, pad]


def test_history_ends_at_an_image_token() -> None:
    """The image token and all before it count as pad."""
    ids = [10, 63, 20, 30]
    assert engram.history(SMALL, ids, FOLD, 3) == [FOLD[30], FOLD[20], FOLD[2], FOLD[2]]
