// SPDX-License-Identifier: Apache-2.0
//
// What a verb works with: kernels, IEEE arithmetic, working memory, threads.
#pragma once

#include <memory>
#include <type_traits>

#include "breccia/cpu.hpp"
#include "contract/kernel_table.hpp"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace breccia::inline v0_4 {

/// Round to nearest even, no flushing of subnormals and no traps, while it lives, on a thread that someone else may
/// have set otherwise: torch.set_flush_denormal does, and XLA on those it calls back from. Bytes do not depend on it.
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

/// What a thread works with. Nothing of it has a destructor, so that a verb may run in one of a static object, when
/// those of the thread have run.
struct ThreadState {
    const KernelTable* kernels = nullptr;  ///< of the verb that it works for, or of a BackendScope
    struct KeptBlocks* memory = nullptr;   ///< see take_work_block; taken when first asked for
    int memory_users = 0;
    bool in_job = false;  ///< what it calls does not share out work of its own
};
static_assert(std::is_trivially_destructible_v<ThreadState>);
extern thread_local constinit ThreadState this_thread;

/// While it lives, this thread keeps the working memory that it takes for what it does next.
class MemoryScope {
public:
    MemoryScope() { ++this_thread.memory_users; }
    ~MemoryScope() {
        if (--this_thread.memory_users == 0 && this_thread.memory != nullptr) give_memory();
    }
    MemoryScope(const MemoryScope&) = delete;
    MemoryScope& operator=(const MemoryScope&) = delete;

private:
    static void give_memory() noexcept;
};

/// A call of a verb. Each verb makes one before it looks at its arguments, and what it calls takes kernels and threads
/// from there alone: the same kernels on every thread, and the same arithmetic. A verb that is called by another one
/// works with the kernels of the first.
class Call {
public:
    /// Throws Error where BRECCIA_CPU names no backend.
    Call();
    ~Call() { this_thread.kernels = before_; }

    /// The caller's threads, or null for the pool's.
    [[nodiscard]] const Executor* executor() const { return executor_.get(); }

private:
    /// What set_backend() or BRECCIA_CPU names, else the best.
    static const KernelTable& chosen_kernels();

    IeeeArithmetic arithmetic_;
    MemoryScope memory_;
    const KernelTable* before_;
    std::shared_ptr<const Executor> executor_;

public:
    const KernelTable& kernels;
};

}  // namespace breccia::inline v0_4
