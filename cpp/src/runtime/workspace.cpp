// SPDX-License-Identifier: Apache-2.0
#include "runtime/workspace.hpp"

#include <algorithm>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace breccia::inline v0_4 {
namespace {

constexpr std::size_t cache_line = 64, page = 4096, huge_page = std::size_t{2} << 20;
constexpr std::size_t worth_a_huge_page = std::size_t{256} << 10;
/// What a thread keeps at most: activations of 512 rows by 4096 in bfloat16, sums and weights of a panel, and as much.
constexpr std::size_t most_kept = std::size_t{16} << 20;

constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

std::align_val_t alignment_of(std::size_t bytes) {
    return std::align_val_t{bytes >= huge_page ? huge_page : cache_line};
}

void release(const WorkBlock& block) noexcept { ::operator delete(block.data, alignment_of(block.bytes)); }

// Blocks given back, the oldest first.
struct Kept {
    std::vector<WorkBlock> blocks;
    std::size_t bytes = 0;
    Kept() = default;
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;
    ~Kept() { std::ranges::for_each(blocks, release); }
};
thread_local Kept kept;

}  // namespace

WorkBlock take_work_block(std::size_t bytes) {
    bytes = bytes >= worth_a_huge_page ? round_up(bytes, huge_page) : round_up(std::max(bytes, page), page);
    auto best = kept.blocks.end();
    for (auto it = kept.blocks.begin(); it != kept.blocks.end(); ++it)
        if (it->bytes >= bytes && it->bytes <= 2 * bytes && (best == kept.blocks.end() || it->bytes < best->bytes))
            best = it;
    if (best != kept.blocks.end()) {
        const WorkBlock block = *best;
        kept.blocks.erase(best);
        kept.bytes -= block.bytes;
        return block;
    }
    // Room to be given back in, so that giving back cannot fail; first, as it may throw.
    kept.blocks.reserve(kept.blocks.size() + 16);
    const WorkBlock block{.data = ::operator new(bytes, alignment_of(bytes)), .bytes = bytes};
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes >= huge_page) madvise(block.data, bytes, MADV_HUGEPAGE);  // advice: it may be refused
#endif
    return block;
}

void give_work_block(WorkBlock block) noexcept {
    if (block.data == nullptr) return;
    if (block.bytes > most_kept || kept.blocks.size() == kept.blocks.capacity()) return release(block);
    kept.blocks.push_back(block);
    kept.bytes += block.bytes;
    while (kept.bytes > most_kept) {
        kept.bytes -= kept.blocks.front().bytes;
        release(kept.blocks.front());
        kept.blocks.erase(kept.blocks.begin());
    }
}

}  // namespace breccia::inline v0_4
