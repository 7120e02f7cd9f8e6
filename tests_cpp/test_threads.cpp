// SPDX-License-Identifier: Apache-2.0
//
// The caller's thread and the pool's: modes of arithmetic, interruption, forks.
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "breccia/adamw.hpp"
#include "breccia/gptq.hpp"
#include "runtime/threads.hpp"
#include "support.hpp"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace breccia {
namespace {

class ThreadPool : public testing::Test {
protected:
    ~ThreadPool() override {
        set_interrupt_check(nullptr);
        set_num_threads(1);
    }
};

#if defined(__SSE2__) || defined(__aarch64__)
/// Flushing of subnormals to zero, and rounding towards zero, as a caller may have set them.
class OtherModes {
public:
#if defined(__SSE2__)
    OtherModes() : saved_(_mm_getcsr()) { _mm_setcsr(mode); }
    ~OtherModes() { _mm_setcsr(saved_); }
    [[nodiscard]] static bool in_force() { return (_mm_getcsr() & ~0x3FU) == mode; }

private:
    static constexpr unsigned mode = 0x1F80 | 0x8040 | 0x6000;
    unsigned saved_;
#else
    OtherModes() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" ::"r"(mode));
    }
    ~OtherModes() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
    [[nodiscard]] static bool in_force() {
        std::uint64_t now = 0;
        asm volatile("mrs %0, fpcr" : "=r"(now));
        return now == mode;
    }

private:
    static constexpr std::uint64_t mode = 1ULL << 24 | 3ULL << 22;
    std::uint64_t saved_ = 0;
#endif
};

constexpr std::int64_t rows = 24, cols = 256;

/// Subnormal numbers and ordinary ones, and blocks whose scales are subnormal.
std::vector<float> numbers_of_all_sizes() {
    std::vector<float> x = heavy_tailed(rows, cols, 4, 2);
    for (std::size_t i = 0; i < x.size(); i += 3) x[i] = float_from_bits(bits_of(x[i]) & 0x807F'FFFFU);
    for (std::int64_t i = 0; i < 2 * cols; ++i) x[static_cast<std::size_t>(i)] *= 1e-36F;
    return x;
}

// Casts by importance, and by moments of which each is subnormal.
void add_results_of_searches(const Array& x, std::vector<Array>& results) {
    std::vector<float> importance(cols, 1e-40F), moments(cols * cols, 1e-41F), bias(rows, 1e-40F);
    for (std::int64_t i = 0; i < cols; ++i) moments[static_cast<std::size_t>(i * cols + i)] = 1e-40F;
    const Array row = array_of(bias, {rows});
    for (const char* name : {"INT4Scaling", "NVFP4BlockScaling", "MXFP8BlockScaling", "Float8CurrentScaling"}) {
        CastOptions options;
        options.importance = array_of(importance, {cols});
        for (const ScaledTensor& scaled :
             {cast(x, make_recipe(name), options), gptq(x, array_of(moments, {cols, cols}), make_recipe(name))}) {
            results.push_back(scaled.data());
            results.push_back(scaled.scale());
            results.push_back(linear(x, scaled, &row, DType::float64));
            const Comparison sums = compare(x, scaled);
            results.push_back(Array::allocate(DType::float64, {3}));
            std::ranges::copy(std::array{sums.signal, sums.noise, sums.max_error}, results.back().as<double>());
        }
    }
}

// Of AdamW, whose factors are float64 numbers first.
void add_steps(std::vector<Array>& results) {
    const std::vector<float> gradients(4096, 3e-3F);
    for (const std::int64_t step : {1, 7}) {
        const auto filled = [](ElementType type, std::int64_t count, std::uint8_t byte) {
            const Array array = Array::allocate(type, {count});
            std::memset(array.data, byte, static_cast<std::size_t>(count) * type.size());
            return array;
        };
        const auto moment = [&] {
            return Moment{.codes = filled(ElementType::uint8(), 4096, 0x22),
                          .scale = filled(ElementType::uint8(), 128, 120),
                          .exponents = {}};
        };
        const Array weights = filled(DType::float32, 4096, 0x3D);
        const Moment first = moment(), second = moment();
        adamw_step(weights, Array::borrow(gradients, {4096}), first, second, recipes::mxfp8{}, {.step = step});
        for (const Array& array : {weights, first.codes, first.scale, second.codes, second.scale})
            results.push_back(array);
    }
}

std::vector<Array> results_of_every_verb(std::vector<float>& x) {
    const Array array = array_of(x, {rows, cols});
    std::vector<Array> results;
    for (const Recipe& recipe : all_recipes()) {
        const ScaledTensor scaled = cast(array, recipe);
        const ScaledTensor other = requantize(scaled, make_recipe("Float8BlockScaling"));
        for (const Array& part : {scaled.data(), scaled.scale(), other.data(), other.scale(), dequantize(scaled),
                                  dequantize(scaled, DType::bfloat16), matmul(array, scaled.transposed()),
                                  matmul(array, PreparedWeight(scaled.transposed()))})
            results.push_back(part);
    }
    const Array codes = Array::allocate(ElementType::uint8(), {rows * cols}),
                back = Array::allocate(DType::float32, {256});
    encode(x, format_of<Float8E5M2>, {codes.as<std::uint8_t>(), x.size()});
    decode({codes.as<std::uint8_t>(), 256}, format_of<Float8E8M0FNU>, {back.as<float>(), 256});
    results.push_back(codes);
    results.push_back(back);
    add_results_of_searches(array, results);
    add_steps(results);
    return results;
}

TEST_F(ThreadPool, CallersModesOfArithmeticChangeNoByte) {
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        std::vector<float> x = numbers_of_all_sizes();
        const std::vector<Array> expected = results_of_every_verb(x);
        const std::vector<Array> actual = [&] {
            const OtherModes modes;
            std::vector<Array> results = results_of_every_verb(x);
            EXPECT_TRUE(OtherModes::in_force());
            return results;
        }();
        ASSERT_EQ(actual.size(), expected.size());
        for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(same_bytes(actual[i], expected[i])) << name << i;
    }
}

// Also on threads that start while the caller has set them.
TEST_F(ThreadPool, WorkersHaveNoModesOfTheirCaller) {
    std::vector<float> x(std::size_t{1} << 20, float_from_bits(0x0030'0000));
    const Recipe recipe = make_recipe("Float8BlockScaling");
    const Array array = array_of(x, {1 << 10, 1 << 10});
    const ScaledTensor expected = cast(array, recipe);
    const OtherModes modes;
    set_num_threads(7);
    const ScaledTensor actual = cast(array, recipe);
    EXPECT_TRUE(same_bytes(actual.data(), expected.data()));
    EXPECT_TRUE(same_bytes(actual.scale(), expected.scale()));
}
#endif

struct Interrupted {};
std::atomic<int> checks{0};
std::thread::id caller;

TEST_F(ThreadPool, LongWorkIsInterrupted) {
    for (const int threads : {1, 3}) {
        set_num_threads(threads);
        checks = 0;
        caller = std::this_thread::get_id();
        set_interrupt_check([] {
            EXPECT_EQ(std::this_thread::get_id(), caller);
            if (++checks == 2) throw Interrupted();
        });
        std::atomic<std::int64_t> done{0};
        constexpr std::int64_t count = 100'000;
        const auto work = [&] {
            parallel_for(Call(), count, 1, [&](std::int64_t begin, std::int64_t end) {
                std::this_thread::sleep_for(std::chrono::milliseconds(end - begin));
                done += end - begin;
            });
        };
        EXPECT_THROW(work(), Interrupted);
        EXPECT_LT(done, 2000) << threads;  // two checks are some 50 ms apart
        set_interrupt_check(nullptr);
        done = 0;  // the pool goes on
        parallel_for(Call(), 64, 1, [&](std::int64_t begin, std::int64_t end) { done += end - begin; });
        EXPECT_EQ(done, 64);
    }
}

TEST_F(ThreadPool, RangesCoverEverythingOnce) {
    for (const int threads : {1, 2, 5}) {
        set_num_threads(threads);
        for (const std::int64_t count : {1, 2, 63, 64, 1000, 4097})
            for (const std::int64_t grain : {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, std::int64_t{5000},
                                             std::numeric_limits<std::int64_t>::max()}) {
                std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
                parallel_for(Call(), count, grain, [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
                });
                for (const auto& n : visits) ASSERT_EQ(n, 1) << threads << ' ' << count << ' ' << grain;
            }
    }
}

TEST_F(ThreadPool, ManyCallersShareThePool) {
    set_num_threads(3);
    std::vector<float> x = heavy_tailed(256, 512, 1, 2);
    const Recipe recipe = make_recipe("NVFP4BlockScaling");
    const ScaledTensor expected = cast(array_of(x, {256, 512}), recipe);
    std::vector<std::thread> callers;
    std::atomic<int> same{0};
    for (int i = 0; i < 4; ++i)
        callers.emplace_back([&] {
            for (int round = 0; round < 20; ++round)
                same += static_cast<int>(same_bytes(cast(array_of(x, {256, 512}), recipe).data(), expected.data()));
        });
    for (int count = 1; count < 6; ++count) set_num_threads(count);
    for (std::thread& thread : callers) thread.join();
    EXPECT_EQ(same, 80);
}

#if defined(__unix__)
// A child has none of its parent's threads, and its parent may be in the middle of a call.
TEST_F(ThreadPool, AForkNeitherWaitsForACallNorInheritsIt) {
    set_num_threads(3);
    std::atomic<bool> inside{false}, stop{false};
    std::thread busy([&] {
        parallel_for(Call(), 3, 1, [&](std::int64_t, std::int64_t) {
            inside = true;
            while (!stop) std::this_thread::yield();
        });
    });
    while (!inside) std::this_thread::yield();
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        std::atomic<std::int64_t> sum{0};
        parallel_for(Call(), 1000, 1, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
        _exit(sum == 1000 ? 0 : 1);
    }
    stop = true;
    busy.join();
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// Nor has it the threads of an executor: it works with a pool of its own.
TEST_F(ThreadPool, AForkDoesNotWaitForTheThreadsOfAnExecutor) {
    set_num_threads(3);
    const pid_t parent = getpid();
    set_executor([parent](int count, const std::function<void(int)>& task) {
        while (getpid() != parent) std::this_thread::yield();  // for a thread that is not there
        for (int i = 0; i < count; ++i) task(i);
    });
    std::atomic<bool> stop{false};
    std::thread setting([&] {
        while (!stop) set_executor([](int, const std::function<void(int)>& task) { task(0); });
    });
    const auto forks = [] {
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);
            std::atomic<std::int64_t> sum{0};
            parallel_for(Call(), 1000, 1, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
            _exit(sum == 1000 ? 0 : 1);
        }
        int status = -1;
        EXPECT_EQ(waitpid(child, &status, 0), child);
        return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    };
    int ended = 0;
    for (int i = 0; i < 50; ++i) ended += static_cast<int>(forks());
    stop = true;
    setting.join();
    EXPECT_EQ(ended, 50);
    set_executor([parent](int count, const std::function<void(int)>& task) {
        while (getpid() != parent) std::this_thread::yield();
        for (int i = 0; i < count; ++i) task(i);
    });
    EXPECT_TRUE(forks());
    set_executor({});
}
#endif

}  // namespace
}  // namespace breccia
