// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace breccia::python {

/// Round to nearest even and no flushing of subnormals, while it lives, on a thread that someone else set otherwise, as
/// XLA does to those it calls back from.
class IeeeArithmetic {
public:
#if defined(__SSE2__) || defined(_M_X64)
    IeeeArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }  // the power-on value, without traps
    ~IeeeArithmetic() { _mm_setcsr(saved_); }

private:
    unsigned saved_;
#elif defined(__aarch64__)
    IeeeArithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
    }
    ~IeeeArithmetic() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

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

}  // namespace breccia::python
