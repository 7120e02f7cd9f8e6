// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "breccia/catalogue.hpp"
#include "breccia/cpu.hpp"
#include "matmul/product.hpp"

namespace breccia::inline v0_4 {
namespace {

Array ones(DType dtype, Shape shape) {
    Array one = Array::allocate(DType::float32, std::move(shape));
    std::fill_n(one.as<float>(), one.size(), 1.0F);
    if (dtype == DType::float32) return one;
    Array rounded = Array::allocate(dtype, one.shape);
    kernels().dequantize.store[static_cast<std::size_t>(dtype)](one.as<float>(), one.size(), rounded.data);
    return rounded;
}

}  // namespace

std::vector<MatmulKernel> matmul_kernels() {
    constexpr std::int64_t n = 16, k = 256;
    std::vector<MatmulKernel> found;
    for (const RecipeRow& row : catalogue()) {
        const ScaledTensor w = cast(ones(DType::float32, {n, k}), make_recipe(row.name)).transposed();
        const PreparedWeight prepared(w);
        for (const std::int64_t m : {1, 4, 16, 512}) {
            const Array bf16 = ones(DType::bfloat16, {m, k}), f32 = ones(DType::float32, {m, k});
            const ScaledTensor fp8 = cast(f32, make_recipe("Float8BlockScaling"));
            const std::pair<const char*, Operand> activations[] = {{"bfloat16", bf16}, {"float32", f32}, {"fp8", fp8}};
            for (const auto& [name, a] : activations)
                for (const bool is_prepared : {false, true})
                    found.push_back({.recipe = std::string(row.name),
                                     .activations = name,
                                     .prepared = is_prepared,
                                     .rows = m,
                                     .kernel = std::string(matmul_path(a, is_prepared ? Operand(prepared) : w))});
        }
    }
    return found;
}

}  // namespace breccia::inline v0_4
