// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace breccia::inline v0_4 {

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
