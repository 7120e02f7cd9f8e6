// SPDX-License-Identifier: Apache-2.0
//
// What takes no memory, or little, in a program of its own: it replaces operator new.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "breccia/breccia.hpp"
#include "breccia/cpu.hpp"
#include "breccia/recipes.hpp"

static int allocations = 0;

// Not inline: gcc would take the calls of malloc and free, which it sees then, for mismatched ones.
[[gnu::noinline]] void* operator new(std::size_t size) {
    ++allocations;
    if (void* memory = std::malloc(size != 0 ? size : 1)) return memory;
    throw std::bad_alloc();
}
// The address that malloc gave stands before the aligned one: Windows has no aligned_alloc.
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
    const auto line = static_cast<std::size_t>(alignment);
    void* memory = operator new(size + line + sizeof(void*));
    const auto first = reinterpret_cast<std::uintptr_t>(memory) + sizeof(void*);
    auto** aligned = reinterpret_cast<void**>((first + line - 1) / line * line);
    aligned[-1] = memory;
    return aligned;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t /*alignment*/) noexcept {
    if (memory != nullptr) std::free(static_cast<void**>(memory)[-1]);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*size*/, std::align_val_t alignment) noexcept {
    operator delete(memory, alignment);
}

namespace {

int failures = 0;

template <class Typed>
void expect_none(const char* what, const Typed& typed) {
    const int before = allocations;
    const breccia::Recipe recipe = typed;
    const int taken = allocations - before;
    if (taken != 0 || recipe.name.empty()) std::printf("%s: %d allocations\n", what, taken), ++failures;
}

// One activation by a weight of INT4: with an output and, from the second call on, none where there is a kernel of
// integers, which the portable backend has not; ten with a new output.
void expect_few_of_linear(const std::string& backend, breccia::DType dtype) {
    using namespace breccia;
    const BackendScope scope(backend);
    constexpr std::int64_t n = 64, k = 512;
    const Array numbers = Array::allocate(DType::float32, {n, k}), bias = Array::allocate(DType::float32, {n});
    for (std::int64_t i = 0; i < n * k; ++i) numbers.as<float>()[i] = static_cast<float>(i * 7919 % 2003 - 1001);
    for (std::int64_t i = 0; i < n; ++i) bias.as<float>()[i] = 1;
    const Array x = Array::allocate(dtype, {1, k}), out = Array::allocate(DType::float32, {1, n});
    for (std::int64_t i = 0; i < k; ++i)
        if (dtype == DType::float32)
            x.as<float>()[i] = static_cast<float>(i);
        else
            x.as<BFloat16>()[i] = to_bfloat16(static_cast<float>(i));
    const ScaledTensor weight = cast(numbers, recipes::int4{});
    const PreparedWeight prepared(weight);
    const Operand activation = x;
    for (const Operand& w : {Operand(weight), Operand(prepared)})
        for (const Array* added : {static_cast<const Array*>(nullptr), &bias}) {
            linear_into(activation, w, added, out);
            const int before = allocations;
            linear_into(activation, w, added, out);
            const int again = allocations - before;
            const Array made = linear(activation, w, added, DType::float32);
            const int in_all = allocations - before - again;
            if ((again == 0 || backend == "portable") && again <= 10 && in_all <= 10) continue;
            std::printf("linear on %s, %s: %d allocations into an output, %d with a new one\n", backend.c_str(),
                        std::string(name_of(dtype)).c_str(), again, in_all);
            ++failures;
        }
}

}  // namespace

int main() {
    using namespace breccia::recipes;
    delete new int;
    if (allocations != 1) return std::puts("operator new is not counted"), 2;
    expect_none("delayed", delayed{.margin = 3});
    expect_none("current", current{.scale_rule = Fp8Rule::transformer_engine});
    expect_none("block", block{.block_m = 128, .scale_format = BlockScale::e8m0});
    expect_none("mxfp8", mxfp8{.scale_rounding = MxRounding::even});
    expect_none("mxfp6", mxfp6{.fp6_format = Fp6Format::e3m2});
    expect_none("mxfp4", mxfp4{.scale_search = breccia::ScaleSearch::mse});
    expect_none("nvfp4", nvfp4{.global_scale_form = GlobalScaleForm::divisor});
    expect_none("int4", int4{.is_signed = false, .symmetric = false});
    expect_none("int8", int8{.group_size = 64});
    breccia::set_num_threads(1);  // each thread keeps memory of its own
    for (const std::string& backend : breccia::cpu_info().supported)
        for (const breccia::DType dtype : {breccia::DType::float32, breccia::DType::bfloat16})
            expect_few_of_linear(backend, dtype);
    return failures;
}
