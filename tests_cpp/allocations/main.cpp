// SPDX-License-Identifier: Apache-2.0
//
// What takes no memory, in a program of its own: it replaces operator new.
#include <cstdio>
#include <cstdlib>
#include <new>

#include "breccia/recipes.hpp"

static int allocations = 0;

// Not inline: gcc would take the calls of malloc and free, which it sees then, for mismatched ones.
[[gnu::noinline]] void* operator new(std::size_t size) {
    ++allocations;
    if (void* memory = std::malloc(size != 0 ? size : 1)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }

namespace {

int failures = 0;

template <class Typed>
void expect_none(const char* what, const Typed& typed) {
    const int before = allocations;
    const breccia::Recipe recipe = typed;
    const int taken = allocations - before;
    if (taken != 0 || recipe.name.empty()) std::printf("%s: %d allocations\n", what, taken), ++failures;
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
    return failures;
}
