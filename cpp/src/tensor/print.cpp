// SPDX-License-Identifier: Apache-2.0
#include "breccia/print.hpp"

#include <ostream>

#include "tensor/checks.hpp"

namespace breccia::inline v0_4 {

std::string to_string(const Layout& layout) {
    std::string fields;
    if (layout.kind == LayoutKind::per_block_mn) fields = std::to_string(layout.block_m) + ", ";
    if (layout.kind == LayoutKind::per_block_mn || layout.kind == LayoutKind::per_block_k)
        fields += std::to_string(layout.block_n);
    if (layout.kind != LayoutKind::per_tensor && layout.axis != -1)
        fields += (fields.empty() ? "axis=" : ", axis=") + std::to_string(layout.axis);
    return std::string(name_of(layout.kind)) + "(" + fields + ")";
}

std::string to_string(const Recipe& recipe) {
    std::string text = recipe.name.empty() ? "Recipe" : std::string(recipe.name);
    text += "(" + std::string(info(recipe.element).name) + ", " + name_of(recipe.scale) + " scales, " +
            to_string(recipe.layout);
    if (recipe.has_zero_point()) text += ", zero points";
    if (recipe.is_expanded()) text += ", exponents";
    if (recipe.search == ScaleSearch::mse) text += ", mse";
    if (recipe.two_level) text += ", two_level";
    if (recipe.global_divides) text += ", global_divides";
    if (recipe.margin != 0) text += ", margin=" + std::to_string(recipe.margin);
    return text + ")";
}

std::string to_string(const ScaledTensor& scaled) {
    return "ScaledTensor " + to_string(scaled.shape()) + " " + to_string(scaled.recipe()) + ", " +
           std::to_string(scaled.nbytes()) + " bytes";
}

std::ostream& operator<<(std::ostream& stream, ElementType type) { return stream << type.name(); }
std::ostream& operator<<(std::ostream& stream, const Layout& layout) { return stream << to_string(layout); }
std::ostream& operator<<(std::ostream& stream, const Recipe& recipe) { return stream << to_string(recipe); }
std::ostream& operator<<(std::ostream& stream, const ScaledTensor& scaled) { return stream << to_string(scaled); }

}  // namespace breccia::inline v0_4
