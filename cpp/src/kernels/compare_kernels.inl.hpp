// SPDX-License-Identifier: Apache-2.0
//
// What compares: sums over pairs of numbers in float64, in eight lanes, over the Doubles of vec.hpp.
//
// Every backend gives the same sums: it adds the same numbers in the same order, and the product of two floats is exact
// in float64, so that rounding it apart from the sum changes nothing.

inline constexpr int vector_bytes = sizeof(Doubles);

using Longs = std::int64_t __attribute__((vector_size(vector_bytes)));
using HalfFloats = float __attribute__((vector_size(vector_bytes / 2)));  // as many as there are Doubles
using Floats = float __attribute__((vector_size(vector_bytes)));
using Words = std::int32_t __attribute__((vector_size(vector_bytes)));
using HalfWords = std::uint16_t __attribute__((vector_size(vector_bytes / 2)));

inline constexpr std::int64_t doubles = vector_bytes / 8, floats = vector_bytes / 4;

template <class V, class T>
BRECCIA_INLINE V load_vector(const T* p) {
    V x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
BRECCIA_INLINE Doubles load_doubles(const double* p) { return load_vector<Doubles>(p); }
BRECCIA_INLINE Doubles load_doubles(const float* p) {
    return __builtin_convertvector(load_vector<HalfFloats>(p), Doubles);
}

BRECCIA_INLINE Doubles magnitude(Doubles x) {
    return __builtin_bit_cast(Doubles, __builtin_bit_cast(Longs, x) & std::numeric_limits<std::int64_t>::max());
}

// Lanes [first, first + doubles), of numbers that were T.
template <class T>
struct LaneSums {
    Doubles signal, other, dot, noise, worst;

    BRECCIA_INLINE_MEMBER LaneSums(const ErrorLanes& s, std::int64_t first)
        : signal(load_doubles(s.signal + first)),
          other(load_doubles(s.other + first)),
          dot(load_doubles(s.dot + first)),
          noise(load_doubles(s.noise + first)),
          worst(load_doubles(s.worst + first)) {}
    BRECCIA_INLINE_MEMBER void add(Doubles x, Doubles y) {
        const Doubles error = x - y, square = error * error;
        signal = product_add(x, x, signal);
        other = product_add(y, y, other);
        dot = product_add(x, y, dot);
        noise += square;
        worst = d_larger(std::is_same_v<T, float> ? square : magnitude(error), worst);
    }
    BRECCIA_INLINE_MEMBER static Doubles product_add(Doubles a, Doubles b, Doubles c) {
        if constexpr (std::is_same_v<T, float>) return d_multiply_add(a, b, c);
        return a * b + c;
    }
    BRECCIA_INLINE_MEMBER void store(ErrorLanes& s, std::int64_t first) const {
        __builtin_memcpy(s.signal + first, &signal, sizeof signal);
        __builtin_memcpy(s.other + first, &other, sizeof other);
        __builtin_memcpy(s.dot + first, &dot, sizeof dot);
        __builtin_memcpy(s.noise + first, &noise, sizeof noise);
        __builtin_memcpy(s.worst + first, &worst, sizeof worst);
    }
};

// A few of the eight lanes at a time, so that their sums stay in registers.
template <std::int64_t Vectors, class T>
BRECCIA_INLINE void add_to_lanes(const T* x, const T* y, std::int64_t n, std::int64_t first, ErrorLanes& sums) {
    constexpr std::int64_t step = ErrorLanes::lanes;
    LaneSums<T> a(sums, first), b(sums, first + (Vectors - 1) * doubles);
    for (std::int64_t i = first; i < n; i += step) {
        a.add(load_doubles(x + i), load_doubles(y + i));
        if constexpr (Vectors == 2) b.add(load_doubles(x + i + doubles), load_doubles(y + i + doubles));
    }
    a.store(sums, first);
    if constexpr (Vectors == 2) b.store(sums, first + doubles);
}

// `n` is a multiple of the lanes.
template <class T>
BRECCIA_INLINE void add_whole(const T* x, const T* y, std::int64_t n, ErrorLanes& sums) {
    constexpr std::int64_t vectors = doubles < ErrorLanes::lanes ? 2 : 1;
    for (std::int64_t first = 0; first < ErrorLanes::lanes; first += vectors * doubles)
        add_to_lanes<vectors>(x, y, n, first, sums);
}

template <class T>
static void add_errors(const T* x, const T* y, std::int64_t n, ErrorLanes& sums) {
    const std::int64_t whole = n / ErrorLanes::lanes * ErrorLanes::lanes;
    add_whole(x, y, whole, sums);
    if (whole == n) return;
    T last_x[ErrorLanes::lanes] = {}, last_y[ErrorLanes::lanes] = {};
    for (std::int64_t i = whole; i < n; ++i) last_x[i - whole] = x[i], last_y[i - whole] = y[i];
    add_whole(last_x, last_y, ErrorLanes::lanes, sums);
}

// Half octaves by the exponent field and whether the mantissa is above that of the square root of two. Subnormal
// numbers are moved up 32 octaves first, and all others' bins with them. Returns bits of the largest quotients.
BRECCIA_INLINE Words bins_of(Floats error, float unit, std::uint16_t* bins) {
    constexpr std::int32_t below_root_of_two = 0x3504F3, mantissa = 0x7F'FFFF, least_normal = 0x80'0000;
    constexpr std::int32_t infinity = f32_infinity_bits, absolute = f32_abs_mask, moved_bins = 64;
    const Words size = __builtin_bit_cast(Words, error) & absolute;
    const Floats quotient = __builtin_bit_cast(Floats, size) / unit;
    Words q = __builtin_bit_cast(Words, quotient);
    q = q < infinity ? q : Words{} + (infinity - 1);
    const Words normal = q >= least_normal;  // -1 where it is so
    const Words b = normal ? q : __builtin_bit_cast(Words, quotient * 0x1p32F);
    const Words above = (b & mantissa) > below_root_of_two;
    const Words bin = 2 * (b >> 23) - above + (normal & moved_bins);
    const Words finite = size < infinity;
    const HalfWords result = __builtin_convertvector(finite ? bin : Words{} + (magnitude_bins - 1), HalfWords);
    __builtin_memcpy(bins, &result, sizeof result);
    return q & finite;
}

BRECCIA_INLINE Words larger(Words a, Words b) { return a > b ? a : b; }

template <bool Difference>
BRECCIA_INLINE std::uint32_t bins_of_row(const float* x, const float* y, float unit, std::int64_t n,
                                         std::uint16_t* bins) {
    Words largest{};
    std::int64_t i = 0;
    for (; i + floats <= n; i += floats) {
        Floats error = load_vector<Floats>(x + i);
        if constexpr (Difference) error = load_vector<Floats>(y + i) - error;
        largest = larger(bins_of(error, unit, bins + i), largest);
    }
    if (i < n) {
        const auto rest = static_cast<std::size_t>(n - i);
        Floats error{}, second{};
        std::uint16_t last[floats];
        __builtin_memcpy(&error, x + i, rest * sizeof(float));
        if constexpr (Difference) {
            __builtin_memcpy(&second, y + i, rest * sizeof(float));
            error = second - error;
        }
        largest = larger(bins_of(error, unit, last), largest);
        __builtin_memcpy(bins + i, last, rest * sizeof(std::uint16_t));
    }
    std::int32_t most = 0;
    for (std::int64_t lane = 0; lane < floats; ++lane) most = largest[lane] > most ? largest[lane] : most;
    return static_cast<std::uint32_t>(most);
}

static std::uint32_t bins_of_magnitudes(const float* x, const float* y, float unit, std::int64_t n,
                                        std::uint16_t* bins) {
    return y != nullptr ? bins_of_row<true>(x, y, unit, n, bins) : bins_of_row<false>(x, y, unit, n, bins);
}

static consteval CompareKernels make_compare_kernels() {
    return {.add = add_errors<float>, .add_doubles = add_errors<double>, .bins = bins_of_magnitudes};
}
