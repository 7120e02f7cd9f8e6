// SPDX-License-Identifier: Apache-2.0
#include "runtime/threads.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "breccia/cpu.hpp"
#include "breccia/error.hpp"

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

// Lives as long as the process. One job at a time: ranges are handed out by an atomic counter to whoever is awake,
// smaller and smaller ones, so that all threads end at about the same time.
class Pool {
public:
    void run(int threads, std::int64_t count, std::int64_t grain,
             const std::function<void(std::int64_t, std::int64_t)>& body) {
        {
            const std::lock_guard lock(mutex_);
            for (; workers_ < threads - 1; ++workers_) std::thread([this] { work(); }).detach();
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
        take_ranges();
        std::unique_lock lock(mutex_);
        seats_ = 0;  // a worker that has not started by now has nothing left to do
        done_.wait(lock, [this] { return busy_ == 0; });
        body_ = nullptr;
        if (error_) std::rethrow_exception(error_);
    }

private:
    [[noreturn]] void work() {
        std::uint64_t seen = 0;
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return job_ != seen && seats_ > 0; });
            seen = job_;
            --seats_;
            ++busy_;
            lock.unlock();
            take_ranges();
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    void take_ranges() {
        for (;;) {
            const auto end_of = [this](std::int64_t begin) {
                return std::min(begin + std::max(grain_, (count_ - begin) / (2 * threads_)), count_);
            };
            std::int64_t begin = next_.load(std::memory_order_relaxed);
            do {
                if (begin >= count_) return;
            } while (!next_.compare_exchange_weak(begin, end_of(begin), std::memory_order_relaxed));
            try {
                (*body_)(begin, end_of(begin));
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

// Held by the call that uses the pool; whoever finds it held runs serially, which also covers nested calls.
std::mutex& pool_in_use() {
    static auto* mutex = new std::mutex;
    return *mutex;
}

// A forked child has none of its parent's threads, so
// it starts a pool of its own.
Pool*& pool_slot() {
    static Pool* pool = nullptr;
    return pool;
}

Pool& pool() {
#if !defined(_WIN32)
    static const bool registered = [] {
        pthread_atfork([] { pool_in_use().lock(); }, [] { pool_in_use().unlock(); },
                       [] {
                           pool_slot() = nullptr;
                           pool_in_use().unlock();
                       });
        return true;
    }();
    static_cast<void>(registered);
#endif
    if (pool_slot() == nullptr) pool_slot() = new Pool;
    return *pool_slot();
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
    const std::int64_t pieces = (count + grain - 1) / std::max<std::int64_t>(grain, 1);
    const int threads = static_cast<int>(std::min<std::int64_t>(num_threads(), pieces));
    if (threads > 1 && !inside_parallel) {
        const std::unique_lock lock(pool_in_use(), std::try_to_lock);
        if (lock) {
            inside_parallel = true;
            try {
                pool().run(threads, count, std::max<std::int64_t>(grain, 1), body);
            } catch (...) {
                inside_parallel = false;
                throw;
            }
            inside_parallel = false;
            return;
        }
    }
    body(0, count);
}

}  // namespace breccia
