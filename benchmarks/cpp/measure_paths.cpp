// SPDX-License-Identifier: Apache-2.0
//
// The measurements behind cpp/src/matmul/rules.inl, as JSON: x (M, K) by weights (N, K)^T on one thread by each
// path that suits the operands, be another quicker or not. The paths take turns, and a time is the median of some
// turns, in microseconds of the processor. benchmarks/kernel_paths.py runs this and writes the tables.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <map>
#include <optional>
#include <variant>

#include "breccia/prepared.hpp"
#include "breccia/recipes.hpp"
#include "matmul/choose.hpp"
#include "operands.hpp"

namespace breccia {
namespace {

constexpr std::int64_t rows[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
constexpr int turns = 5;
constexpr double least_us = 400;  // of a turn, so that the clock's microsecond does not matter

// Median times of paths that take turns; of those that refuse, none.
std::map<std::string_view, double> measure(const std::vector<const Path*>& paths, const Operand& x, const Operand& w,
                                           const Array& y) {
    struct Timed {
        const Path* path;
        int calls = 1;
        std::vector<double> us = {};
    };
    const auto call = [&](const Path* path) { return multiply_by(path->name, x, w, y); };
    const auto time = [&](const Path* path, int calls) {
        const std::clock_t begin = std::clock();
        for (int i = 0; i < calls; ++i) call(path);
        return static_cast<double>(std::clock() - begin) / calls * (1e6 / CLOCKS_PER_SEC);
    };
    std::vector<Timed> all;
    for (const Path* path : paths)
        if (call(path)) all.push_back({.path = path});
    for (Timed& one : all)
        one.calls = static_cast<int>(std::clamp(least_us / std::max(time(one.path, 1), 1.0), 1.0, 200.0));
    for (int turn = 0; turn < turns; ++turn)
        for (Timed& one : all) one.us.push_back(time(one.path, one.calls));
    std::map<std::string_view, double> medians;
    for (Timed& one : all) {
        std::ranges::nth_element(one.us, one.us.begin() + turns / 2);
        medians[one.path->name] = one.us[turns / 2];
    }
    return medians;
}

std::string names_of(Kinds kinds) {
    std::string text;
    for (std::size_t i = 0; i < kind_names().size(); ++i)
        if ((kinds & 1 << i) != 0) text += (text.empty() ? "" : " ") + std::string(kind_names()[i]);
    return text;
}

// What an Operand borrows.
using Side = std::variant<Array, ScaledTensor>;
Operand operand(const Side& side) {
    return std::visit([](const auto& x) { return Operand(x); }, side);
}

struct Weight {
    const char* name;
    Side matrix;
};

// Codes of other formats, or numbers.
std::vector<Weight> weights(std::int64_t n, std::int64_t k) {
    const Array w = normal(DType::float32, {n, k}, 1);
    const std::pair<const char*, Recipe> of_codes[] = {
        {"FP8 1x128", recipes::block{}},
        {"MXFP8", recipes::mxfp8{}},
        {"INT8", recipes::int8{}},
        {"INT8 g16", recipes::int8{.group_size = 16}},
        {"NVFP4", recipes::nvfp4{}},
        {"MXFP4", recipes::mxfp4{}},
        {"INT4 g32", recipes::int4{.group_size = 32}},
        {"INT4 g128", recipes::int4{}},
    };
    std::vector<Weight> all;
    for (const auto& [name, recipe] : of_codes) {
        const ScaledTensor codes = cast(w, recipe);
        all.push_back({name, codes.transposed()});
        const ScaledTensor prepared = PreparedWeight(codes).transposed().tensor();
        if (prepared.packed_nbytes() != 0) all.push_back({name, prepared});
    }
    all.push_back({"bfloat16", normal(DType::bfloat16, {n, k}, 1).transposed()});
    return all;
}

Side activations(std::string_view type, std::int64_t m, std::int64_t k) {
    if (type == "bfloat16" || type == "float16")
        return normal(type == "float16" ? DType::float16 : DType::bfloat16, {m, k}, 2);
    const Array x = normal(DType::float32, {m, k}, 2);
    if (type == "INT8") return cast(x, recipes::int8{});
    if (type == "FP8 1x128") return cast(x, recipes::block{});
    if (type == "NVFP4") return cast(x, recipes::nvfp4{});
    return x;
}

std::string text_of(double us) {
    char text[16];
    std::snprintf(text, sizeof text, " %.4g", us);
    return text;
}

void measure_rows(const char* comma, const std::string& backend, const Weight& weight, const char* type, std::int64_t n,
                  std::int64_t k) {
    std::map<std::string_view, std::string> of_path;  // kind of the activations, and times by number of rows
    std::string of_weight;
    for (const std::int64_t m : rows) {
        const Side numbers = activations(type, m, k);
        const Operand x = operand(numbers), w = operand(weight.matrix);
        const Array y = Array::allocate(DType::float32, {m, n});
        const Call call;
        const Product product = question(call, x, w);
        of_weight = names_of(weight_kinds(product));
        std::vector<const Path*> paths;
        for (const Path* const path : every_path)
            if (const std::optional<Kinds> taken_as = path->suits(product)) {
                if (m == 1) of_path[path->name] = names_of(*taken_as);
                // Slower by times: paths that take activations one by one, or a few.
                const bool for_few = path == &paths::rows_f32 || path == &paths::in_place_f32;
                if (m <= 24 || !(for_few || path == &paths::in_place_integer)) paths.push_back(path);
            }
        const std::map<std::string_view, double> us = measure(paths, x, w, y);
        for (auto& [name, text] : of_path) text += us.contains(name) ? text_of(us.at(name)) : " -";
    }
    std::printf("%s\n{\"backend\": \"%s\", \"weight\": \"%s\", \"activations\": \"%s\", \"n\": %lld, \"k\": %lld, ",
                comma, backend.c_str(), weight.name, type, static_cast<long long>(n), static_cast<long long>(k));
    std::printf("\"kinds\": \"%s\", \"paths\": {", of_weight.c_str());
    comma = "";
    for (const auto& [name, text] : of_path) {
        std::printf("%s\n\"%s\": \"%s\"", comma, std::string(name).c_str(), text.c_str());
        comma = ",";
    }
    std::printf("}}");
    std::fflush(stdout);
}

void measure_all(const std::vector<std::string>& backends) {
    set_num_threads(1);
    std::printf("{\"rows\": \"");
    for (const std::int64_t m : rows) std::printf("%s%lld", m == 1 ? "" : " ", static_cast<long long>(m));
    std::printf("\",\n\"measured\": [");
    const char* comma = "";
    for (const std::string& backend : backends) {
        const BackendScope scope(backend);
        const bool slow = backend == "portable";
        for (const auto& [n, k] : {std::pair{std::int64_t{1024}, std::int64_t{4096}}, {2048, 1024}})
            for (const Weight& weight : weights(slow ? n / 8 : n, k))
                for (const char* type : {"bfloat16", "float16", "float32", "INT8", "FP8 1x128", "NVFP4"}) {
                    measure_rows(comma, backend, weight, type, slow ? n / 8 : n, k);
                    comma = ",";
                }
    }
    std::printf("]}\n");
}

}  // namespace
}  // namespace breccia

// Of the backends named, or of all.
int main(int argc, char** argv) {
    const std::vector<std::string> named(argv + 1, argv + argc);
    breccia::measure_all(named.empty() ? breccia::cpu_info().supported : named);
}
