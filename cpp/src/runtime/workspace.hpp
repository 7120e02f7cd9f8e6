// SPDX-License-Identifier: Apache-2.0
//
// Working memory of kernels. A thread keeps what it gave back for its next call: fresh pages cost a fault each, a
// microsecond on virtual machines. Large blocks lie on huge pages where the system has them, so that walking through
// megabytes does not wait for address translation (docs/design/0005-cpu-kernel-log.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace breccia::inline v0_4 {

/// Uninitialized memory, at least `bytes` of it.
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

    [[nodiscard]] T* data() const { return static_cast<T*>(block_.data); }

private:
    WorkBlock block_;
};

}  // namespace breccia::inline v0_4
