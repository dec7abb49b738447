"""The byte formulas pinned by worked examples; nothing of the harness is imported here."""

from __future__ import annotations

from tests.support.oracles import nbytes


def test_bytes_of_the_case_table() -> None:
    # TINY-A: 4 layers, 2 KV heads, dim 64, fp16; a token of K and V is 256 bytes
    layers, heads, dim = 4, 2, 64
    assert layers * nbytes.total(nbytes.exact_tokens(heads, 256, dim)) == 524_288
    # 4 bit, groups of 32: 2 x 64 x (1/2 + 4/32) = 80 bytes a token, 80 x 2048 tokens
    for axis in ("channel", "token"):
        assert layers * nbytes.total(nbytes.int4_groups(heads, 256, dim, 32, 0, axis)) == 163_840
        # last 32 exact: 8 x (224 x 80 + 32 x 256)
        assert layers * nbytes.total(nbytes.int4_groups(heads, 256, dim, 32, 32, axis)) == 208_896
    assert layers * nbytes.total(nbytes.exact_tokens(heads, 64, dim)) == 131_072
    # TINY-G: five windows and one global layer of 512, one KV head
    for window, size in ((64, 212_992), (63, 211_712)):
        rows = [nbytes.sliding_rows(512, window)] * 5 + [512]
        assert sum(nbytes.total(nbytes.exact_tokens(1, n, 64)) for n in rows) == size


def test_bytes_of_the_worked_example() -> None:
    full = nbytes.total(nbytes.exact_tokens(32, 1000, 128))
    assert full == 16_384_000
    assert nbytes.total(nbytes.exact_tokens(32, 64, 128)) == 1_048_576
    coded = nbytes.int8_per_token(32, 64, 128)
    assert coded["payload"] == 524_288
    assert full / coded["payload"] == 31.25
    # all counted: 64 x 32 tokens x (2 x (128 + 2) codes and scales + 4 position + 4 score) = 2048 x 268
    assert nbytes.total(coded, nbytes.eviction(32, 64, scores=True)) == 548_864
    assert nbytes.add(coded, nbytes.eviction(32, 64, scores=True)) == {
        "payload": 524_288,
        "metadata": 8_192,
        "positions": 8_192,
        "state": 8_192,
    }


def test_bytes_a_token_of_known_models() -> None:
    assert 32 * nbytes.total(nbytes.exact_tokens(32, 1, 128)) == 524_288
    assert 80 * nbytes.total(nbytes.exact_tokens(64, 1, 128)) == 2_621_440
    assert 80 * nbytes.total(nbytes.exact_tokens(8, 1, 128)) == 327_680


def test_bytes_of_an_evicted_store_and_of_a_ragged_tail() -> None:
    # TINY-A at 64 tokens: 8 x 64 tokens, 4 bytes a position and 4 a score: + 2048 each
    evicted = nbytes.total(nbytes.exact_tokens(2, 64, 64), nbytes.eviction(2, 64, nbytes.keeps_h2o_scores("prefill")))
    assert 4 * evicted == 131_072 + 2_048
    scored = nbytes.total(nbytes.exact_tokens(2, 64, 64), nbytes.eviction(2, 64, nbytes.keeps_h2o_scores("always")))
    assert 4 * scored == 131_072 + 4_096
    # one head, 70 tokens, dim 64, groups and residual 32: 38 old tokens. K: 32 coded (1024 + 64 x 4), 38 exact (4864);
    # V: 38 coded (1216 + 38 x 2 x 4), 32 exact (4096)
    assert nbytes.int4_groups(1, 70, 64, 32, 32) == {"payload": 1024 + 1216, "metadata": 256 + 304, "tail": 4864 + 4096}
    # one token of 64 channels: int8 2 x (64 + 2); groups of 64: 2 x (32 + 4)
    assert nbytes.total(nbytes.int8_per_token(1, 1, 64)) == 132
    assert nbytes.total(nbytes.int4_groups(1, 64, 64, 64)) == 64 * 72
