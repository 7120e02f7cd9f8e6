// SPDX-License-Identifier: Apache-2.0
#include "runtime/threads.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "breccia/cpu.hpp"
#include "breccia/error.hpp"

#if defined(__linux__)
#include <sys/mman.h>

#include <sched.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace breccia::inline v0_4 {

thread_local constinit ThreadState this_thread;

namespace {

int available_processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int initial_threads() {
    const char* text = std::getenv("BRECCIA_NUM_THREADS");
    if (text == nullptr || *text == '\0') return available_processors();
    int count = 0;
    const char* end = text + std::strlen(text);
    if (std::from_chars(text, end, count).ptr != end || count < 1)
        throw_value("BRECCIA_NUM_THREADS must be a positive integer, got '" + std::string(text) + "'");
    return count;
}

constinit std::atomic<int> thread_limit{0};  // 0: not asked for yet

std::atomic<void (*)()> interrupt_check{nullptr};

using Clock = std::chrono::steady_clock;

// How long a range may be. Between ranges the caller's thread looks whether it was interrupted, so none should take
// more than some milliseconds, and nobody knows beforehand what an element costs: a few grains first, then twice as
// much for as long as that was quick.
class RangeLength {
public:
    RangeLength(std::int64_t count, std::int64_t grain) : count_(count), most_(grain < count / 4 ? 4 * grain : count) {
        if (most_ < count) began_ = Clock::now();
    }
    [[nodiscard]] std::int64_t most() const { return most_; }
    void next() {
        constexpr std::chrono::milliseconds quick{5};
        const Clock::time_point now = Clock::now();
        if (now - began_ < quick) most_ = most_ < count_ / 2 ? 2 * most_ : count_;
        began_ = now;
    }

private:
    std::int64_t count_, most_;
    Clock::time_point began_;
};

// That this thread works on a job: it has the surroundings of the call whose job it is.
class Inside {
public:
    explicit Inside(const Call& call) {
        this_thread.kernels = &call.kernels;
        this_thread.in_job = true;
    }
    ~Inside() {
        this_thread.kernels = kernels_before_;
        this_thread.in_job = in_job_before_;
    }

private:
    IeeeArithmetic arithmetic_;  // a new thread has the modes of the one that started it
    MemoryScope memory_;
    const KernelTable* kernels_before_ = this_thread.kernels;
    bool in_job_before_ = this_thread.in_job;
};

// Ranges are handed out by an atomic counter to whoever asks, smaller and smaller ones, so that all threads end at
// about the same time.
class Job {
public:
    Job(const Call& call, int threads, std::int64_t count, std::int64_t grain, RangeBody body)
        : call_(call), body_(body), count_(count), grain_(grain), threads_(threads) {}

    // Works until no range is left.
    template <class Check>
    void take_ranges(Check check_between) {
        const Inside inside(call_);
        RangeLength length(count_, grain_);
        for (;; length.next()) {
            const auto end_of = [&](std::int64_t begin) {
                const std::int64_t share = std::max(grain_, (count_ - begin) / (2 * threads_));
                return begin + std::min({share, length.most(), count_ - begin});
            };
            std::int64_t begin = next_.load(std::memory_order_relaxed);
            do {
                if (begin >= count_) return;
            } while (!next_.compare_exchange_weak(begin, end_of(begin), std::memory_order_relaxed));
            try {
                body_(begin, end_of(begin));
                check_between();
            } catch (...) {
                const std::lock_guard lock(mutex_);
                error_ = std::current_exception();
                abandon();
            }
        }
    }
    void abandon() { next_.store(count_, std::memory_order_relaxed); }
    // Once nobody works any more: throws what a body threw.
    void rethrow() const {
        if (error_) std::rethrow_exception(error_);
    }

private:
    const Call& call_;
    RangeBody body_;
    std::int64_t count_, grain_, threads_;
    std::atomic<std::int64_t> next_{0};
    std::mutex mutex_;
    std::exception_ptr error_;
};

// Lives as long as the process, its threads until stop(). One job at a time.
class Pool {
public:
    void run(int threads, Job& job) {
        {
            const std::lock_guard lock(mutex_);
            while (static_cast<int>(workers_.size()) < threads - 1 && start_worker()) {}
            job_ = &job;
            seats_ = threads - 1;
            ++jobs_;
        }
        wake_.notify_all();
        job.take_ranges(check_interrupt);
        std::unique_lock lock(mutex_);
        seats_ = 0;  // a worker that has not started by now has nothing left to do
        done_.wait(lock, [this] { return busy_ == 0; });
        job_ = nullptr;
        lock.unlock();
        job.rethrow();
    }

    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

private:
    // False where the system has no thread to give; the caller's own does the work then.
    bool start_worker() {
        try {
            workers_.emplace_back([this, seen = jobs_] { work(seen); });
            return true;
        } catch (const std::exception&) {
            return false;
        }
    }

    void work(std::uint64_t seen) {
        const MemoryScope memory;  // for good
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return stopping_ || (jobs_ != seen && seats_ > 0); });
            if (stopping_) return;
            seen = jobs_;
            Job& job = *job_;
            --seats_;
            ++busy_;
            lock.unlock();
            job.take_ranges([] {});
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    Job* job_ = nullptr;
    std::uint64_t jobs_ = 0;
    int seats_ = 0, busy_ = 0;
    bool stopping_ = false;
};

void run_with(const Executor& executor, int threads, Job& job) {
    const auto task = [&job](int) { job.take_ranges([] {}); };
    try {
        executor(threads - 1, task);
    } catch (...) {
        job.abandon();
        throw;
    }
    job.take_ranges(check_interrupt);  // what an executor of few threads left
    job.rethrow();
}

// What calls share: the pool, or the caller's executor.
struct Shared {
    std::mutex in_use;  // held by the call that uses the pool; whoever finds it held runs on its own thread alone
    Pool pool;

    std::mutex of_executor;
    std::atomic<bool> has_executor{false};
    std::shared_ptr<const Executor> executor;  // of the calls that are under way with it, too

    Shared* of_parent = nullptr;  // what the processes before this one's fork shared
};

// Never destroyed: a verb may run while the process ends. A forked child has none of its parent's threads, neither
// those of the pool nor the caller's, so it begins anew, with mutexes of its own: the parent's may be held by a thread
// that the child does not have. Nothing waits for the parent's work before a fork, which may itself wait for the
// forking thread, in Python for the lock that it holds.
constinit std::atomic<Shared*> all_shared{nullptr};
constinit Shared* parents_shared = nullptr;  // never used, but reachable: a leak checker counts what nothing points to
#if !defined(_WIN32)
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
    if (Shared* all = all_shared.exchange(nullptr)) parents_shared = all;
});
#endif

Shared& shared() {
    if (Shared* found = all_shared) return *found;
    auto made = std::make_unique<Shared>();
    made->of_parent = parents_shared;
    Shared* found = nullptr;
    return all_shared.compare_exchange_strong(found, made.get()) ? *made.release() : *found;
}

constexpr std::size_t page = 4096, huge_page = std::size_t{2} << 20;
constexpr std::size_t worth_a_huge_page = std::size_t{256} << 10;
/// What a thread keeps at most: activations of 512 rows by 4096 in bfloat16, sums and weights of a panel, and as much.
constexpr std::size_t most_kept = std::size_t{16} << 20;

constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

std::align_val_t alignment_of(std::size_t bytes) {
    return std::align_val_t{bytes >= huge_page ? huge_page : cache_line};
}

void release(const WorkBlock& block) noexcept { ::operator delete(block.data, alignment_of(block.bytes)); }

}  // namespace

// Blocks given back, the oldest first.
struct KeptBlocks {
    std::vector<WorkBlock> blocks;
    std::size_t bytes = 0;
    KeptBlocks() = default;
    KeptBlocks(const KeptBlocks&) = delete;
    KeptBlocks& operator=(const KeptBlocks&) = delete;
    ~KeptBlocks() { std::ranges::for_each(blocks, release); }
};

namespace {

// What calls have left for those to come, on whatever thread: never destroyed, as a verb may run while the process
// ends. A thread looks first where it left its own.
constexpr std::size_t places = 64;
constinit std::atomic<KeptBlocks*> left[places];
thread_local constinit std::size_t own_place = 0;

KeptBlocks* take_kept() {
    for (std::size_t i = 0; i < places; ++i) {
        std::atomic<KeptBlocks*>& place = left[(own_place + i) % places];
        if (place.load(std::memory_order_relaxed) == nullptr) continue;
        if (KeptBlocks* found = place.exchange(nullptr, std::memory_order_acquire)) return found;
    }
    return new KeptBlocks;
}

}  // namespace

Call::Call() : before_(this_thread.kernels), kernels(before_ != nullptr ? *before_ : chosen_kernels()) {
    if (Shared& all = shared(); all.has_executor) {
        const std::lock_guard lock(all.of_executor);
        executor_ = all.executor;
    }
    this_thread.kernels = &kernels;
}

void set_num_threads(int count) {
    if (count < 1) throw_value("count must be >= 1, got " + std::to_string(count));
    thread_limit = count;
}

int num_threads() {
    int limit = thread_limit;
    if (limit == 0 && thread_limit.compare_exchange_strong(limit, initial_threads())) return thread_limit;
    return limit;
}

void parallel_for(const Call& call, std::int64_t count, std::int64_t grain, RangeBody body) {
    if (count <= 0) return;
    grain = std::clamp<std::int64_t>(grain, 1, count);
    const int threads = static_cast<int>(std::min<std::int64_t>(num_threads(), (count - 1) / grain + 1));
    if (threads > 1 && !this_thread.in_job) {
        Job job(call, threads, count, grain, body);
        if (const Executor* executor = call.executor()) return run_with(*executor, threads, job);
        Shared& all = shared();
        const std::unique_lock lock(all.in_use, std::try_to_lock);
        if (lock) return all.pool.run(threads, job);
    }
    RangeLength length(count, grain);
    for (std::int64_t begin = 0;;) {
        const std::int64_t end = begin + std::min(length.most(), count - begin);
        body(begin, end);
        if (end == count) return;
        check_interrupt();
        length.next();
        begin = end;
    }
}

void for_each_large(const Call& call, std::int64_t count, FunctionRef<std::int64_t> body) {
    parallel_for_each(call, count, count >= 4 * num_threads() ? 1 : count, body);
}

void set_executor(Executor executor) {
    auto next = executor ? std::make_shared<const Executor>(std::move(executor)) : nullptr;
    Shared& all = shared();
    const std::lock_guard lock(all.of_executor);
    all.has_executor = next != nullptr;
    all.executor.swap(next);
}

void shutdown() {
    if (this_thread.in_job) throw_value("shutdown() must not be called from within a verb");
    Shared& all = shared();
    const std::lock_guard lock(all.in_use);
    all.pool.stop();
    for (std::atomic<KeptBlocks*>& place : left) delete place.exchange(nullptr, std::memory_order_acquire);
}

void set_interrupt_check(void (*check)()) { interrupt_check = check; }

void check_interrupt() {
    void (*const check)() = interrupt_check;
    if (check == nullptr) return;
    constexpr std::chrono::milliseconds between{50};
    static thread_local Clock::time_point last;
    const Clock::time_point now = Clock::now();
    if (now - last < between) return;
    last = now;
    check();
}

void MemoryScope::give_memory() noexcept {
    KeptBlocks* memory = std::exchange(this_thread.memory, nullptr);
    for (std::size_t i = 0; i < places; ++i) {
        const std::size_t place = (own_place + i) % places;
        KeptBlocks* none = nullptr;
        if (!left[place].compare_exchange_strong(none, memory, std::memory_order_release, std::memory_order_relaxed))
            continue;
        own_place = place;
        return;
    }
    delete memory;
}

WorkBlock take_work_block(std::size_t bytes) {
    bytes = bytes >= worth_a_huge_page ? round_up(bytes, huge_page) : round_up(std::max(bytes, page), page);
    if (this_thread.memory == nullptr && this_thread.memory_users > 0) this_thread.memory = take_kept();
    if (KeptBlocks* kept = this_thread.memory) {
        auto best = kept->blocks.end();
        for (auto it = kept->blocks.begin(); it != kept->blocks.end(); ++it)
            if (it->bytes >= bytes && it->bytes <= 2 * bytes && (best == kept->blocks.end() || it->bytes < best->bytes))
                best = it;
        if (best != kept->blocks.end()) {
            const WorkBlock block = *best;
            kept->blocks.erase(best);
            kept->bytes -= block.bytes;
            return block;
        }
        // Room to be given back in, so that giving back cannot fail; first, as it may throw.
        kept->blocks.reserve(kept->blocks.size() + 16);
    }
    const WorkBlock block{.data = ::operator new(bytes, alignment_of(bytes)), .bytes = bytes};
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes >= huge_page) madvise(block.data, bytes, MADV_HUGEPAGE);  // advice: it may be refused
#endif
    return block;
}

void give_work_block(WorkBlock block) noexcept {
    if (block.data == nullptr) return;
    KeptBlocks* kept = this_thread.memory;
    if (kept == nullptr || block.bytes > most_kept || kept->blocks.size() == kept->blocks.capacity())
        return release(block);
    kept->blocks.push_back(block);
    kept->bytes += block.bytes;
    while (kept->bytes > most_kept) {
        kept->bytes -= kept->blocks.front().bytes;
        release(kept->blocks.front());
        kept->blocks.erase(kept->blocks.begin());
    }
}

}  // namespace breccia::inline v0_4
