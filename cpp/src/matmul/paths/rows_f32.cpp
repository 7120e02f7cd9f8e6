// SPDX-License-Identifier: Apache-2.0
//
// Any operands, few activations: a few weight rows are dequantized to float32, then each is multiplied by every
// activation.
#include "matmul/paths/panels.hpp"
#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {
namespace {

Refusal by_rows_f32(const Product& product, int /*most_terms*/) {
    const KernelTable& table = product.table;
    const std::int64_t rows = product.total_rows();
    const WorkBuffer<float> x(rows * product.k);
    Scratch reading;
    product.read(0, rows, 0, product.k, reading, x.data(), product.k);
    constexpr std::int64_t at_once = 16;
    const std::int64_t grain =
        std::max<std::int64_t>(1, (std::int64_t{1} << 16) / std::max<std::int64_t>(product.k, 1));
    parallel_for(product.call, product.n, round_up(grain, at_once), [&](std::int64_t begin, std::int64_t end) {
        Scratch scratch;
        const WorkBuffer<float> weights(at_once * product.k);
        float line[at_once];
        for (std::int64_t j = begin; j < end; j += at_once) {
            const std::int64_t n = std::min(at_once, end - j);
            product.w.read(table, j, n, 0, product.k, scratch, weights.data(), product.k);
            for (std::int64_t i = 0; i < rows; ++i) {
                for (std::int64_t r = 0; r < n; ++r)
                    line[r] = table.matmul.dot(x.data() + i * product.k, weights.data() + r * product.k, product.k);
                product.write(i, j, n, line);
            }
        }
    });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::rows_f32{
    .name = "rows_f32", .suits = suits_anything, .multiply = by_rows_f32, .refusals = {}};

}  // namespace breccia::inline v0_4
