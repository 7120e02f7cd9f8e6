// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace breccia {

/// Working memory of a kernel: uninitialized, on a cache line. A tile or a vector that straddles two lines takes up to
/// twice as long to load.
template <class T>
class AlignedBuffer {
public:
    AlignedBuffer() = default;
    explicit AlignedBuffer(std::int64_t n)
        : data_(static_cast<T*>(::operator new(static_cast<std::size_t>(n) * sizeof(T), line))) {}

    [[nodiscard]] T* data() const { return data_.get(); }

private:
    static constexpr std::align_val_t line{64};
    struct Free {
        void operator()(T* p) const { ::operator delete(p, line); }
    };
    std::unique_ptr<T, Free> data_;
};

}  // namespace breccia
