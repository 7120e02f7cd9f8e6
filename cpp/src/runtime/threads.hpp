// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace breccia::inline v0_4 {

/// A function that lives as long as the call it is given to. Unlike std::function it holds no copy, which may take
/// memory.
template <class... Arguments>
class FunctionRef {
public:
    template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
    FunctionRef(const F& function)
        : function_(std::addressof(function)),
          call_([](const void* f, Arguments... arguments) { (*static_cast<const F*>(f))(arguments...); }) {}
    void operator()(Arguments... arguments) const { call_(function_, arguments...); }

private:
    const void* function_;
    void (*call_)(const void*, Arguments...);
};
using RangeBody = FunctionRef<std::int64_t, std::int64_t>;

/// Calls body(begin, end) over [0, count) split into contiguous ranges of at least `grain`, in parallel where that
/// pays. The caller's thread takes part. An exception thrown by a body is rethrown here. Nested calls, and calls made
/// while another thread's is under way, run on the calling thread alone. Where the system refuses threads, those that
/// there are do the work.
void parallel_for(std::int64_t count, std::int64_t grain, RangeBody body);

/// Calls body(i) for i in [0, count), each work that is parallel inside: many are shared out whole, and what is
/// parallel inside then runs on its thread; a few come one by one.
void for_each_large(std::int64_t count, FunctionRef<std::int64_t> body);

/// Calls what set_interrupt_check() was given, unless it did so within the last 50 ms. parallel_for does between
/// ranges.
void check_interrupt();

}  // namespace breccia::inline v0_4
