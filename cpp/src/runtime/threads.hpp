// SPDX-License-Identifier: Apache-2.0
//
// The pool of threads, and each thread's mode of arithmetic and working memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

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

/// Calls body(i) for each i of these ranges.
template <class Body>
void parallel_for_each(std::int64_t count, std::int64_t grain, const Body& body) {
    parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) body(i);
    });
}

/// Calls body(i) for i in [0, count), each work that is parallel inside: many are shared out whole, and what is
/// parallel inside then runs on its thread; a few come one by one.
void for_each_large(std::int64_t count, FunctionRef<std::int64_t> body);

/// Calls what set_interrupt_check() was given, unless it did so within the last 50 ms. parallel_for does between
/// ranges.
void check_interrupt();

inline constexpr std::size_t cache_line = 64;

/// Uninitialized memory, at least `bytes` of it. A thread keeps what it gave back for its next call: fresh pages cost a
/// fault each, a microsecond on virtual machines. Large blocks lie on huge pages where the system has them, so that
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

/// Round to nearest even, no flushing of subnormals and no traps, while it lives, on a thread that someone else may
/// have set otherwise: torch.set_flush_denormal does, and XLA on those it calls back from. Every verb opens one, and
/// every thread of the pool, so that bytes do not depend on it.
class IeeeArithmetic {
public:
#if defined(__SSE2__)
    IeeeArithmetic() : saved_(_mm_getcsr()) {
        if ((saved_ & ~flags) != power_on) _mm_setcsr(power_on);
    }
    ~IeeeArithmetic() {
        if ((saved_ & ~flags) != power_on) _mm_setcsr(saved_);
    }

private:
    static constexpr unsigned power_on = 0x1F80, flags = 0x3F;  // MXCSR when a thread starts; its sticky flags
    unsigned saved_;
#elif defined(__aarch64__)
    IeeeArithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
    }
    ~IeeeArithmetic() {
        if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(saved_));
    }

private:
    std::uint64_t saved_ = 0;
#else
    IeeeArithmetic() {}
    ~IeeeArithmetic() {}
#endif

public:
    IeeeArithmetic(const IeeeArithmetic&) = delete;
    IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;
};

}  // namespace breccia::inline v0_4
