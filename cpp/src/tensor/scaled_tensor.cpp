// SPDX-License-Identifier: Apache-2.0
#include "breccia/scaled_tensor.hpp"

#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

// Bytes a row of n values takes when two share a byte.
std::int64_t packed_extent(std::int64_t n) { return (n + 1) / 2; }

}  // namespace

ScaledTensor::ScaledTensor(Array data, Array scale, Recipe recipe, Layout layout, Extras extras)
    : data_(std::move(data)), scale_(std::move(scale)), recipe_(recipe), layout_(layout), extras_(std::move(extras)) {
    check_enumerators(recipe_);
    validate(layout_);
    validate(data_, "data");
    validate(scale_, "scale");
    if (extras_.zero_point) validate(*extras_.zero_point, "zero_point");
    if (extras_.global_scale) validate(*extras_.global_scale, "global_scale");
    check_data();
    check_scale();
    resolve_shape();
    layout_.validate(shape_, scale_.shape);
    grid_ = layout_.grid(shape_);
    check_zero_point();
    check_global_scale();
}

void ScaledTensor::check_data() {
    if (data_.rank() < 1) throw_value("data must be at least 1-D, got 0-D");
    element_count(data_.shape, 2 * data_.type.size());  // two codes per byte
    const FormatInfo& element = info(recipe_.element);
    const ElementType type = data_.type;
    const bool names_format = type.is_codes() || type.is_packed_codes();
    if (names_format ? type.format() == recipe_.element : type.is_byte()) return;
    throw_type("data must hold ", element.name, " codes (uint8 or ", element.name, ") for ", recipe_.name,
               ", got dtype ", type.name());
}

void ScaledTensor::check_scale() {
    const ElementType type = scale_.type;
    const bool coded = is_coded(recipe_.scale);
    const auto codes_of = [&](ScaleType scale) { return type.is_codes() && type.format() == format_of_scale(scale); };
    // Codes in an array of numbers would be off by orders of magnitude, but numbers are numbers whatever their width.
    if (type.is_number() && !coded)
        scale_type_ = static_cast<ScaleType>(type.dtype());
    else if (coded && (type == ElementType::uint8() || codes_of(recipe_.scale)))
        scale_type_ = recipe_.scale;
    else if (codes_of(ScaleType::e8m0))
        scale_type_ = ScaleType::e8m0;
    else if (recipe_.scale == ScaleType::bfloat16 && type.is_half_word())
        scale_type_ = ScaleType::bfloat16;
    else
        throw_type("scale must be ",
                   coded ? "uint8 or " + name_of(recipe_.scale) + " codes" : "a float32, float16 or bfloat16 array",
                   " for ", recipe_.name, ", got dtype ", type.name());
}

// Whether 4-bit data is packed follows from its type where that says so, else from the logical shape where it was
// given, else from which reading fits the scale; packed where both do.
void ScaledTensor::resolve_shape() {
    const ElementType type = data_.type;
    const bool may_pack = breccia::is_packed(recipe_.element) && !type.is_codes() && type != ElementType::int8();
    if (data_.rank() < 2 && layout_.axis == -2) throw_value("layout: axis=-2 needs data of at least 2-D");
    const std::size_t pack_axis = data_.rank() - static_cast<std::size_t>(-layout_.axis);
    extras_.shape ? take_shape(*extras_.shape, may_pack, pack_axis) : find_shape(may_pack, pack_axis);
}

void ScaledTensor::take_shape(const Shape& wanted, bool may_pack, std::size_t pack_axis) {
    element_count(wanted, 2);
    Shape stored = wanted;
    if (may_pack && stored.size() == data_.rank()) stored[pack_axis] = packed_extent(stored[pack_axis]);
    packed_ = may_pack && stored == data_.shape;
    if (!packed_ && (wanted != data_.shape || data_.type.is_packed_codes()))
        throw_value("shape ", wanted, " must be the logical shape of data, whose stored shape is ", data_.shape);
    shape_ = wanted;
}

// Of the readings of the data the first that fits the scale: two codes to a byte, one, two but for the last byte of
// each row, which has one. Where none fits: what the message of the layout is to speak of.
void ScaledTensor::find_shape(bool may_pack, std::size_t pack_axis) {
    const auto fits = [&](const Shape& shape) { return layout_.fits(shape, scale_.shape); };
    Shape as_packed = data_.shape;
    if (may_pack) as_packed[pack_axis] *= 2;
    packed_ = may_pack && (data_.type.is_packed_codes() || fits(as_packed) || !fits(data_.shape));
    shape_ = packed_ ? as_packed : data_.shape;
    if (!packed_ || data_.type.is_packed_codes() || fits(as_packed)) return;

    // An odd number of groups of odd size leaves the last nibble of a row unused.
    Shape odd = as_packed;
    odd[pack_axis] -= 1;
    if (odd[pack_axis] > 0 && fits(odd)) {
        shape_ = odd;
        return;
    }
    const bool blocks = layout_.kind == LayoutKind::per_block_k || layout_.kind == LayoutKind::per_block_mn;
    if (blocks && layout_.divides(data_.shape))
        throw_value(name_of(layout_.kind), ": scale.shape must be ", layout_.scale_shape(as_packed),
                    " for data of shape ", data_.shape, " with two codes per byte, or ",
                    layout_.scale_shape(data_.shape), " with one, got ", scale_.shape);
    packed_ = false;
    shape_ = data_.shape;
}

void ScaledTensor::check_zero_point() const {
    const auto& zero_point = extras_.zero_point;
    if (!zero_point) {
        if (recipe_.has_zero_point())
            throw_value("zero_point is required for ", recipe_.name, "(symmetric=", false, ")");
        if (recipe_.is_expanded())
            throw_value("zero_point is required for ", recipe_.name, ": it holds the groups' exponents");
        return;
    }
    if (!recipe_.is_expanded() && info(recipe_.element).family != CodecFamily::integer)
        throw_value("zero_point must be ", spelled_none(), " for ", recipe_.name, ": only integer codes have one");
    if (zero_point->shape != scale_.shape)
        throw_value("zero_point.shape (", zero_point->shape, ") must match scale.shape (", scale_.shape, ")");
    const ElementType type = zero_point->type;
    if (recipe_.is_expanded()) {
        if (type == ElementType(DType::float16)) return;
        throw_type("zero_point must be a float16 array of exponents for ", recipe_.name, ", got dtype ", type.name());
    }
    const bool integers = type.is_codes() && info(type.format()).family == CodecFamily::integer;
    if (!type.is_byte() && !type.is_number() && !integers)
        throw_type("zero_point must be an integer or float array, got dtype ", type.name());
}

void ScaledTensor::check_global_scale() const {
    const auto& global = extras_.global_scale;
    if (!global) {
        if (recipe_.two_level) throw_value("global_scale is required for ", recipe_.name, "(two_level=", true, ")");
        return;
    }
    if (global->type != ElementType(DType::float32))
        throw_type("global_scale must be a float32 array, got dtype ", global->type.name());
    if (global->size() == 1) return;
    Shape per_matrix = shape_;
    if (per_matrix.size() >= 2) {
        per_matrix[per_matrix.size() - 1] = 1;
        per_matrix[per_matrix.size() - 2] = 1;
    }
    if (global->shape != per_matrix)
        throw_value("global_scale.shape must be () or ", per_matrix, ", got ", global->shape);
}

std::int64_t ScaledTensor::nbytes() const {
    std::int64_t total = 0;
    for (const Array* part : Parts(*this)) total += part->size() * static_cast<std::int64_t>(part->type.size());
    return total;
}

ScaledTensor ScaledTensor::transposed() const {
    if (data_.rank() < 2) return *this;
    ScaledTensor result = *this;
    result.data_ = data_.transposed();
    if (layout_.kind != LayoutKind::per_tensor) {
        // A scale without its constant axis gets it back, so that there are two axes to swap.
        const auto restore = [&](Array array) {
            if (array.rank() < data_.rank()) {
                const auto at = static_cast<std::ptrdiff_t>(data_.rank()) + layout_.axis;
                array.shape.insert(array.shape.begin() + at, 1);
                array.strides.insert(array.strides.begin() + at, 0);
            }
            return array.transposed();
        };
        result.scale_ = restore(scale_);
        if (extras_.zero_point) result.extras_.zero_point = restore(*extras_.zero_point);
    }
    result.layout_ = layout_.transposed();
    std::swap(result.shape_[result.shape_.size() - 1], result.shape_[result.shape_.size() - 2]);
    if (extras_.shape) result.extras_.shape = result.shape_;
    return result;
}

}  // namespace breccia::inline v0_4
