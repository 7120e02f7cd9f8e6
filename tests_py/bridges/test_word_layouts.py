# SPDX-License-Identifier: Apache-2.0
"""Codes in and out of GPTQ's and AWQ's words, against the same in NumPy: a nibble at a time, as the formats say it."""

import numpy as np
import pytest
from breccia import _core

PLACES = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # AWQ: column in nibble i
NO_ORDER = np.zeros(0, np.int64)


def unpack(words, bits):
    """Codes of each word along the last axis, low bits first."""
    shape = (*words.shape[:-1], words.shape[-1] * 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words[..., None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(shape).astype(np.uint8)


def pack_rows(codes, bits):
    """Rows of codes as a ScaledTensor has them: two to a byte, the first low, or one."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    codes = np.pad(codes, [(0, 0), (0, codes.shape[1] % 2)])
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_rows(data, bits, columns):
    if bits == 8:
        return data
    return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)[:, :columns]


def random_words(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("down", [0, 1, 3, 15, 16, 17, 40])
@pytest.mark.parametrize("rows", [0, 1, 8, 120, 128, 129, 300])
def test_gptq(bits, down, rows):
    words = random_words((down, rows))
    codes = unpack(np.ascontiguousarray(words.T), bits)
    data = pack_rows(codes, bits)
    np.testing.assert_array_equal(_core.codes_from_gptq(words, bits, NO_ORDER, 0), data)
    np.testing.assert_array_equal(_core.codes_to_gptq(data, bits, NO_ORDER, 0), words)
    flip = 0x88888888 if bits == 4 else 0x80808080
    turned = data ^ np.uint8(flip & 255)
    np.testing.assert_array_equal(_core.codes_from_gptq(words, bits, NO_ORDER, flip), turned)
    np.testing.assert_array_equal(_core.codes_to_gptq(turned, bits, NO_ORDER, flip), words)
    columns = codes.shape[1]
    if columns == 0:
        return
    order = np.random.default_rng(1).permutation(columns).astype(np.int64)
    moved = pack_rows(codes[:, order], bits)
    np.testing.assert_array_equal(_core.codes_from_gptq(words, bits, order, 0), moved)
    back = np.argsort(order)
    np.testing.assert_array_equal(_core.codes_to_gptq(moved, bits, back, 0), words)
    turned = moved ^ np.uint8(flip & 255)
    np.testing.assert_array_equal(_core.codes_from_gptq(words, bits, order, flip), turned)
    np.testing.assert_array_equal(_core.codes_to_gptq(turned, bits, back, flip), words)


@pytest.mark.parametrize("columns", [0, 1, 2, 7, 8, 9, 127, 128, 129, 300])
@pytest.mark.parametrize("across", [0, 1, 2, 15, 16, 17, 33])
def test_awq(columns, across):
    words = random_words((columns, across), 2)
    codes = unpack(words, 4).reshape(columns, across, 8)[..., np.argsort(PLACES)].reshape(columns, 8 * across).T
    data = pack_rows(codes, 4)
    np.testing.assert_array_equal(_core.codes_from_awq(words, 0), data)
    np.testing.assert_array_equal(_core.codes_to_awq(data, columns, 0), words)
    turned = pack_rows(codes ^ 8, 4)
    np.testing.assert_array_equal(_core.codes_from_awq(words, 0x88888888), turned)
    np.testing.assert_array_equal(_core.codes_to_awq(turned, columns, 0x88888888), words)
    if columns % 2 and data.size:  # the last high nibble of a row is nobody's
        data[:, -1] |= 0xF0
        np.testing.assert_array_equal(_core.codes_to_awq(data, columns, 0), words)


def test_threads_share_the_tiles():
    words = random_words((640, 4096))
    threads = _core.num_threads()
    try:
        found = []
        for count in (1, 3):
            _core.set_num_threads(count)
            found.append([_core.codes_from_gptq(words, 4, NO_ORDER, 0), _core.codes_from_awq(words, 0)])
    finally:
        _core.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        np.testing.assert_array_equal(one, three)


def test_messages():
    words, data = random_words((4, 8)), np.zeros((8, 16), np.uint8)
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        _core.codes_from_gptq(words, 3, NO_ORDER, 0)
    with pytest.raises(ValueError, match=r"order must have 32 items for 8 x 32 codes of 4 bits, got 31"):
        _core.codes_from_gptq(words, 4, np.arange(31), 0)
    for place in (-1, 32):
        with pytest.raises(ValueError, match=rf"order must be places of columns, from 0 to 31, got {place}"):
            _core.codes_from_gptq(words, 4, np.where(np.arange(32) == 7, place, 0), 0)
        with pytest.raises(ValueError, match=rf"order must be places of columns, from 0 to 31, got {place}"):
            _core.codes_to_gptq(data, 4, np.where(np.arange(32) == 7, place, 0), 0)
    with pytest.raises(ValueError, match="columns must be a multiple of 8, got 34"):
        _core.codes_to_gptq(np.zeros((8, 17), np.uint8), 4, NO_ORDER, 0)
    with pytest.raises(ValueError, match="columns must be the number of codes in 16 bytes of a row, got 30"):
        _core.codes_to_awq(data, 30, 0)
    with pytest.raises(ValueError, match="rows must be a multiple of 8, got 7"):
        _core.codes_to_awq(data[:7], 32, 0)
    with pytest.raises(ValueError, match="words must be a matrix, got 1 axes"):
        _core.codes_from_awq(words[0], 0)


def unaligned(array):
    """A copy that begins at an odd address, as tensors of a mapped file can."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = np.frombuffer(memory, array.dtype, array.size, 1 - memory.ctypes.data % 2).reshape(array.shape)
    moved[...] = array
    return moved


def test_words_at_an_odd_address():
    """Under the sanitizers (.ci/asan_python) a load of a word that is not where words may be is an error."""
    words, order = random_words((16, 64)), np.arange(128, dtype=np.int64)[::-1].copy()
    moved, moved_order = unaligned(words), unaligned(order)
    codes = _core.codes_from_gptq(words, 4, order, 0)
    np.testing.assert_array_equal(_core.codes_from_gptq(moved, 4, moved_order, 0), codes)
    np.testing.assert_array_equal(_core.codes_to_gptq(codes, 4, moved_order, 0), words)
    np.testing.assert_array_equal(_core.codes_from_awq(moved, 0), _core.codes_from_awq(words, 0))
    numbers = unaligned(np.full((4, 32), 1.5, np.float32))
    assert (_core.encode(numbers, "int8") == 2).all()
