// SPDX-License-Identifier: Apache-2.0
//
// Many activations that are INT8 codes by a weight whose codes are small integers. A word of each of sixteen weight
// rows meets the same elements of an activation, which are broadcast. So the sum of a block is a lane, becomes a float
// once and takes its row's scale: nothing is added across lanes. Included after the backend's products of words and
// what is named there, and after kernels/integer_packing.inl.hpp.

/// A unit's sums at a time: all of them, and the totals, in registers where there are enough.
template <class Words, int Height, bool XScaled>
static void panel_of(const IntegerPanel& p) {
    constexpr int step = 4, x_bytes = 4 * Height;
    F total[Height];
#pragma GCC unroll 12
    for (int a = 0; a < Height; ++a) total[a] = f_set(0.0F);
    const std::uint8_t* codes = p.codes;
    const std::int8_t* x = p.x;
    const float* scales = p.scales;
    const std::int32_t* starts = p.starts;
    [[maybe_unused]] const float* x_scales = p.x_scales;
    std::int64_t left_of_scale = p.units_per_scale;
    for (std::int64_t left = p.steps; left > 0; left -= p.run) {
        I sums[Height];
#pragma GCC unroll 12
        for (int a = 0; a < Height; ++a) sums[a] = Words::begin(starts[a]);
        for (std::int64_t s = p.run < left ? p.run : left; s > 0; s -= step) {
#pragma GCC unroll 8
            for (int i = 0; i < step; ++i) {
                const I of = i_load(reinterpret_cast<const std::int32_t*>(codes + i * 64));
#pragma GCC unroll 12
                for (int a = 0; a < Height; ++a) {
                    std::int32_t word;
                    __builtin_memcpy(&word, x + i * x_bytes + a * 4, sizeof word);
                    Words::add(sums[a], of, i_set(word));
                }
            }
            codes += step * 64;
            x += step * x_bytes;
        }
        const F scale = f_load(scales);
#pragma GCC unroll 12
        for (int a = 0; a < Height; ++a) {
            F by = scale;
            if constexpr (XScaled) by = f_mul(scale, f_set(x_scales[a]));
            total[a] = f_multiply_add(Words::end(sums[a], starts[a]), by, total[a]);
        }
        starts += Height;
        if constexpr (XScaled) x_scales += Height;
        if (--left_of_scale == 0) {
            left_of_scale = p.units_per_scale;
            scales += 16;
        }
    }
#pragma GCC unroll 12
    for (int a = 0; a < Height; ++a) f_store(p.out + a * p.out_stride, total[a]);
}

template <class Words, int Height>
static void panel_of(const IntegerPanel& p) {
    if (p.x_scales != nullptr) return panel_of<Words, Height, true>(p);
    panel_of<Words, Height, false>(p);
}

template <class Words>
static void multiply_panel(const IntegerPanel& p) {
    if constexpr (panel_heights[1] != 0) {
        if (p.height == panel_heights[0]) return panel_of<Words, panel_heights[0]>(p);
        if (p.height == panel_heights[1]) return panel_of<Words, panel_heights[1]>(p);
        return panel_of<Words, panel_heights[2]>(p);
    } else {
        panel_of<Words, panel_heights[0]>(p);
    }
}

static consteval void add_integer_panels(IntegerKernels& kernels) {
    set_each(kernels.panels.kernels, []<PanelCodec C>() {
        constexpr bool packed = C::bits == 4;
        using Words = std::conditional_t<packed, NibblePanelWords, BytePanelWords>;
        return panel_kernel<C>(multiply_panel<Words>, packed ? 4 : panel_byte_elements);
    });
    kernels.panels.heights = panel_heights;
}
