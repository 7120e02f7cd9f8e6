// SPDX-License-Identifier: Apache-2.0
//
// Between float32 and the other high-precision types, nearest even.

template <class T>
static void load_run(const void* x, std::int64_t n, float* out) {
    const T* from = static_cast<const T*>(x);
    std::int64_t i = 0;
    if constexpr (!std::is_same_v<T, double>)
        for (; i + lanes <= n; i += lanes) f_store(out + i, f_load_as(from + i));
    for (; i < n; ++i) {
        if constexpr (std::is_floating_point_v<T>)
            out[i] = static_cast<float>(from[i]);
        else
            out[i] = to_float(from[i]);
    }
}

template <class T>
static void store_run(const float* x, std::int64_t n, void* out) {
    T* to = static_cast<T*>(out);
    std::int64_t i = 0;
    if constexpr (!std::is_same_v<T, double>)
        for (; i + lanes <= n; i += lanes) f_store_as(to + i, f_load(x + i));
    for (; i < n; ++i) {
        if constexpr (std::is_floating_point_v<T>)
            to[i] = static_cast<T>(x[i]);
        else if constexpr (std::is_same_v<T, Float16>)
            to[i] = to_float16(x[i]);
        else
            to[i] = to_bfloat16(x[i]);
    }
}
