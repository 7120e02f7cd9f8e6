// SPDX-License-Identifier: Apache-2.0
//
// Which backend runs: the last row of the table this machine supports, unless BRECCIA_CPU or set_backend says
// otherwise.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#include "breccia/cpu.hpp"
#include "breccia/error.hpp"
#include "contract/kernel_table.hpp"
#include "runtime/call.hpp"

#if defined(__x86_64__)
#define BRECCIA_X86 1
#if !defined(BRECCIA_WITHOUT_AMX) && !defined(_WIN32)
#define BRECCIA_AMX 1
#endif
#include <cpuid.h>
#elif defined(__aarch64__)
#define BRECCIA_ARM64 1
#endif

#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace breccia::inline v0_4 {

// Of every backend. A build may leave some out (cpp/cmake/backends.cmake), whose tables are not used below.
namespace portable {
extern constinit const KernelTable kernels;
}
namespace avx2 {
extern constinit const KernelTable kernels;
extern constinit const IntegerKernels integer_kernels, integer_vnni_kernels;
}  // namespace avx2
namespace avx512 {
extern constinit const KernelTable kernels;
extern constinit const IntegerKernels integer_kernels;
}  // namespace avx512
namespace avx512_bf16 {
extern constinit const KernelTable kernels;
}
namespace amx {
extern constinit const ProductKernels matmul_kernels;
}
namespace neon {
extern constinit const KernelTable kernels;
extern constinit const IntegerKernels integer_kernels;
}  // namespace neon

namespace {

struct Features {
    bool neon = false, dotprod = false;
    bool avx2 = false, avx_vnni = false, avx512 = false, avx512_vbmi = false, avx512_vnni = false, avx512_bf16 = false;
    bool avx512_fp16 = false, gfni = false, amx_bf16 = false, amx_int8 = false;
};

#ifdef BRECCIA_X86
struct Registers {
    std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

// The register files the operating system saves on a context switch.
std::uint64_t enabled_state() {
    std::uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<std::uint64_t>(high) << 32 | low;
}

bool has(std::uint32_t word, int bit) { return (word >> bit & 1U) != 0; }

Features detect() {
    Features f;
    const Registers basic = cpuid(1, 0);
    if (!has(basic.ecx, 27)) return f;  // OSXSAVE
    const std::uint64_t state = enabled_state();
    constexpr std::uint64_t ymm = 0x6, zmm = 0xE6, tiles = 0x6'0000;
    const Registers extended = cpuid(7, 0);
    const Registers more = cpuid(7, 1);
    f.avx2 = (state & ymm) == ymm && has(basic.ecx, 12) && has(basic.ecx, 28) && has(basic.ecx, 29) &&
             has(extended.ebx, 5) && has(extended.ebx, 8);
    f.avx_vnni = f.avx2 && has(more.eax, 4);
    f.avx512 = f.avx2 && (state & zmm) == zmm && has(extended.ebx, 16) && has(extended.ebx, 17) &&
               has(extended.ebx, 30) && has(extended.ebx, 31);
    f.avx512_vbmi = f.avx512 && has(extended.ecx, 1);
    f.avx512_vnni = f.avx512 && has(extended.ecx, 11);
    f.gfni = f.avx512 && has(extended.ecx, 8);
    f.avx512_fp16 = f.avx512 && has(extended.edx, 23);
    f.avx512_bf16 = f.avx512 && has(more.eax, 5);
    const bool amx = f.avx512 && (state & tiles) == tiles && has(extended.edx, 24);
    f.amx_bf16 = amx && has(extended.edx, 22);
    f.amx_int8 = amx && has(extended.edx, 25);
    return f;
}
#elif defined(BRECCIA_ARM64)
// NEON is part of the architecture's baseline; its dot products (FEAT_DotProd) are not.
Features detect() {
    Features f{.neon = true};
#if defined(__linux__)
    constexpr unsigned long asimd_dotprod = 1UL << 20;  // HWCAP_ASIMDDP
    f.dotprod = (getauxval(AT_HWCAP) & asimd_dotprod) != 0;
#elif defined(__APPLE__)
    f.dotprod = true;  // every processor of Apple's that runs macOS has them
#endif
    return f;
}
#else
Features detect() { return {}; }
#endif

const Features& features() {
    static const Features found = [] {
        Features f = detect();
#if defined(BRECCIA_EMULATE_AVX512)
        f.avx_vnni = f.avx512 = f.avx512_vbmi = f.avx512_vnni = f.avx512_bf16 = f.avx512_fp16 = f.gfni = f.amx_bf16 =
            true;
#endif
        return f;
    }();
    return found;
}

#ifdef BRECCIA_X86
bool has_avx512_bf16() { return features().avx512_bf16 && features().avx512_vbmi && features().avx512_vnni; }
#endif

#if defined(BRECCIA_X86) && !defined(_WIN32)
// Linux grants a process the large tile registers on request, once for all of its threads.
bool tiles_permitted() {
#if defined(BRECCIA_EMULATE_AVX512)
    return true;
#elif defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted =
        features().amx_bf16 && features().avx512_fp16 && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
#else
    return false;
#endif
}
#endif

// A backend's table with other kernels for products.
struct Variant {
    MatmulKernels matmul;
    KernelTable table;

    Variant(std::string_view name, const KernelTable& base, const MatmulKernels& kernels)
        : matmul(kernels),
          table{.name = name,
                .quantize = base.quantize,
                .dequantize = base.dequantize,
                .matmul = matmul,
                .compare = base.compare,
                .importance = base.importance,
                .adamw = base.adamw} {}
    Variant(const Variant&) = delete;  // the table refers to the kernels beside it
    Variant& operator=(const Variant&) = delete;
};

// The same with products of integers by the instructions for them where the processor has those, else by `Others`.
template <const KernelTable* Base, const IntegerKernels* Quickest, const IntegerKernels* Others>
[[maybe_unused]] const KernelTable* with_integers(bool has_instructions) {
    static const Variant variant(Base->name, *Base, [&] {
        MatmulKernels kernels = Base->matmul;
        kernels.integers = has_instructions ? Quickest : Others;
        return kernels;
    }());
    return &variant.table;
}

#ifdef BRECCIA_AMX
// avx512_bf16 but for the products that are quicker otherwise.
const KernelTable* amx_kernels() {
    static const BF16Kernels bf16 = [] {
        BF16Kernels kernels = *avx512_bf16::kernels.matmul.bf16;
        static_cast<ProductKernels&>(kernels) = amx::matmul_kernels;
        kernels.gemv[static_cast<std::size_t>(format_of<Float8E4M3FN>)] = amx::matmul_kernels.gemv_e4m3;
        return kernels;
    }();
    static const IntegerKernels integers = [] {
        IntegerKernels kernels = *avx512_bf16::kernels.matmul.integers;
        kernels.first_level_cache = amx::matmul_kernels.first_level_cache;
        return kernels;
    }();
    static const Variant variant("amx", avx512_bf16::kernels, [] {
        MatmulKernels kernels = avx512_bf16::kernels.matmul;
        kernels.bf16 = &bf16;
        kernels.integers = &integers;
        return kernels;
    }());
    return &variant.table;
}
#endif

struct Backend {
    std::string_view name;
    bool (*supported)();
    const KernelTable* (*table)() = nullptr;  ///< null where the build left it out
};

// From the slowest to the fastest.
constexpr Backend backends[] = {
    {"portable", [] { return true; }, [] { return &portable::kernels; }},
#ifdef BRECCIA_X86
    {.name = "avx2",
     .supported = [] { return features().avx2; },
#ifndef BRECCIA_WITHOUT_AVX2
     .table =
         [] {
             return with_integers<&avx2::kernels, &avx2::integer_vnni_kernels, &avx2::integer_kernels>(
                 features().avx_vnni);
         }
#endif
    },
    {.name = "avx512",
     .supported = [] { return features().avx512; },
#ifndef BRECCIA_WITHOUT_AVX512
     .table =
         [] {
             return with_integers<&avx512::kernels, &avx512::integer_kernels, &avx2::integer_kernels>(
                 features().avx512_vnni);
         }
#endif
    },
    {.name = "avx512_bf16",
     .supported = has_avx512_bf16,
#ifndef BRECCIA_WITHOUT_AVX512_BF16
     .table = [] { return &avx512_bf16::kernels; }
#endif
    },
#ifndef _WIN32
    {.name = "amx",
     .supported = [] { return has_avx512_bf16() && features().gfni && tiles_permitted(); },
#ifdef BRECCIA_AMX
     .table = amx_kernels
#endif
    },
#endif
#endif
#ifdef BRECCIA_ARM64
    {.name = "neon",
     .supported = [] { return features().neon; },
#ifndef BRECCIA_WITHOUT_NEON
     .table = [] { return with_integers<&neon::kernels, &neon::integer_kernels, nullptr>(features().dotprod); }
#endif
    },
#endif
};

bool runs(const Backend& backend) { return backend.table != nullptr && backend.supported(); }

const KernelTable* best_backend() {
    const KernelTable* best = nullptr;
    for (const Backend& backend : backends)
        if (runs(backend)) best = backend.table();
    return best;
}

const KernelTable* find_backend(std::string_view name, const std::string& who) {
    std::string known;
    for (const Backend& backend : backends) {
        if (backend.name == name) {
            if (runs(backend)) return backend.table();
            if (backend.table == nullptr)
                throw_value(who + " must name a backend of this build, which left out '" + std::string(name) +
                            "' (BRECCIA_BACKENDS)");
            throw_value(who + " must name a backend this machine can run, got '" + std::string(name) + "'");
        }
        known += (known.empty() ? "'" : ", '") + std::string(backend.name) + "'";
    }
    throw_value(who + " must be one of " + known + ", got '" + std::string(name) + "'");
}

// Read with acquire and written with release: a table that was filled at run time comes with what is in it.
std::atomic<const KernelTable*> chosen{nullptr};

}  // namespace

const KernelTable& Call::chosen_kernels() {
    const KernelTable* table = chosen.load(std::memory_order_acquire);
    if (table == nullptr) {
        const char* forced = std::getenv("BRECCIA_CPU");
        table = forced != nullptr && *forced != '\0' ? find_backend(forced, "BRECCIA_CPU") : best_backend();
        chosen.store(table, std::memory_order_release);
    }
    return *table;
}

BackendScope::BackendScope(std::string_view name) : previous_(this_thread.kernels) {
    this_thread.kernels = find_backend(name, "backend");
}
BackendScope::~BackendScope() { this_thread.kernels = static_cast<const KernelTable*>(previous_); }

void set_backend(std::string_view name) {
    chosen.store(name.empty() ? best_backend() : find_backend(name, "backend"), std::memory_order_release);
}

CpuInfo cpu_info() {
    CpuInfo info{.backend = std::string(Call().kernels.name),
                 .supported = {},
                 .left_out = {},
                 .features = {},
                 .threads = num_threads()};
    for (const Backend& backend : backends) {
        if (runs(backend)) info.supported.emplace_back(backend.name);
        if (backend.table == nullptr && backend.supported()) info.left_out.emplace_back(backend.name);
    }
    const Features& f = features();
    const std::pair<bool, const char*> names[] = {
        {f.neon, "neon"},
        {f.dotprod, "dotprod"},
        {f.avx2, "avx2"},
        {f.avx_vnni, "avx_vnni"},
        {f.avx512, "avx512"},
        {f.avx512_vbmi, "avx512_vbmi"},
        {f.avx512_vnni, "avx512_vnni"},
        {f.avx512_bf16, "avx512_bf16"},
        {f.avx512_fp16, "avx512_fp16"},
        {f.gfni, "gfni"},
        {f.amx_bf16, "amx_bf16"},
        {f.amx_int8, "amx_int8"},
    };
    for (const auto& [found, name] : names)
        if (found) info.features.emplace_back(name);
    return info;
}

}  // namespace breccia::inline v0_4
