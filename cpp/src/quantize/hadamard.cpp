// SPDX-License-Identifier: Apache-2.0
#include "quantize/hadamard.hpp"

#include <cmath>

#include "contract/random.hpp"

namespace breccia::inline v0_4 {
namespace {

// In place; the order of the sums is part of the definition.
void transform(float* x, std::int64_t block) {
    for (std::int64_t half = 1; half < block; half *= 2)
        for (std::int64_t pair = 0; pair < block; pair += 2 * half)
            for (std::int64_t i = pair; i < pair + half; ++i) {
                const float low = x[i], high = x[i + half];
                x[i] = low + high;
                x[i + half] = low - high;
            }
}

}  // namespace

HadamardSource::HadamardSource(const RowSource& source, std::int64_t block, std::uint64_t seed)
    : RowSource(source.kernels()), source_(source), block_(block), signs_(static_cast<std::size_t>(block)) {
    const RandomKey key(seed, RandomStream::signs);
    for (std::uint32_t i = 0; i < signs_.size(); ++i) signs_[i] = key.bits(i) >> 31 == 0 ? 1.0F : -1.0F;
}

const float* HadamardSource::read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                                  Scratch& scratch) const {
    const std::int64_t first = begin - begin % block_;
    const std::int64_t last = begin + n + (block_ - (begin + n) % block_) % block_;
    const float* x = source_.read(matrix, row, first, last - first, scratch);
    if (scratch.transformed.size() < static_cast<std::size_t>(last - first))
        scratch.transformed.resize(static_cast<std::size_t>(last - first));
    float* out = scratch.transformed.data();
    const auto unit = static_cast<float>(1 / std::sqrt(static_cast<double>(block_)));
    for (std::int64_t at = 0; at < last - first; at += block_) {
        for (std::int64_t i = 0; i < block_; ++i) out[at + i] = x[at + i] * signs_[static_cast<std::size_t>(i)];
        transform(out + at, block_);
        for (std::int64_t i = 0; i < block_; ++i) out[at + i] *= unit;
    }
    return out + (begin - first);
}

}  // namespace breccia::inline v0_4
