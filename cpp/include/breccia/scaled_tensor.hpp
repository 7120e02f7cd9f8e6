// SPDX-License-Identifier: Apache-2.0
//
// A quantized tensor: codes, scales and what they mean, checked once.
#pragma once

#include "breccia/recipe.hpp"

namespace breccia::inline v0_4 {

struct InterleavedWeight;

/// The optional parts of a ScaledTensor.
struct Extras {
    std::optional<Array> zero_point = {};    ///< shaped like the scale; value = (code - zero_point) * scale. Of recipes
                                             ///< with exponents these, float16: see ScaledTensor
    std::optional<Array> global_scale = {};  ///< float32; one number, or one per matrix of a batch; see two_level
    std::optional<Shape> shape = {};         ///< the logical shape, where packed data leaves it open
    DType original_dtype = DType::float32;   ///< of what was cast: what to dequantize to, by a user's choice
};

/// An immutable block-scaled tensor: value = (decode(data) - zero_point) * scale, where the global scale has multiplied
/// the block's scale, or divided it where the recipe says so, in float32. Where the recipe is one with exponents k,
/// value = sign(code) * amax * (|code| / max)^(1 / k), with amax = max * scale, max being the format's largest value; k
/// = 1 stands for code * scale. The amax of a scale that a cast makes is at most the largest float32.
///
/// The constructor checks every invariant once; nothing downstream checks again. Arrays may be owned or borrowed,
/// of any strides; copies and transposed views share them.
class BRECCIA_API ScaledTensor {
public:
    /// Throws Error when an array has the wrong type or shape for the recipe and layout.
    ScaledTensor(Array data, Array scale, Recipe recipe, Layout layout, Extras extras = {});

    /// Its parts, as they were given. References live as long as the tensor; copies of the arrays share their memory.
    /// @{
    [[nodiscard]] const Array& data() const { return data_; }
    [[nodiscard]] const Array& scale() const { return scale_; }
    [[nodiscard]] const std::optional<Array>& zero_point() const { return extras_.zero_point; }
    [[nodiscard]] const std::optional<Array>& global_scale() const { return extras_.global_scale; }
    [[nodiscard]] const Recipe& recipe() const { return recipe_; }
    [[nodiscard]] const Layout& layout() const { return layout_; }
    [[nodiscard]] DType original_dtype() const { return extras_.original_dtype; }
    /// @}

    [[nodiscard]] const Shape& shape() const { return shape_; }  ///< logical: counts values, not bytes
    /// The layout's blocks of each of its matrices.
    [[nodiscard]] const BlockGrid& grid() const { return grid_; }
    /// Whether two codes share a byte.
    [[nodiscard]] bool is_packed() const { return packed_; }
    /// What the scale holds, which need not be what the recipe makes.
    [[nodiscard]] ScaleType scale_type() const { return scale_type_; }
    /// Bytes of data, scale, zero point and global scale.
    [[nodiscard]] std::int64_t nbytes() const;

    /// The last two axes swapped; shares all memory.
    [[nodiscard]] ScaledTensor transposed() const;

    /// Bytes of what a PreparedWeight adds to its tensor; of other tensors 0.
    [[nodiscard]] std::int64_t packed_nbytes() const;

private:
    friend class PreparedWeight;
    friend const InterleavedWeight* interleaved_of(const ScaledTensor& scaled);
    void check_data();
    void check_scale();
    void check_zero_point() const;
    void check_global_scale() const;
    void resolve_shape();
    void take_shape(const Shape& wanted, bool may_pack, std::size_t pack_axis);
    void find_shape(bool may_pack, std::size_t pack_axis);

    Array data_, scale_;
    Recipe recipe_;
    Layout layout_;
    Extras extras_;
    Shape shape_;
    BlockGrid grid_;
    ScaleType scale_type_ = ScaleType::float32;
    bool packed_ = false;
    std::shared_ptr<const InterleavedWeight> interleaved_;
};

}  // namespace breccia::inline v0_4
