// SPDX-License-Identifier: Apache-2.0
//
// Calls of breccia.h with matrices and batches of any shape, type, recipe, size and pointers. Memory of every part has
// exactly the bytes that the header names, so that one more is seen by the sanitizer. Each call gives a status of the
// header, and a sentence exactly where it failed; what the header allows is done, and products of a weight, prepared or
// not, by either verb give the same bytes.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "breccia/breccia.h"
#include "input.hpp"

namespace breccia::fuzz {
namespace {

constexpr std::int64_t most_elements = 1 << 13, most_bytes = 8 * most_elements;

breccia_status checked(breccia_status status) {
    const char* message = breccia_last_message();
    expect(message != nullptr, "a message is never null");
    expect(status >= BRECCIA_OK && status <= BRECCIA_NO_MEMORY, "a status of the header, and no internal error");
    expect((status == BRECCIA_OK) == (*message == '\0'), "a sentence exactly where a call failed");
    if (status != BRECCIA_OK) expect(std::strlen(message) > 8, "a sentence");
    return status;
}

// Numbers by which an integer field is read, and some by which it is not.
std::string value_text(Input& in, const FieldSpec& spec) {
    constexpr std::array odd = {"", "true", "false", "=", "-1", "0", "9223372036854775807", "9223372036854775808"};
    if (in.one_in(16)) return odd[static_cast<std::size_t>(in.below(odd.size()))];
    switch (spec.kind) {
        case FieldSpec::Kind::choice: {
            std::string_view rest = spec.text;
            for (std::int64_t skip = in.below(4); skip > 0 && rest.find('|') != std::string_view::npos; --skip)
                rest.remove_prefix(rest.find('|') + 1);
            return std::string(rest.substr(0, rest.find('|')));
        }
        case FieldSpec::Kind::boolean: return in.below(2) == 1 ? "true" : "false";
        case FieldSpec::Kind::fixed: return std::to_string(spec.number);
        default: return std::to_string(in.extent());
    }
}

// Bytes of any value, none of them zero.
std::string any_text(Input& in) {
    std::string text(static_cast<std::size_t>(in.one_in(16) ? 4096 : in.below(24)), 'x');
    in.fill(reinterpret_cast<std::uint8_t*>(text.data()), std::min<std::size_t>(text.size(), 32));
    std::ranges::replace(text, '\0', ',');
    return text;
}

// A string whose memory ends with its zero.
std::unique_ptr<char[]> exact(const std::string& text) {
    auto memory = std::make_unique<char[]>(text.size() + 1);
    std::memcpy(memory.get(), text.c_str(), text.size() + 1);
    return memory;
}

class AnyRecipe {
public:
    explicit AnyRecipe(Input& in) {
        const auto rows = catalogue();
        const RecipeRow& row = rows[static_cast<std::size_t>(in.below(static_cast<std::int64_t>(rows.size())))];
        std::string name(in.below(2) == 1 ? row.name : row.short_name), fields;
        for (const FieldSpec& spec : row.fields)
            if (in.one_in(3))
                fields += (fields.empty() ? "" : ",") + std::string(spec.name) + "=" + value_text(in, spec);
        if (in.one_in(16)) name = any_text(in);
        if (in.one_in(16)) fields += any_text(in);
        const bool null_name = in.one_in(64), null_recipe = in.one_in(64), null_fields = fields.empty();
        // What stands there before the call is no recipe, and must not stay.
        made_ = reinterpret_cast<breccia_recipe*>(this);
        const breccia_status status =
            checked(breccia_recipe_new(null_name ? nullptr : exact(name).get(),
                                       null_fields ? nullptr : exact(fields).get(), null_recipe ? nullptr : &made_));
        if (null_recipe) made_ = nullptr;
        expect((status == BRECCIA_OK) == (made_ != nullptr), "a recipe exactly where the call succeeded");
        if (null_name || null_recipe) expect(status == BRECCIA_VALUE_ERROR, "NULL is refused");
    }
    ~AnyRecipe() { breccia_recipe_free(made_); }
    AnyRecipe(const AnyRecipe&) = delete;
    AnyRecipe& operator=(const AnyRecipe&) = delete;

    [[nodiscard]] const breccia_recipe* get() const { return made_; }

private:
    breccia_recipe* made_ = nullptr;
};

// What a program of a later header hands over: a struct, and members of which this library knows nothing.
template <class T>
struct Later {
    T known{};
    std::int64_t added = 0;
};

// A matrix and the memory of its parts, each of the bytes that it must have; a part that would be large is NULL, which
// verbs refuse. It can be read and written.
class Matrix {
public:
    Matrix(Input& in, const breccia_recipe* recipe, std::int64_t batch, std::int64_t rows, std::int64_t columns)
        : read_(std::make_unique<Later<breccia_matrix>>()), write_(std::make_unique<Later<breccia_output>>()) {
        breccia_matrix& m = read_->known;
        m.recipe = recipe;
        m.dtype = static_cast<breccia_dtype>(in.below(dtype_count));
        m.batch = batch;
        m.rows = rows;
        m.columns = columns;
        add_parts(in, recipe == nullptr ? bytes_of_numbers() : bytes_of_parts());
        if (in.one_in(32)) change(in);
        m.size = sizeof(breccia_matrix);
        write_->known.size = sizeof(breccia_output);
        if (in.one_in(16)) m.size += sizeof read_->added, write_->known.size += sizeof write_->added;
        if (in.one_in(64)) change_size(in);
        same_as_read();
    }

    [[nodiscard]] const breccia_matrix* get() const { return &read_->known; }
    [[nodiscard]] const breccia_output* out() const { return &write_->known; }
    [[nodiscard]] const std::vector<std::uint8_t>& part(std::size_t i) const { return parts_[i]; }
    /// Whether all is as the header asks, so that a verb may not refuse it alone.
    [[nodiscard]] bool is_whole() const { return whole_; }
    void transpose() { read_->known.transposed = 1; }
    void share_data(const Matrix& other) {
        read_->known.data = other.get()->data;
        whole_ = false;
        same_as_read();
    }

private:
    breccia_part_bytes bytes_of_parts() {
        const auto bytes = std::make_unique<breccia_part_bytes>();
        *bytes = {};
        bytes->size = sizeof *bytes;
        const breccia_matrix& m = read_->known;
        const breccia_status status = checked(breccia_part_sizes(m.recipe, m.batch, m.rows, m.columns, bytes.get()));
        if (status != BRECCIA_OK) {
            expect((bytes->data | bytes->scale | bytes->zero_point | bytes->global_scale) == 0, "sizes are untouched");
            whole_ = false;
        }
        expect(bytes->data >= 0 && bytes->scale >= 0 && bytes->zero_point >= 0, "sizes are not negative");
        expect(bytes->global_scale == 0 || bytes->global_scale == 4, "a global scale is one float");
        return *bytes;
    }
    breccia_part_bytes bytes_of_numbers() {
        const breccia_matrix& m = read_->known;
        if (m.rows < 0 || m.columns < 0 || m.batch < 0) whole_ = false;
        if (!whole_) return {};
        constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
        const auto item = static_cast<std::int64_t>(ElementType(static_cast<DType>(m.dtype)).size());
        const __int128 count = static_cast<__int128>(m.rows) * m.columns;
        if (count > most / item || count * std::max<std::int64_t>(m.batch, 1) > most / item) return {0, most, 0, 0, 0};
        return {0, static_cast<std::int64_t>(count) * std::max<std::int64_t>(m.batch, 1) * item, 0, 0, 0};
    }
    void add_parts(Input& in, const breccia_part_bytes& bytes) {
        const std::int64_t wanted[] = {bytes.data, bytes.scale, bytes.zero_point, bytes.global_scale};
        for (std::size_t i = 0; i < 4; ++i) {
            if (wanted[i] == 0) continue;
            whole_ = whole_ && wanted[i] <= most_bytes;
            if (wanted[i] > most_bytes) continue;
            parts_[i] = std::vector<std::uint8_t>(static_cast<std::size_t>(wanted[i]));
            in.fill(parts_[i].data(), parts_[i].size());
            *pointers()[i] = parts_[i].data();
        }
    }
    void change(Input& in) {
        whole_ = false;
        breccia_matrix& m = read_->known;
        switch (in.below(4)) {
            case 3: return shift(in);
            case 0: m.dtype = static_cast<breccia_dtype>(in.byte()) - 1; break;
            case 1: m.transposed = static_cast<std::int32_t>(in.extent()); break;
            default: *pointers()[static_cast<std::size_t>(in.below(4))] = nullptr;
        }
        // A type of more bytes would be read beyond the memory, which only the caller can know.
        if (m.recipe == nullptr && m.dtype >= 0 && m.dtype < dtype_count) m.data = nullptr;
    }
    // Memory of a part begins a byte later, and is as large: what has items of more bytes is refused.
    void shift(Input& in) {
        const auto i = static_cast<std::size_t>(in.below(4));
        if (parts_[i].empty()) return;
        parts_[i].insert(parts_[i].begin(), 0);
        *pointers()[i] = parts_[i].data() + 1;
    }
    // A size that no header has, or a member that this one has not.
    void change_size(Input& in) {
        whole_ = false;
        read_->added = write_->added = in.byte() + 1;
        if (in.below(2) == 1)
            read_->known.size = write_->known.size = static_cast<std::size_t>(in.below(sizeof(breccia_output)));
        else
            read_->known.size = sizeof *read_, write_->known.size = sizeof *write_;
    }
    void same_as_read() {
        const breccia_matrix& m = read_->known;
        breccia_output& to = write_->known;
        to.recipe = m.recipe;
        to.batch = m.batch;
        to.rows = m.rows;
        to.columns = m.columns;
        to.dtype = m.dtype;
        to.reserved = m.transposed;
        to.data = const_cast<void*>(m.data);
        to.scale = const_cast<void*>(m.scale);
        to.zero_point = const_cast<void*>(m.zero_point);
        to.global_scale = const_cast<void*>(m.global_scale);
    }
    std::array<const void**, 4> pointers() {
        breccia_matrix& m = read_->known;
        return {&m.data, &m.scale, &m.zero_point, &m.global_scale};
    }

    std::unique_ptr<Later<breccia_matrix>> read_;
    std::unique_ptr<Later<breccia_output>> write_;
    std::array<std::vector<std::uint8_t>, 4> parts_;
    bool whole_ = true;
};

// A pointer to it, to read or to write, at times NULL, which every verb refuses.
template <class T>
class Given {
public:
    Given(Input& in, const Matrix& matrix, const T* pointer)
        : pointer_(in.one_in(64) ? nullptr : pointer), matrix_(&matrix) {}
    operator const T*() const { return pointer_; }
    [[nodiscard]] bool is_whole() const { return pointer_ != nullptr && matrix_->is_whole(); }
    [[nodiscard]] bool is_null() const { return pointer_ == nullptr; }

private:
    const T* pointer_;
    const Matrix* matrix_;
};
Given<breccia_matrix> read(Input& in, const Matrix& matrix) { return {in, matrix, matrix.get()}; }
Given<breccia_output> write(Input& in, const Matrix& matrix) { return {in, matrix, matrix.out()}; }

bool same_shape(const Matrix& a, const Matrix& b) {
    return a.get()->batch == b.get()->batch && a.get()->rows == b.get()->rows && a.get()->columns == b.get()->columns;
}

// Matrices as the header asks, of one shape, are not refused, and NULL always is.
template <class Verb>
breccia_status conversion(Verb verb, const Given<breccia_matrix>& from, const Given<breccia_output>& to, bool fits) {
    const breccia_status status = checked(verb(from, to));
    if (from.is_null() || to.is_null()) expect(status == BRECCIA_VALUE_ERROR, "NULL is refused");
    if (fits && from.is_whole() && to.is_whole()) expect(status == BRECCIA_OK, "what the header allows is done");
    return status;
}

std::int64_t near(Input& in, std::int64_t extent) { return in.one_in(32) ? in.extent() : extent; }

std::int64_t any_batch(Input& in) { return in.one_in(32) ? in.extent() : in.one_in(3) ? in.below(4) : 0; }

bool is_small(std::int64_t rows, std::int64_t columns) {
    return std::max<std::int64_t>(rows, 1) <= most_elements / std::max<std::int64_t>(columns, 1);
}

// The options of a cast, and what they point to.
struct AnyOptions {
    AnyOptions(Input& in, std::int64_t columns) {
        options.size = sizeof options;
        if (in.one_in(4)) {
            columns = near(in, columns);
            if (!is_small(1, columns)) columns = 1;
            importance = std::make_unique<Matrix>(in, nullptr, 0, near(in, 1), columns);
            options.importance = importance->get();
        }
        if (in.one_in(8)) {
            amax.resize(static_cast<std::size_t>(in.below(8)));
            in.fill(reinterpret_cast<std::uint8_t*>(amax.data()), amax.size() * sizeof(float));
            options.amax = amax.empty() ? nullptr : amax.data();
            options.amax_count = static_cast<std::int64_t>(amax.size());
        }
        options.stochastic = in.one_in(3) ? 1 : 0;
        options.seed = in.byte();
        if (in.one_in(8)) options.offset = in.extent();
        if (in.one_in(8)) options.row_length = in.extent();
        if (in.one_in(64)) options.reserved = 1;
        if (in.one_in(64)) options.size = static_cast<std::size_t>(in.below(sizeof options));
    }
    breccia_cast_options options{};
    std::unique_ptr<Matrix> importance;
    std::vector<float> amax;
};

// The verbs of one operand: numbers to codes, codes to codes, codes to numbers.
void conversions(Input& in) {
    const AnyRecipe recipe(in), other(in);
    const std::int64_t batch = any_batch(in), rows = in.extent(), columns = in.extent();
    const Matrix x(in, in.one_in(32) ? recipe.get() : nullptr, batch, rows, columns);
    const Matrix codes(in, recipe.get(), near(in, batch), near(in, rows), near(in, columns));
    const Matrix changed(in, other.get(), near(in, batch), near(in, rows), near(in, columns));
    Matrix numbers(in, in.one_in(32) ? other.get() : nullptr, near(in, batch), near(in, rows), near(in, columns));
    if (in.one_in(16)) numbers.share_data(codes);
    const auto kinds = [](const Matrix& from, const Matrix& to, bool from_codes, bool to_codes) {
        return same_shape(from, to) && (from.get()->recipe != nullptr) == from_codes &&
               (to.get()->recipe != nullptr) == to_codes;
    };
    if (in.below(2) == 1) {
        const AnyOptions any(in, columns);
        const breccia_cast_options* options = in.one_in(2) ? &any.options : nullptr;
        const auto cast = [&](const breccia_matrix* from, const breccia_output* to) {
            return breccia_cast(from, to, options);
        };
        const breccia_status status =
            conversion(cast, read(in, x), write(in, codes), options == nullptr && kinds(x, codes, false, true));
        if (status == BRECCIA_OK) {
            const std::vector<std::uint8_t> first = codes.part(0), scales = codes.part(1);
            expect(cast(x.get(), codes.out()) == BRECCIA_OK, "a cast again");
            expect(first == codes.part(0) && scales == codes.part(1), "the same bytes of the same numbers");
        }
    }
    conversion(breccia_requantize, read(in, codes), write(in, changed), kinds(codes, changed, true, true));
    conversion(breccia_dequantize, read(in, codes), write(in, numbers), kinds(codes, numbers, true, false));
}

// The experts of a batch of weights, by any offsets.
void grouped(Input& in) {
    const AnyRecipe recipe(in);
    const std::int64_t experts = 1 + in.below(4), t = in.below(24), n = 1 + in.below(16), k = 16 * (1 + in.below(8));
    const Matrix x(in, nullptr, 0, t, near(in, k)), w(in, recipe.get(), experts, n, k), out(in, nullptr, 0, t, n);
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(experts) + 1);
    for (std::size_t i = 1; i < offsets.size(); ++i) offsets[i] = std::min(t, offsets[i - 1] + in.below(8));
    const bool odd = in.one_in(8);
    if (odd) offsets[static_cast<std::size_t>(in.below(experts + 1))] = in.extent();
    const Given<breccia_matrix> a = read(in, x), b = read(in, w);
    const Given<breccia_output> c = write(in, out);
    const breccia_status status = checked(breccia_grouped_matmul(a, b, offsets.data(), c, nullptr));
    const bool codes = w.get()->recipe != nullptr;
    if (!odd && codes && a.is_whole() && b.is_whole() && c.is_whole() && x.get()->columns == k)
        expect(status == BRECCIA_OK, "what the header allows is done");
}

// x @ transpose of w, by either verb and by the prepared weight, with the same bytes. Operands without elements may
// have a product with many.
void products(Input& in) {
    const AnyRecipe recipe(in), other(in);
    const std::int64_t batch = any_batch(in), m = in.extent(), n = in.extent(), k = in.extent();
    const bool small = batch >= 0 && batch <= 8 && is_small(m, n) && is_small(m, k) && is_small(n, k);
    if (!small) {
        const Matrix x(in, other.get(), batch, m, k), w(in, recipe.get(), 0, n, k);  // sizes alone
        return;
    }
    const Matrix x(in, in.one_in(4) ? other.get() : nullptr, batch, m, near(in, k));
    Matrix w(in, in.one_in(4) ? nullptr : recipe.get(), 0, n, near(in, k));
    const Matrix bias(in, nullptr, 0, near(in, 1), near(in, n));
    Matrix out(in, in.one_in(64) ? recipe.get() : nullptr, near(in, batch), near(in, m), near(in, n));
    if (in.one_in(16)) out.share_data(x);
    const Given<breccia_matrix> a = read(in, x), b = read(in, w);
    const Given<breccia_output> c = write(in, out);
    const breccia_matrix* const row = in.one_in(3) ? bias.get() : nullptr;
    const breccia_product_options precise = {sizeof precise, in.one_in(4) ? BRECCIA_FAST : BRECCIA_EXACT, 0};
    const breccia_product_options* options = in.one_in(2) ? &precise : nullptr;
    const breccia_status linear = checked(breccia_linear(a, b, row, c, options));
    if (a.is_null() || b.is_null() || c.is_null()) expect(linear == BRECCIA_VALUE_ERROR, "NULL is refused");
    const bool whole = a.is_whole() && b.is_whole() && c.is_whole() && (row == nullptr || bias.is_whole());
    const bool fits = x.get()->columns == w.get()->columns && out.get()->batch == batch && out.get()->rows == m &&
                      out.get()->columns == n &&
                      (row == nullptr || (bias.get()->rows == 1 && bias.get()->columns == n));
    if (whole && fits && out.get()->recipe == nullptr && m > 0 && n > 0 && k > 0)
        expect(linear == BRECCIA_OK, "what the header allows is done");
    const std::vector<std::uint8_t> first = out.part(0);
    if (!w.is_whole()) return;
    w.transpose();
    const breccia_status matmul = checked(breccia_matmul(a, b, c, options));
    if (row == nullptr) {
        expect(x.get()->transposed != 0 || linear == matmul, "breccia_linear and breccia_matmul take the same");
        if (linear == BRECCIA_OK) expect(first == out.part(0), "breccia_linear and breccia_matmul give the same");
    }
    if (matmul != BRECCIA_OK || w.get()->recipe == nullptr) return;
    breccia_matrix stored = *w.get(), ready{};
    stored.size = sizeof stored;
    stored.transposed = 0;
    breccia_weight* prepared = nullptr;
    expect(breccia_prepare(&stored, &prepared) == BRECCIA_OK, "a weight that is multiplied can be prepared");
    ready.size = sizeof ready;
    ready.prepared = prepared;
    ready.transposed = 1;
    expect(checked(breccia_matmul(a, &ready, c, options)) == BRECCIA_OK, "a prepared weight is the weight");
    breccia_weight_free(prepared);
}

}  // namespace
}  // namespace breccia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace breccia;
    fuzz::Input in(data, size);
    set_num_threads(1);
    fuzz::expect(breccia_version() == version(), "the version");
    switch (in.below(5)) {
        case 0: fuzz::grouped(in); break;
        case 1:
        case 2: fuzz::products(in); break;
        default: fuzz::conversions(in);
    }
    return 0;
}
