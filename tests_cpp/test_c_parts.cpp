// SPDX-License-Identifier: Apache-2.0
//
// breccia.h refuses what it would neither read nor write: a pointer to a part that numbers or codes of a recipe have
// not, wherever a function takes a matrix or an output, for every recipe.
#include <array>

#include "breccia/breccia.h"
#include "breccia/catalogue.hpp"
#include "support.hpp"

namespace breccia {
namespace {

constexpr std::int64_t m = 2, n = 128, k = 128;

using RecipePtr = std::unique_ptr<breccia_recipe, decltype(&breccia_recipe_free)>;

RecipePtr recipe_of(std::string_view name, const std::string& fields) {
    breccia_recipe* made = nullptr;
    breccia_recipe_new(std::string(name).c_str(), fields.c_str(), &made);
    return {made, breccia_recipe_free};
}

breccia_part_bytes bytes_of(const breccia_recipe* recipe) {
    breccia_part_bytes sizes{};
    sizes.size = sizeof sizes;
    EXPECT_EQ(breccia_part_sizes(recipe, 0, n, k, &sizes), BRECCIA_OK);
    return sizes;
}

template <class Matrix>
Matrix matrix_of(std::int64_t rows, std::int64_t columns, std::vector<float>& memory) {
    memory.assign(static_cast<std::size_t>(rows * columns), 1.0F);
    Matrix made{};
    made.size = sizeof made;
    made.rows = rows;
    made.columns = columns;
    made.data = memory.data();
    return made;
}

// Memory of every part of codes (n, k).
struct Codes {
    explicit Codes(const breccia_recipe* recipe) {
        const breccia_part_bytes sizes = bytes_of(recipe);
        out.size = sizeof out;
        out.recipe = recipe;
        out.rows = n;
        out.columns = k;
        out.data = add(0, sizes.data);
        out.scale = add(1, sizes.scale);
        out.zero_point = add(2, sizes.zero_point);
        out.global_scale = add(3, sizes.global_scale);
    }
    [[nodiscard]] breccia_matrix written() const {
        breccia_matrix in{};
        in.size = sizeof in;
        in.recipe = out.recipe;
        in.rows = n;
        in.columns = k;
        in.data = out.data;
        in.scale = out.scale;
        in.zero_point = out.zero_point;
        in.global_scale = out.global_scale;
        return in;
    }
    breccia_output out{};

private:
    void* add(std::size_t part, std::int64_t bytes) {
        memory_[part].resize(static_cast<std::size_t>(bytes) / sizeof(double) + 1);
        return bytes == 0 ? nullptr : memory_[part].data();
    }
    std::array<std::vector<double>, 4> memory_;
};

// The call is done as it is, and refused with each pointer to a part that is null.
template <class Matrix, class Call>
int refuses(const std::string& name, Matrix& matrix, Call call) {
    static float some[n * k] = {};
    EXPECT_EQ(call(), BRECCIA_OK) << name << ": " << breccia_last_message();
    int refused = 0;
    const auto try_part = [&](auto part, const std::string& field) {
        if (matrix.*part != nullptr) return;
        ++refused;
        matrix.*part = some;
        EXPECT_EQ(call(), BRECCIA_VALUE_ERROR) << name << "." << field;
        EXPECT_THAT(breccia_last_message(), testing::StartsWith(name + "." + field + " must be NULL for "));
        matrix.*part = nullptr;
    };
    try_part(&Matrix::scale, "scale");
    try_part(&Matrix::zero_point, "zero_point");
    try_part(&Matrix::global_scale, "global_scale");
    return refused;
}

void every_function_refuses(const breccia_recipe* recipe, bool has_exponents) {
    std::vector<float> x_memory, dense_memory, y_memory, back_memory, bias_memory, h_memory;
    auto x = matrix_of<breccia_matrix>(m, k, x_memory), dense = matrix_of<breccia_matrix>(n, k, dense_memory);
    auto bias = matrix_of<breccia_matrix>(1, n, bias_memory), h = matrix_of<breccia_matrix>(1, k, h_memory);
    auto y = matrix_of<breccia_output>(m, n, y_memory), back = matrix_of<breccia_output>(n, k, back_memory);
    Codes codes(recipe), other(recipe);
    const auto cast = [&] { return breccia_cast(&dense, &codes.out, nullptr); };
    EXPECT_EQ(refuses("x", dense, cast), 3);
    const int absent = refuses("out", codes.out, cast);
    const breccia_part_bytes sizes = bytes_of(recipe);
    EXPECT_EQ(absent, (sizes.zero_point == 0 ? 1 : 0) + (sizes.global_scale == 0 ? 1 : 0));
    breccia_cast_options options{};
    options.size = sizeof options;
    options.importance = &h;
    const auto cast_by_importance = [&] { return breccia_cast(&dense, &other.out, &options); };
    if (has_exponents)
        EXPECT_EQ(cast_by_importance(), BRECCIA_VALUE_ERROR);
    else
        EXPECT_EQ(refuses("options.importance", h, cast_by_importance), 3);

    breccia_matrix w = codes.written(), turned = w, stack = w, both = w;
    const auto dequantize = [&] { return breccia_dequantize(&w, &back); };
    EXPECT_EQ(refuses("scaled", w, dequantize), absent);
    EXPECT_EQ(refuses("out", back, dequantize), 3);
    const auto requantize = [&] { return breccia_requantize(&w, &other.out); };
    EXPECT_EQ(refuses("scaled", w, requantize), absent);
    EXPECT_EQ(refuses("out", other.out, requantize), absent);
    const auto linear = [&] { return breccia_linear(&x, &w, &bias, &y, nullptr); };
    refuses("x", x, linear);
    refuses("w", w, linear);
    refuses("bias", bias, linear);
    refuses("out", y, linear);
    turned.transposed = 1;
    const auto matmul = [&] { return breccia_matmul(&x, &turned, &y, nullptr); };
    refuses("a", x, matmul);
    refuses("b", turned, matmul);
    refuses("out", y, matmul);
    stack.batch = 1;
    const std::int64_t offsets[] = {0, m};
    const auto grouped = [&] { return breccia_grouped_matmul(&x, &stack, offsets, &y, nullptr); };
    refuses("x", x, grouped);
    refuses("w", stack, grouped);
    refuses("out", y, grouped);
    refuses("w", both, [&] {
        breccia_weight* prepared = nullptr;
        const breccia_status status = breccia_prepare(&both, &prepared);
        breccia_weight_free(prepared);
        return status;
    });
}

TEST(CInterface, RefusesPartsThatThereAreNone) {
    std::set<std::pair<bool, bool>> seen;  // which of zero points and a global scale there are
    for (const RecipeRow& row : catalogue()) {
        std::vector<std::string> variants = {""};
        for (const FieldSpec& field : row.fields)
            if (field.kind == FieldSpec::Kind::boolean)
                for (const char* value : {"=true", "=false"}) variants.push_back(std::string(field.name) + value);
        for (const std::string& fields : variants) {
            SCOPED_TRACE(std::string(row.name) + " " + fields);
            const RecipePtr recipe = recipe_of(row.name, fields);
            if (recipe == nullptr) continue;  // a field that goes with another
            every_function_refuses(recipe.get(), make_recipe(row.name).is_expanded());
            const breccia_part_bytes sizes = bytes_of(recipe.get());
            seen.emplace(sizes.zero_point != 0, sizes.global_scale != 0);
        }
    }
    EXPECT_EQ(seen.size(), 3U);  // neither, either
}

}  // namespace
}  // namespace breccia
