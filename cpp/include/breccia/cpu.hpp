// SPDX-License-Identifier: Apache-2.0
//
// Which kernels run, and on how many threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "breccia/version.hpp"

namespace breccia::inline v0_4 {

/// What runs on this machine.
struct CpuInfo {
    std::string backend;                 ///< the one in use
    std::vector<std::string> supported;  ///< every backend of this build that the machine can run, slowest first
    std::vector<std::string> left_out;   ///< backends it could run, had the build not left them out
    std::vector<std::string> features;   ///< instruction set extensions found
    int threads;                         ///< that a call may use
};
/// The backend in use and those there are. Throws Error where BRECCIA_CPU names none of them.
BRECCIA_API CpuInfo cpu_info();

/// Which kernel a kind of product takes in the backend in use.
struct MatmulKernel {
    std::string recipe;       ///< of the weight: its name in the catalogue
    std::string activations;  ///< "bfloat16", "float32", "fp8" or "int8"
    bool prepared;            ///< whether the weight is a PreparedWeight
    std::int64_t rows;        ///< of activations
    std::string kernel;       ///< "lanes"; docs/kernels.md says what each is
};
/// By matmul_rules(), for weights as cast() makes them.
BRECCIA_API std::vector<MatmulKernel> matmul_kernels();

/// A row of a backend's table of kernels: the first row that holds for a product, and whose kernel has what the formats
/// need, multiplies it. `unless` names values that make a kernel refuse; the rows after its own are then tried.
struct MatmulRule {
    std::string backend;      ///< "avx2"
    std::string weights;      ///< "any", "prepared", …
    std::string activations;  ///< "any", "codes", "of three terms": bfloat16 numbers that add up to each
    std::string count;        ///< "1 to 8 rows", "25 to 48 terms", "any number"
    std::string kernel;       ///< "lanes"; docs/kernels.md says what each is
    std::string unless;       ///< "scales out of range", … between semicolons; or empty
};
/// Those of every backend, in order, whether this build has it or not.
BRECCIA_API std::vector<MatmulRule> matmul_rules();

/// Forces a backend, as the environment variable BRECCIA_CPU does at start-up. Throws Error when the name is unknown
/// or the machine cannot run it. An empty name goes back to the best one.
BRECCIA_API void set_backend(std::string_view name);

/// Runs this thread's calls on one backend for as long as the object lives; "portable" is the reference.
class BRECCIA_API BackendScope {
public:
    /// Throws Error where set_backend() would.
    explicit BackendScope(std::string_view name);
    /// Puts back the backend that was forced before, if any.
    ~BackendScope();
    BackendScope(const BackendScope&) = delete;
    BackendScope& operator=(const BackendScope&) = delete;

private:
    const void* previous_;
};

/// Threads a call may use, the caller's included; at first BRECCIA_NUM_THREADS or the number of processors this
/// process may run on. Results do not depend on it.
/// Throws Error unless it is positive.
/// @{
BRECCIA_API void set_num_threads(int count);
BRECCIA_API int num_threads();
/// @}

/// While a verb works for long, calls `check` on the thread that called the verb, every 50 ms or less often. What
/// `check` throws ends the verb, whose outputs are then unspecified. Null, as at first, for no such calls.
BRECCIA_API void set_interrupt_check(void (*check)());

/// Runs task(0) to task(count - 1), each once, in any order and on any threads, and returns when all of them have
/// returned. Tasks throw nothing. Those that come late find nothing left to do.
using Executor = std::function<void(int count, const std::function<void(int)>& task)>;
/// Has the caller's own threads do the work in place of the pool, for calls that begin from now on. It may be called by
/// several threads at once, with up to num_threads() - 1 tasks; the thread that called the verb works as well. Results
/// do not depend on it. It must not throw while a task runs; what it throws leaves the verb, whose outputs are then
/// unspecified. Empty: the pool again, with which a forked child begins, too: it has none of its parent's threads.
BRECCIA_API void set_executor(Executor executor);

/// Ends the threads of the pool, once the call that uses them is done, and frees the memory that calls have kept, for a
/// program that is about to unload the library (dlclose). A later call starts them again. Throws Error when called from
/// within a verb.
BRECCIA_API void shutdown();

}  // namespace breccia::inline v0_4
