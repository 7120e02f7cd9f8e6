// SPDX-License-Identifier: Apache-2.0
//
// An activation that is INT8 codes as Digits: one digit an element, which is its code.

/// `lifted`: the bias where the weight's E4M3 scales are read without theirs, see Digits; 1 for kernels that do not.
template <bool Packed>
static bool digits_of_codes(const DigitsOfCodes& p, float unit, int offset, float lifted) {
    constexpr std::int64_t step = row_step(Packed), of_lane = Packed ? 8 : 4;
    float least = 1, most = 1;
    for (std::int64_t b = 0; b < p.blocks; ++b) {
        const float magnitude = p.scales[b] < 0 ? -p.scales[b] : p.scales[b];
        if (magnitude == 0) continue;
        if (!(magnitude >= exp2i(-100) && magnitude <= exp2i(100))) return false;
        least = magnitude < least ? magnitude : least;
        most = magnitude > most ? magnitude : most;
    }
    // Numbers of up to 128 scales are within the range that pack_digits lifts.
    const bool lift = p.scale_type == ScaleType::e4m3 && least >= exp2i(-20) && most <= exp2i(10);
    p.out->bias = lift ? lifted : 1.0F;
    p.out->one_unit = p.blocks == 1;
    bool lowest = false;
    for (std::int64_t s = 0; s < p.steps; ++s) {
        DigitStep& to = p.out->steps[s];
        to.count = 1;
        for (int lane = 0; lane < 16; ++lane) {
            const std::int64_t k = s * step + lane * of_lane;
            std::int32_t sum = 0;
            for (int i = 0; i < of_lane; ++i) {
                const std::int8_t code = p.codes[k + i];
                to.digits[0][Packed ? i % 2 * 64 + lane * 4 + i / 2 : lane * 4 + i] = code;
                sum += code;
                lowest |= code == -128;
            }
            to.offsets[0][lane] = -(p.zero_points ? 1 : offset) * sum;
            const std::int64_t block = k / p.block < p.blocks ? k / p.block : p.blocks - 1;
            to.units[lane] = p.scales[block] * (unit * p.out->bias);
        }
    }
    p.out->symmetric = !lowest;
    return true;
}
