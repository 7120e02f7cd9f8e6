// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "breccia/catalogue.hpp"
#include "breccia/cpu.hpp"
#include "matmul/choose.hpp"

namespace breccia::inline v0_4 {

std::vector<MatmulKernel> matmul_kernels() {
    constexpr std::int64_t n = 16, k = 256, most = 512;
    const KernelTable& table = kernels();
    const Array zeros = Array::allocate(DType::float32, {most, k}), bf16 = Array::allocate(DType::bfloat16, {most, k});
    std::fill_n(zeros.as<float>(), zeros.size(), 0.0F);
    const auto first_rows = [](Array array, std::int64_t rows) {
        array.shape[0] = rows;
        return array;
    };
    std::vector<MatmulKernel> found;
    for (const RecipeRow& row : catalogue()) {
        const ScaledTensor w = cast(first_rows(zeros, n), make_recipe(row.name)).transposed();
        const PreparedWeight prepared(w);
        for (const std::int64_t m : {std::int64_t{1}, std::int64_t{4}, std::int64_t{16}, most}) {
            const Array x_bf16 = first_rows(bf16, m), x_f32 = first_rows(zeros, m);
            const ScaledTensor fp8 = cast(x_f32, make_recipe("Float8BlockScaling"));
            const ScaledTensor int8 = cast(x_f32, make_recipe("INT8Scaling"));
            const std::pair<const char*, Operand> activations[] = {
                {"bfloat16", x_bf16}, {"float32", x_f32}, {"fp8", fp8}, {"int8", int8}};
            for (const auto& [name, a] : activations)
                for (const bool is_prepared : {false, true}) {
                    const Operand b = is_prepared ? Operand(prepared) : Operand(w);
                    found.push_back({.recipe = std::string(row.name),
                                     .activations = name,
                                     .prepared = is_prepared,
                                     .rows = m,
                                     .kernel = std::string(choose(question(table, a, b)).path->name)});
                }
        }
    }
    return found;
}

}  // namespace breccia::inline v0_4
