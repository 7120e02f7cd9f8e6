// SPDX-License-Identifier: Apache-2.0
//
// Tensors as the verbs see them: a batch of (rows, columns) matrices in storage order, columns being the axis codes
// are packed along. Reads a row of any source into contiguous float32.
#pragma once

#include <cstring>
#include <vector>

#include "breccia/scaled_tensor.hpp"
#include "contract/kernel_table.hpp"

namespace breccia::inline v0_4 {

/// One number of any type, at any address, as float or double, of which double holds the numbers of every type.
template <class Wide>
Wide load_number(const std::byte* from, DType dtype) {
    const auto as = [&]<class T>(T x) {
        std::memcpy(&x, from, sizeof x);
        return x;
    };
    switch (dtype) {
        case DType::float32: return as(float{});
        case DType::float64: return static_cast<Wide>(as(double{}));
        case DType::float16: return to_float(as(Float16{}));
        case DType::bfloat16: return to_float(as(BFloat16{}));
    }
    return 0;
}

/// Rounded to the type; to one of 16 bits by way of float32.
template <class Wide>
void store_number(std::byte* to, DType dtype, Wide x) {
    const auto put = [&](auto rounded) { std::memcpy(to, &rounded, sizeof rounded); };
    const auto single = static_cast<float>(x);
    switch (dtype) {
        case DType::float32: return put(single);
        case DType::float64: return put(static_cast<double>(x));
        case DType::float16: return put(to_float16(single));
        case DType::bfloat16: return put(to_bfloat16(single));
    }
}

/// Byte offset of batch member `index` in an array whose leading axes, all but the last `trailing`, are `extents`. An
/// array of fewer axes than the batch is broadcast, as is one with an extent of 1.
std::int64_t batch_offset(const Array& array, const Shape& extents, std::int64_t index, std::size_t trailing = 2);

/// An array's elements, in the order of its axes, to bytes that follow one another.
void copy_elements(const Array& from, std::byte* to);

/// The axes before the last two.
Shape batch_shape(const Shape& shape);

/// One matrix of numbers of any type and strides.
struct NumberMatrix {
    const std::byte* data = nullptr;
    DType dtype = DType::float32;
    std::int64_t rows = 0, cols = 0;
    std::int64_t row_stride = 0, col_stride = 0;  // bytes

    [[nodiscard]] const std::byte* element(std::int64_t row, std::int64_t col) const {
        return data + row * row_stride + col * col_stride;
    }
    /// Whether elements [begin, begin + n) of a row lie side by side and aligned.
    [[nodiscard]] bool is_run(std::int64_t row, std::int64_t begin, std::int64_t n) const;
    /// Elements [begin, begin + n) of a row: in place where they are such a run of float32, else through `scratch`.
    const float* read(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n,
                      std::vector<float>& scratch) const;
    /// The same, copied to `out`.
    void read(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n, float* out) const;
};

/// `index` counts the matrices of the batch; axis -2 swaps rows and columns.
NumberMatrix number_matrix(const Array& array, int axis, const Shape& batch, std::int64_t index);

/// A matrix of numbers that is written.
struct OutputMatrix : NumberMatrix {
    [[nodiscard]] std::byte* at(std::int64_t row, std::int64_t col) const {
        return const_cast<std::byte*>(element(row, col));
    }
    /// Where such a run lies, else null.
    [[nodiscard]] void* in_place(std::int64_t row, std::int64_t begin, std::int64_t n) const {
        return is_run(row, begin, n) ? at(row, begin) : nullptr;
    }
    /// Rounds to the matrix's type, nearest even.
    void write(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n, const float* x) const;
};

inline OutputMatrix output_matrix(const Array& out, int axis, const Shape& batch, std::int64_t index) {
    return {number_matrix(out, axis, batch, index)};
}

/// Working memory of one thread; sized on first use, then reused row after row.
struct Scratch {
    std::vector<std::uint8_t> codes;
    std::vector<float> scales, zero_points, values, transformed, gathered, gathered_weights, expanded;
    std::vector<std::int32_t> amax;
};

/// Scales or zero points of one matrix, as a (rows, columns) grid in storage order: with stride 0 along an axis that
/// the array does not have.
struct GridView {
    const std::byte* data = nullptr;              ///< null where there are none
    std::int64_t row_stride = 0, col_stride = 0;  // bytes
    [[nodiscard]] const std::byte* at(std::int64_t row, std::int64_t col) const {
        return data + row * row_stride + col * col_stride;
    }
};

/// One matrix of a ScaledTensor.
struct ScaledMatrix {
    Format element{};
    BlockGrid grid;
    bool packed = false;
    const std::uint8_t* data = nullptr;
    std::int64_t row_stride = 0, col_stride = 0;  // bytes; columns step by byte, two codes where packed
    ScaleType scale_type = ScaleType::float32;
    GridView scale, zero_point;
    ElementType zero_point_type;
    bool expanded = false;  ///< the zero points are exponents
    float global_scale = 1;
    bool global_divides = false;

    /// Bytes of a row's codes, whatever lies between rows.
    [[nodiscard]] std::int64_t row_bytes() const { return packed ? (grid.cols + 1) / 2 : grid.cols; }
    /// Dequantized elements [begin, begin + n) of a row, as float32 or another type that has a kernel.
    void read(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n, Scratch& scratch,
              void* out, DType dtype = DType::float32) const;
    /// A block's scale, or a sum of products without it, with the global scale applied.
    [[nodiscard]] float with_global(float x) const { return global_divides ? x / global_scale : x * global_scale; }
    /// The scale of a block, the global scale included.
    [[nodiscard]] float scale_at(std::int64_t block_row, std::int64_t block_col) const;
    [[nodiscard]] float zero_point_at(std::int64_t block_row, std::int64_t block_col) const;

private:
    void read_expanded(const KernelTable& kernels, const DequantizeRow& row, Scratch& scratch, DType dtype) const;
};

ScaledMatrix scaled_matrix(const ScaledTensor& scaled, const Shape& batch, std::int64_t index);

/// Whether the global scale multiplies what is read, or divides it where it does so.
enum class GlobalScale : bool { left_out, applied };

/// Scales of blocks [first, first + n) of a block row.
void read_scales(const KernelTable& kernels, const ScaledMatrix& m, std::int64_t block_row, std::int64_t first,
                 std::int64_t n, float* out, GlobalScale global = GlobalScale::left_out);

/// A row's scales, the global scale included, as if each of its blocks were several of `block` elements: to floats of
/// `out` that are `stride` apart.
void read_finer_scales(const KernelTable& kernels, const ScaledMatrix& m, std::int64_t row, std::int64_t block,
                       std::vector<float>& scratch, float* out, std::int64_t stride);

}  // namespace breccia::inline v0_4
