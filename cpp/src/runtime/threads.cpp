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
#include <mutex>
#include <string>
#include <thread>

#include "breccia/cpu.hpp"
#include "breccia/error.hpp"
#include "runtime/ieee_arithmetic.hpp"

#if defined(__linux__)
#include <sched.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace breccia {
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

std::atomic<int>& thread_limit() {
    static std::atomic<int> limit{initial_threads()};
    return limit;
}

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

// Lives as long as the process. One job at a time: ranges are handed out by an atomic counter to whoever is awake,
// smaller and smaller ones, so that all threads end at about the same time.
class Pool {
public:
    void run(int threads, std::int64_t count, std::int64_t grain,
             const std::function<void(std::int64_t, std::int64_t)>& body) {
        {
            const std::lock_guard lock(mutex_);
            while (workers_ < threads - 1 && start_worker()) ++workers_;
            body_ = &body;
            count_ = count;
            grain_ = grain;
            threads_ = threads;
            next_.store(0, std::memory_order_relaxed);
            error_ = nullptr;
            seats_ = threads - 1;
            ++job_;
        }
        wake_.notify_all();
        take_ranges(check_interrupt);
        std::unique_lock lock(mutex_);
        seats_ = 0;  // a worker that has not started by now has nothing left to do
        done_.wait(lock, [this] { return busy_ == 0; });
        body_ = nullptr;
        if (error_) std::rethrow_exception(error_);
    }

private:
    // False where the system has no thread to give; the caller's own does the work then.
    bool start_worker() {
        try {
            std::thread([this] { work(); }).detach();
            return true;
        } catch (const std::exception&) {
            return false;
        }
    }

    [[noreturn]] void work() {
        const IeeeArithmetic arithmetic;  // for good: a new thread has the modes of the one that started it
        std::uint64_t seen = 0;
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return job_ != seen && seats_ > 0; });
            seen = job_;
            --seats_;
            ++busy_;
            lock.unlock();
            take_ranges([] {});
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    template <class Check>
    void take_ranges(Check check_between) {
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
                (*body_)(begin, end_of(begin));
                check_between();
            } catch (...) {
                const std::lock_guard lock(mutex_);
                error_ = std::current_exception();
                next_.store(count_, std::memory_order_relaxed);
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(std::int64_t, std::int64_t)>* body_ = nullptr;
    std::int64_t count_ = 0, grain_ = 1, threads_ = 1;
    std::atomic<std::int64_t> next_{0};
    std::exception_ptr error_;
    std::uint64_t job_ = 0;
    int workers_ = 0, seats_ = 0, busy_ = 0;
};

struct SharedPool {
    std::mutex in_use;  // held by the call that uses the pool; whoever finds it held runs on its own thread alone
    Pool pool;
};

// A forked child has none of its parent's threads, so it starts a pool of its own, under a mutex of its own: the
// parent's may be held by a thread that the child does not have. Nothing waits for the parent's work before a fork,
// which may itself wait for the forking thread, in Python for the lock that it holds.
std::atomic<SharedPool*>& shared_pool() {
    static std::atomic<SharedPool*> shared{new SharedPool};
#if !defined(_WIN32)
    static const int registered = pthread_atfork(nullptr, nullptr, [] { shared = new SharedPool; });
    static_cast<void>(registered);
#endif
    return shared;
}

thread_local bool inside_parallel = false;

}  // namespace

void set_num_threads(int count) {
    if (count < 1) throw_value("count must be >= 1, got " + std::to_string(count));
    thread_limit() = count;
}

int num_threads() { return thread_limit(); }

void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
    if (count <= 0) return;
    grain = std::clamp<std::int64_t>(grain, 1, count);
    const int threads = static_cast<int>(std::min<std::int64_t>(num_threads(), (count - 1) / grain + 1));
    if (threads > 1 && !inside_parallel) {
        SharedPool& shared = *shared_pool();
        const std::unique_lock lock(shared.in_use, std::try_to_lock);
        if (lock) {
            inside_parallel = true;
            try {
                shared.pool.run(threads, count, grain, body);
            } catch (...) {
                inside_parallel = false;
                throw;
            }
            inside_parallel = false;
            return;
        }
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

}  // namespace breccia
