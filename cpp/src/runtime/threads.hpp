// SPDX-License-Identifier: Apache-2.0
//
// Work that is shared out among threads, the pool's or the caller's executor's, and working memory, which outlasts
// calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "runtime/call.hpp"

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
void parallel_for(const Call& call, std::int64_t count, std::int64_t grain, RangeBody body);

/// Calls body(i) for each i of these ranges.
template <class Body>
void parallel_for_each(const Call& call, std::int64_t count, std::int64_t grain, const Body& body) {
    parallel_for(call, count, grain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) body(i);
    });
}

/// Calls body(i) for i in [0, count), each work that is parallel inside: many are shared out whole, and what is
/// parallel inside then runs on its thread; a few come one by one.
void for_each_large(const Call& call, std::int64_t count, FunctionRef<std::int64_t> body);

/// Calls what set_interrupt_check() was given, unless it did so within the last 50 ms. parallel_for does between
/// ranges.
void check_interrupt();

inline constexpr std::size_t cache_line = 64;

/// Uninitialized memory, at least `bytes` of it. What is given back is kept for the next call: fresh pages cost a fault
/// each, a microsecond on virtual machines. Large blocks lie on huge pages where the system has them, so that
/// walking through megabytes does not wait for address translation (docs/design/0005-cpu-kernel-log.md).
struct WorkBlock {
    void* data = nullptr;
    std::size_t bytes = 0;
};
WorkBlock take_work_block(std::size_t bytes);
void give_work_block(WorkBlock block) noexcept;

/// Uninitialized elements on a cache line: a tile or a vector that straddles two takes up to twice as long to load.
template <class T>
class WorkBuffer {
public:
    WorkBuffer() = default;
    explicit WorkBuffer(std::int64_t n) : block_(take_work_block(static_cast<std::size_t>(n) * sizeof(T))) {}
    WorkBuffer(WorkBuffer&& other) noexcept : block_(std::exchange(other.block_, {})) {}
    WorkBuffer& operator=(WorkBuffer&& other) noexcept {
        std::swap(block_, other.block_);
        return *this;
    }
    ~WorkBuffer() { give_work_block(block_); }
    static WorkBuffer zeros(std::int64_t n) {
        WorkBuffer made(n);
        std::fill_n(made.data(), n, T{});
        return made;
    }

    [[nodiscard]] T* data() const { return static_cast<T*>(block_.data); }

private:
    WorkBlock block_;
};

}  // namespace breccia::inline v0_4
