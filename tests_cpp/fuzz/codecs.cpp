// SPDX-License-Identifier: Apache-2.0
//
// Codes of any bytes and of any numbers: every backend gives what the codec itself gives, one value at a time.
#include <algorithm>

#include "input.hpp"

namespace breccia::fuzz {
namespace {

void check(Format format, const std::vector<std::uint8_t>& codes, const std::vector<float>& numbers) {
    const FormatInfo& codec = info(format);
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        std::vector<float> values(codes.size());
        decode(codes, format, values);
        for (std::size_t i = 0; i < codes.size(); ++i) {
            const float wanted = codec.decode(codes[i]);
            expect(bits_of(values[i]) == bits_of(wanted) || (is_nan(values[i]) && is_nan(wanted)), "decode");
        }
        std::vector<std::uint8_t> encoded(numbers.size());
        encode(numbers, format, encoded);
        for (std::size_t i = 0; i < numbers.size(); ++i) expect(encoded[i] == codec.encode(numbers[i]), "encode");
        if (!is_packed(format)) continue;
        std::vector<std::uint8_t> packed((encoded.size() + 1) / 2), apart(encoded.size());
        pack(encoded, packed);
        unpack(packed, apart);
        expect(apart == encoded, "unpack(pack)");
    }
}

}  // namespace
}  // namespace breccia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace breccia;
    fuzz::Input in(data, size);
    const Format format{static_cast<std::uint8_t>(in.below(static_cast<std::int64_t>(format_table.size())))};
    std::vector<std::uint8_t> codes(size == 0 ? 0 : size - 1);
    in.fill(codes.data(), codes.size());
    std::vector<float> numbers(codes.size() / sizeof(float));
    if (!numbers.empty()) std::memcpy(numbers.data(), codes.data(), numbers.size() * sizeof(float));
    fuzz::check(format, codes, numbers);
    return 0;
}
